"""Compiles the native library: one shared object, in a cache folder, under a name that says what it was made of.

Nothing here runs at import of ``kernels.native``: ``make setup`` calls ``python -m kernels.native``, or a caller
calls ``build``. The object's name holds a hash of the sources and flags and one of the compiler: a changed source is
never served by an old object. Several processes may build at once: each writes a file of its own and renames it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE_FOLDER = Path(__file__).resolve().parent / "src"
DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / "var" / "native"

_COMMON_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra")
# GCC 12 warns about the undefined pass-through operand of its own intrinsics.
_QUIET_FLAGS = ("-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-ignored-attributes")
_ISA_FLAGS = (
    "-mfma",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512bf16",
    "-mavx512vnni",
    # GCC and Clang otherwise prefer 256-bit registers in loops that they vectorize themselves.
    "-mprefer-vector-width=512",
)
_PORTABLE_SOURCE = "parallel.cpp"
"""Compiled without the ISA flags: it asks whether the others may run."""

OBJECTS_KEPT = 8
"""Objects that stay in a folder, the newest: those of other branches, which would be compiled again."""

_ELF_HEADER = struct.Struct("<4s36xQ10xHH2x")
"""Of 64 bits: magic, offset of the section table, size of an entry, number of entries. The table ends the file."""


class BuildError(RuntimeError):
    """The library cannot be compiled here."""


def find_compiler() -> str | None:
    """Return the path of g++ or clang++, the first that exists; None if none does."""
    return next((path for name in ("g++", "clang++") if (path := shutil.which(name)) is not None), None)


def source_hash() -> str:
    """Return 16 hex digits that change with any source file or flag."""
    digest = hashlib.sha256(repr((_COMMON_FLAGS, _QUIET_FLAGS, _ISA_FLAGS)).encode())
    for path in sorted(SOURCE_FOLDER.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def built_library(folder: Path = DEFAULT_FOLDER) -> Path | None:
    """Return the object of the present sources, the newest if several compilers made one; None if there is none."""
    found = [(path.stat().st_mtime, path) for path in folder.glob(f"rankmesh-{source_hash()}-*.so")]
    return max(found)[1] if found else None


def missing_bytes(path: Path) -> int:
    """Return how many bytes an object lacks at its end: a process that loads one that was cut short dies (SIGBUS).

    Raises:
        OSError: it cannot be read, or is no object.
    """
    with path.open("rb") as file:
        header = file.read(_ELF_HEADER.size)
        size = file.seek(0, os.SEEK_END)
    if len(header) < _ELF_HEADER.size or header[:4] != b"\x7fELF":
        raise OSError(f"{path} is no ELF object of 64 bits")
    _, begin, entry, count = _ELF_HEADER.unpack(header)
    return max(int(begin) + int(entry) * int(count) - size, 0)


def build(folder: Path = DEFAULT_FOLDER, compiler: str | None = None) -> Path:
    """Compile the library unless the same compiler has compiled the same sources before.

    Args:
        folder: Where objects are kept; made if it does not exist.
        compiler: Command; None: what ``find_compiler`` finds.

    Returns:
        Path of the shared object.

    Raises:
        BuildError: wrong processor family, no compiler, or the compiler failed (its message is part of the error).
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise BuildError(f"the native library needs an x86-64 processor, this is {platform.machine()}")
    command = compiler or find_compiler()
    if command is None:
        raise BuildError("no C++ compiler: neither g++ nor clang++ is there")
    target = folder / f"rankmesh-{source_hash()}-{_compiler_hash(command)}.so"
    if _is_whole(target):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        objects = [_compile(command, source, Path(scratch)) for source in sorted(SOURCE_FOLDER.glob("*.cpp"))]
        linked = Path(scratch) / "linked.so"
        _run([command, "-shared", "-o", str(linked), *map(str, objects)])
        with linked.open("rb") as file:
            os.fsync(file.fileno())  # else a machine that stops now may keep the name and not the bytes
        linked.replace(target)
    for old in sorted(folder.glob("rankmesh-*.so"), key=lambda path: path.stat().st_mtime)[:-OBJECTS_KEPT]:
        old.unlink(missing_ok=True)  # a process that has it loaded keeps it
    return target


def _is_whole(path: Path) -> bool:
    try:
        return missing_bytes(path) == 0
    except OSError:
        return False


def _compile(command: str, source: Path, scratch: Path) -> Path:
    target = scratch / f"{source.stem}.o"
    isa = () if source.name == _PORTABLE_SOURCE else _ISA_FLAGS
    _run([command, *_COMMON_FLAGS, *_QUIET_FLAGS, *isa, "-c", str(source), "-o", str(target)])
    return target


def _compiler_hash(command: str) -> str:
    return hashlib.sha256(_run([command, "--version"]).encode()).hexdigest()[:8]


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        first = next((line for line in lines if "error: " in line), lines[0])
        raise BuildError(f"{Path(command[0]).name}: {first}\n{' '.join(command)}\n{done.stderr.strip()}")
    return done.stdout
