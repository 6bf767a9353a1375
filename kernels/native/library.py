"""Loads the native library, says why it cannot be used, and declares its C functions.

The library is used only when it was built for exactly these sources, the processor has every instruction it is compiled
for, and PyTorch runs on an OpenMP runtime that has ``GOMP_parallel``: the library starts its work on that runtime's
team, as README.md explains.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.backends import native_forbidden
from kernels.native.build import DEFAULT_FOLDER, built_library, missing_bytes

FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni")
"""Instruction sets that the library is compiled for, in the order of ``rankmesh_missing_features``."""


class NativeUnavailableError(RuntimeError):
    """The native backend was asked for and cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class NativeStatus:
    """Whether the native backend can be used.

    Args:
        available: It can.
        reason: Why not; empty when it can.
        path: The shared object, None if there is none for these sources.
        isa: Instruction sets that it uses.
    """

    available: bool
    reason: str
    path: Path | None
    isa: tuple[str, ...] = FEATURES


_OPENMP_FILE = re.compile(r"/lib[gi]?omp[^/]*\.so[^/]*$")
_loaded: dict[Path, ctypes.CDLL] = {}
_ready: dict[Path, ctypes.CDLL] = {}


def status(folder: Path = DEFAULT_FOLDER) -> NativeStatus:
    """Say whether the library of a cache folder can be used in this process; builds nothing."""
    if native_forbidden():
        return NativeStatus(False, "RANKMESH_NATIVE is 0", None)
    path = built_library(folder)
    if path is None:
        return NativeStatus(False, f"not built in {folder}: python -m kernels.native", None)
    try:
        if path not in _loaded and (lacking := missing_bytes(path)):
            reason = f"cut short: {path} lacks {lacking} bytes; python -m kernels.native builds it again"
            return NativeStatus(False, reason, path)
        library = _open(path)
    except OSError as error:
        return NativeStatus(False, f"cannot be loaded: {error}; python -m kernels.native builds it again", path)
    missing_bits = library.rankmesh_missing_features()
    if missing := [name for bit, name in enumerate(FEATURES) if missing_bits >> bit & 1]:
        return NativeStatus(False, f"the processor or the system lacks {', '.join(missing)}", path)
    if _gomp_parallel() is None:
        return NativeStatus(False, "PyTorch runs on no OpenMP runtime with GOMP_parallel", path)
    return NativeStatus(True, "", path)


def load(folder: Path = DEFAULT_FOLDER) -> ctypes.CDLL:
    """Return the library, ready to be called.

    Raises:
        NativeUnavailableError: ``status`` says that it cannot be used.
    """
    library = _ready.get(folder)
    if library is None:
        found = status(folder)
        if not found.available or found.path is None:
            raise NativeUnavailableError(f"native backend: {found.reason}")
        library = _ready[folder] = _loaded[found.path]
        library.rankmesh_set_team(_gomp_parallel())
    return library


def num_threads() -> int:
    """Return how many threads a call may use: PyTorch's own setting."""
    return torch.get_num_threads()


def check_done(code: int, name: str) -> None:
    """Raise for a C function's result.

    Raises:
        MemoryError: it could not allocate its working memory.
    """
    if code:
        raise MemoryError(f"{name}: no memory for its working space")


def pointer(x: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's first element, None for None."""
    return None if x is None else x.data_ptr()


def _open(path: Path) -> ctypes.CDLL:
    if path not in _loaded:
        library = ctypes.CDLL(str(path))
        library.rankmesh_missing_features.restype = ctypes.c_uint32
        library.rankmesh_missing_features.argtypes = []
        library.rankmesh_set_team.restype = None
        library.rankmesh_set_team.argtypes = [ctypes.c_void_p]
        _loaded[path] = library
    return _loaded[path]


def _gomp_parallel() -> int | None:
    """Find ``GOMP_parallel`` in the OpenMP runtime that PyTorch has loaded; file names differ from wheel to wheel."""
    with Path("/proc/self/maps").open() as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if _OPENMP_FILE.search(line)}
    for path in sorted(paths):
        function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None
