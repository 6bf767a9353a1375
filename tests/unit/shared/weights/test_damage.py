"""Damaged versions: no wrong tensor is ever handed out, and the error names version and file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.clock import ManualClock
from shared.errors import WeightsError
from shared.weights import Manifest, WeightStore
from shared.weights.layout import view_tensors
from shared.weights.manifest import MANIFEST_BYTES_MAX

DENSE = {"w": np.arange(6, dtype=np.float32), "m": np.array([True, False])}
MODEL = {"width": 8}


def write(store: WeightStore, version: str) -> str:
    writer = store.writer(version)
    writer.add_tensors("dense", DENSE)
    writer.add_json("model", MODEL)
    return writer.commit()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with the versions ``old`` and ``v``; ``v`` is the newer one, to be damaged."""
    write(WeightStore(tmp_path, clock=ManualClock(1_000_000.0)), "old")
    write(WeightStore(tmp_path, clock=ManualClock(1_000_001.0)), "v")
    return tmp_path


def reseal(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of ``v`` and make its own checksum right again: a hostile writer, not an accident."""
    path = folder / "v" / "manifest.json"
    document = json.loads(path.read_text())
    document.pop("digest")
    change(document)
    digest = hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps({**document, "digest": digest}))


def check_refused(folder: Path, file: str, reason: str, *, listed: bool) -> None:
    store = WeightStore(folder)
    assert store.versions() == (["old", "v"] if listed else ["old"])
    assert store.latest() == ("v" if listed else "old")
    assert list(store.incomplete()) == ([] if listed else ["v"])
    with pytest.raises(WeightsError, match=reason) as caught:
        store.open("v").verify()
    assert caught.value.context["version"] == "v"
    assert caught.value.context["file"] == file
    assert "weights v" in caught.value.message


def test_truncated_file(folder: Path) -> None:
    path = folder / "v" / "dense.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    check_refused(folder, "dense.safetensors", "bytes, the manifest says", listed=False)


def test_file_that_grew(folder: Path) -> None:
    path = folder / "v" / "dense.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    check_refused(folder, "dense.safetensors", "bytes, the manifest says", listed=False)


def test_emptied_file(folder: Path) -> None:
    (folder / "v" / "dense.safetensors").write_bytes(b"")
    check_refused(folder, "dense.safetensors", "has 0 bytes", listed=False)


def test_missing_file(folder: Path) -> None:
    (folder / "v" / "model.json").unlink()
    check_refused(folder, "model.json", "No such file", listed=False)


def test_flipped_byte(folder: Path) -> None:
    path = folder / "v" / "dense.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    check_refused(folder, "dense.safetensors", "has SHA-256", listed=True)


def test_half_written_version(folder: Path) -> None:
    (folder / "v" / "manifest.json").unlink()
    check_refused(folder, "manifest.json", "was never completed", listed=False)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[1, 2]", "must hold an object"),
        (b'{"format_version": 3}', "has format version 3, this code reads 1 and 2"),
        (b"{}", "has format version None"),
        (b'{"format_version": 1}', "does not match its own checksum"),
        (b'{"format_version": 2}', "does not match its own checksum"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_garbage_manifest(folder: Path, content: bytes, reason: str) -> None:
    (folder / "v" / "manifest.json").write_bytes(content)
    check_refused(folder, "manifest.json", reason, listed=False)


def test_a_huge_manifest_is_refused_unparsed(folder: Path) -> None:
    (folder / "v" / "manifest.json").write_bytes(b" " * (MANIFEST_BYTES_MAX + 1))
    check_refused(folder, "manifest.json", f"the limit is {MANIFEST_BYTES_MAX}", listed=False)


def test_manifest_of_another_version(folder: Path) -> None:
    data = (folder / "old" / "manifest.json").read_bytes()
    (folder / "v" / "manifest.json").write_bytes(data)
    check_refused(folder, "manifest.json", "belongs to version old", listed=False)


@pytest.mark.parametrize(
    "path", ["../old/dense.safetensors", "/etc/passwd", "a/../../x", "", ".", "a//b", "file:///x", "a\\..\\b", "x\n"]
)
def test_a_manifest_cannot_point_outside(folder: Path, path: str) -> None:
    reseal(folder, lambda document: document["files"]["dense"].update(path=path))
    check_refused(folder, "manifest.json", "must be relative and stay inside", listed=False)


def test_a_symbolic_link_cannot_lead_outside(folder: Path) -> None:
    path = folder / "v" / "dense.safetensors"
    path.unlink()
    path.symlink_to(folder / "old" / "dense.safetensors")  # the very bytes that the manifest expects
    with pytest.raises(WeightsError, match="leads outside the version folder"):
        WeightStore(folder).open("v").tensors("dense")


@pytest.mark.parametrize("name", ["dense.safetensors", "model.json", "manifest.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder: Path, name: str) -> None:
    path = folder / "v" / name
    path.unlink()
    os.mkfifo(path)
    assert WeightStore(folder).versions() == ["old"]
    with pytest.raises(WeightsError, match="is no regular file"):
        WeightStore(folder).open("v").verify()


@pytest.mark.parametrize("name", ["dense.safetensors", "model.json", "manifest.json"])
def test_a_link_that_leads_to_itself_hides_no_other_version(folder: Path, name: str) -> None:
    path = folder / "v" / name
    path.unlink()
    path.symlink_to(path.name)
    assert WeightStore(folder).versions() == ["old"]
    with pytest.raises(WeightsError, match="is a link that leads to itself"):
        WeightStore(folder).open("v").verify()


def test_a_manifest_is_refused_however_deep_it_is_nested() -> None:
    for depth in range(1, 1_100):
        deep = b"[" * depth + b"]" * depth
        with pytest.raises(WeightsError):
            Manifest.decode(b'{"format_version": 2, "version": "v", "x": ' + deep + b"}", "v")


def test_a_document_that_is_nested_too_deeply(folder: Path) -> None:
    text = b"[" * 100_000
    (folder / "v" / "model.json").write_bytes(text)
    digest = hashlib.sha256(text).hexdigest()
    reseal(folder, lambda d: d["documents"]["model"].update(bytes=len(text), sha256=digest, chunks=[digest]))
    with pytest.raises(WeightsError, match=r"model.json is not JSON: maximum recursion"):
        WeightStore(folder).open("v").json("model")


def test_a_store_behind_a_symbolic_link_works(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    link = tmp_path_factory.mktemp("links") / "weights"
    link.symlink_to(folder)
    WeightStore(link).open("v").verify()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d.update(extra=1), "extra"),
        (lambda d: d.update(created="yesterday"), "created"),
        (lambda d: d["files"]["dense"].update(bytes=-1), "files.dense.bytes"),
        (lambda d: d["files"]["dense"].update(bytes="100"), "files.dense.bytes"),
        (lambda d: d["files"]["dense"].update(bytes=2**63), "files.dense.bytes"),
        (lambda d: d["files"]["dense"].update(sha256="00"), "files.dense.sha256"),
        (lambda d: d["files"]["dense"]["tensors"]["w"].update(dtype="F8"), "files.dense.tensors.w.dtype"),
        (lambda d: d["files"]["dense"]["tensors"]["w"].update(shape=[-1]), "files.dense.tensors.w.shape"),
        (lambda d: d["files"].update({"../x": d["files"]["dense"]}), "files"),
    ],
)
def test_a_manifest_field_that_breaks_a_rule_is_named(
    folder: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    reseal(folder, change)
    check_refused(folder, "manifest.json", reason, listed=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t["w"].update(shape=[2, 3]), r"tensor 'w' is F32 \(6,\), the manifest says F32 \(2, 3\)"),
        (lambda t: t["w"].update(dtype="I32"), "the manifest says I32"),
        (lambda t: t.pop("m"), "has tensor 'm' that the manifest does not list"),
        (lambda t: t.update(z=t["w"]), "lacks tensor 'z'"),
    ],
)
def test_tensors_must_be_those_of_the_manifest(
    folder: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    reseal(folder, lambda document: change(document["files"]["dense"]["tensors"]))
    check_refused(folder, "dense.safetensors", reason, listed=True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "a header length takes 8"),
        (b"1234567", "a header length takes 8"),
        ((1 << 40).to_bytes(8, "little"), "does not fit in a file"),
        ((2).to_bytes(8, "little") + b"[]", "must be an object"),
        ((3).to_bytes(8, "little") + b"{{{", "Expecting property name"),
        ((9).to_bytes(8, "little") + b'{"w": {}}', "header entry of tensor 'w' is not valid"),
    ],
)
def test_a_file_that_is_no_safetensors_file(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        view_tensors(memoryview(content))


def str_short(value: object) -> str:
    return str(value)[:60]


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-8, -4]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": "ab", "data_offsets": [0, 8]},
        {"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [0, 2**64], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [10**4_000] * 1_500, "data_offsets": [0, 8]},  # a product that would take minutes
    ],
    ids=str_short,
)
def test_a_header_entry_that_does_not_fit_the_data(entry: dict[str, Any]) -> None:
    header = json.dumps({"w": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    with pytest.raises(ValueError, match="tensor 'w'"):
        view_tensors(memoryview(data))


def test_verify_names_every_wrong_file(folder: Path) -> None:
    for name in ("dense.safetensors", "model.json"):
        path = folder / "v" / name
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(
        WeightsError, match=r"dense\.safetensors has SHA-256 .*; weights v: model\.json has SHA-256"
    ) as e:
        WeightStore(folder).open("v").verify()
    assert e.value.context == {"version": "v", "file": "dense.safetensors", "num_files": 2}


def test_a_document_that_is_not_an_object(folder: Path) -> None:
    path = folder / "v" / "model.json"
    path.write_bytes(b"[1]")
    digest = hashlib.sha256(b"[1]").hexdigest()
    entry = {"path": "model.json", "bytes": 3, "sha256": digest, "chunk_bytes": 4, "chunks": [digest]}
    reseal(folder, lambda document: document["documents"].update(model=entry))
    check_refused(folder, "model.json", "must hold an object", listed=True)


def test_damage_in_an_object_store() -> None:
    store = WeightStore("memory://damage/weights")
    fs = fsspec.filesystem("memory")
    try:
        write(store, "v")
        data: bytes = fs.cat_file("/damage/weights/v/dense.safetensors")
        fs.pipe_file("/damage/weights/v/dense.safetensors", data[:-1])
        assert store.versions() == []
        with pytest.raises(WeightsError, match="bytes, the manifest says"):
            store.open("v").tensors("dense")
        fs.pipe_file("/damage/weights/v/dense.safetensors", data[:-1] + b"\7")
        with pytest.raises(WeightsError, match="has SHA-256"):
            store.open("v").tensors("dense")
        fs.rm_file("/damage/weights/v/dense.safetensors")
        with pytest.raises(WeightsError, match="cannot be read"):
            store.open("v").tensors("dense")
    finally:
        fs.rm("/damage", recursive=True)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_refused(folder: Path, data: st.DataObject) -> None:
    """Whichever bit of whichever file flips: an error, never other weights."""
    name = data.draw(st.sampled_from(["manifest.json", "dense.safetensors", "model.json"]))
    path = folder / "v" / name
    original = path.read_bytes()
    position = data.draw(st.integers(0, 8 * len(original) - 1))
    damaged = bytearray(original)
    damaged[position // 8] ^= 1 << position % 8
    path.write_bytes(damaged)
    try:
        with pytest.raises(WeightsError):
            WeightStore(folder).open("v").verify()
    finally:
        path.write_bytes(original)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_make_the_parsers_fail_otherwise(content: bytes) -> None:
    with pytest.raises(WeightsError):
        Manifest.decode(content, "v")
    try:
        view_tensors(memoryview(content))
    except ValueError:
        pass
    else:  # only an empty header can pass by chance
        assert content[8:].lstrip().startswith(b"{")
