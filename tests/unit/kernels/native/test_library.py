"""Building and loading: what is built where, and what is said when it cannot be used."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.native import NativeUnavailableError, status
from kernels.native import __main__ as command
from kernels.native import build as building
from kernels.native import library as loading
from kernels.native.build import BuildError, build, built_library
from tests.unit.kernels.native.support import require_native


class _Library:
    """Stands for a loaded library of a processor that lacks two features."""

    def rankmesh_missing_features(self) -> int:
        return 0b110000


@pytest.mark.parametrize("package", ["native", "wukong_layer", "event_layer", "block_attention"])
def test_nothing_is_built_or_loaded_at_import(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was built or loaded")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    for path in sorted((building.SOURCE_FOLDER.parents[1] / package).glob("[a-z]*.py")):
        spec = importlib.util.spec_from_file_location(f"fresh_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Where dataclasses look up the module of their annotations.
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)


def test_a_folder_without_a_library_says_so(tmp_path: Path) -> None:
    found = status(tmp_path)
    assert not found.available
    assert found.path is None
    assert "not built" in found.reason
    assert "python -m kernels.native" in found.reason
    with pytest.raises(NativeUnavailableError, match="native backend: not built"):
        loading.load(tmp_path)


def test_a_ready_library_is_available() -> None:
    require_native()
    found = status()
    assert found.available
    assert found.reason == ""
    assert found.path is not None
    assert "avx512_bf16" in found.isa


def test_a_built_library_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    require_native()
    path = built_library()

    def compile_again(*_: object) -> Path:
        raise AssertionError("compiled again")

    monkeypatch.setattr(building, "_compile", compile_again)
    assert build() == path


def test_missing_instructions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"rankmesh-{building.source_hash()}-00000000.so").touch()
    monkeypatch.setattr(loading, "missing_bytes", lambda _: 0)
    monkeypatch.setattr(loading, "_open", lambda _: _Library())
    found = status(tmp_path)
    assert not found.available
    assert found.reason == "the processor or the system lacks avx512_bf16, avx512_vnni"


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    path = tmp_path / f"rankmesh-{building.source_hash()}-00000000.so"
    path.write_text("no library")
    found = status(tmp_path)
    assert not found.available
    assert found.reason.startswith("cannot be loaded")


def test_without_an_openmp_runtime_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    require_native()
    monkeypatch.setattr(loading, "_gomp_parallel", lambda: None)
    assert status().reason == "PyTorch runs on no OpenMP runtime with GOMP_parallel"


def test_a_changed_source_has_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.cpp").write_text("int a;")
    monkeypatch.setattr(building, "SOURCE_FOLDER", tmp_path)
    before = building.source_hash()
    (tmp_path / "b.h").write_text("int b;")
    assert building.source_hash() != before


def test_build_errors_say_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match="no-such-compiler"):
        build(tmp_path, compiler="no-such-compiler")
    monkeypatch.setattr(building, "find_compiler", lambda: None)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        build(tmp_path)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(BuildError, match="needs an x86-64 processor, this is aarch64"):
        build(tmp_path)


def test_a_compiler_error_is_passed_on_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = building.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    sources, folder = tmp_path / "src", tmp_path / "out"
    sources.mkdir()
    (sources / "wrong.cpp").write_text("int f() { return nothing_of_that_name; }")
    monkeypatch.setattr(building, "SOURCE_FOLDER", sources)
    with pytest.raises(BuildError, match="nothing_of_that_name") as raised:
        build(folder, compiler)
    assert "nothing_of_that_name" in str(raised.value).splitlines()[0], "setup shows the first line alone"
    assert list(folder.iterdir()) == []


def test_a_build_is_a_library_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = building.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    sources, folder = tmp_path / "src", tmp_path / "out"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(building, "SOURCE_FOLDER", sources)
    path = build(folder, compiler)
    assert path == built_library(folder)
    assert [path] == list(folder.iterdir())


def test_setup_says_one_line_and_never_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Path:
        raise BuildError("no C++ compiler: neither g++ nor clang++ is there\nmore")

    monkeypatch.setattr(command, "build", fail)
    assert command.main(["--stamp", str(tmp_path / "stamp")]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "not built (no C++ compiler" in said
    assert not (tmp_path / "stamp").exists()
    monkeypatch.setattr(command, "build", lambda: None)
    assert command.main(["--stamp", str(tmp_path / "stamp")]) == 0
    assert (tmp_path / "stamp").exists()


def test_a_library_that_was_cut_short_is_not_loaded_and_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_native()
    whole = built_library()
    assert whole is not None
    path = tmp_path / whole.name
    path.write_bytes(whole.read_bytes()[:5_000])  # to load it would kill this process
    assert re.fullmatch(
        r"cut short: .* lacks \d+ bytes; python -m kernels.native builds it again", status(tmp_path).reason
    )
    monkeypatch.setattr(building, "_compile", lambda *_: pytest.fail("compiled again"))
    monkeypatch.setattr(building, "_compiler_hash", lambda _: whole.stem.rpartition("-")[2])
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        build(tmp_path)
    path.write_bytes(whole.read_bytes())
    assert build(tmp_path) == path


def test_the_oldest_objects_of_a_folder_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = building.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    sources, folder = tmp_path / "src", tmp_path / "out"
    sources.mkdir()
    folder.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(building, "SOURCE_FOLDER", sources)
    for index in range(building.OBJECTS_KEPT):
        (folder / f"rankmesh-{index}.so").touch()
        os.utime(folder / f"rankmesh-{index}.so", (index, index))
    path = build(folder, compiler)
    assert sorted(folder.iterdir()) == sorted([path, *(folder / f"rankmesh-{index}.so" for index in range(1, 8))])


def test_the_switch_keeps_every_kernel_on_its_portable_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKMESH_NATIVE", "0")
    assert (status().available, status().reason) == (False, "RANKMESH_NATIVE is 0")
    monkeypatch.setattr(loading, "_ready", {})
    with pytest.raises(NativeUnavailableError, match="RANKMESH_NATIVE is 0"):
        loading.load()
