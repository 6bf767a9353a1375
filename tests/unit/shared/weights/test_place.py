"""Places of weights: no secret of a URL comes back in an error, and drivers fail with ours."""

from __future__ import annotations

from importlib import import_module

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shared.errors import WeightsError
from shared.weights import WeightStore
from shared.weights.place import check_place


@pytest.mark.parametrize(
    "url", ["s3://key:s3cr3t@bucket/x", "s3://key:s3c/r3t@bucket/x", "gs://s3cr3t@bucket", "S3://key:s3cr3t"]
)
def test_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(WeightsError, match="takes no credentials in the URL") as caught:
        WeightStore(url)
    assert "r3t" not in caught.value.message


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "ftp://user:pw@host/folder", "/a/folder@home", "memory://x"])
def test_other_places_are_not(url: str) -> None:
    check_place(url)


def test_a_driver_that_raises_its_own_errors_fails_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise import_module("botocore.exceptions").NoCredentialsError

    monkeypatch.setattr(MemoryFileSystem, "find", refuse)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", refuse)
    store = WeightStore("memory://place")
    with pytest.raises(WeightsError, match="cannot be listed: Unable to locate credentials"):
        store.versions()
    with pytest.raises(WeightsError, match="cannot be read: Unable to locate credentials"):
        store.open("v1")


def test_a_driver_that_cannot_connect_fails_with_ours_and_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionRefusedError("ftp://user:s3cr3t@host refused")

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    with pytest.raises(WeightsError, match=r"ftp://\.\.\. cannot be used: ConnectionRefusedError: ftp://\*\*\*@host"):
        WeightStore("ftp://user:s3cr3t@host/x")
