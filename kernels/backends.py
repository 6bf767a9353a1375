"""Which implementation of an operator runs: named by the caller, checked once, never replaced by another."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

Backend: TypeAlias = Literal["reference", "torch", "native", "triton"]
"""``reference``: plain torch in float32, the truth. ``torch``: stock torch at its fastest on a CPU. ``native``: the
C++ library of ``kernels.native``. ``triton``: a GPU, or a CPU when ``TRITON_INTERPRET=1`` was set before the import."""

Activation: TypeAlias = Literal["none", "relu"]

SCALE_LEAST, SCALE_MOST = 1e-30, 1e30
"""Factor of attention's scores: float32 and its products hold it."""

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class BackendUnavailableError(RuntimeError):
    """The backend that was asked for cannot run here; the message says what is missing."""


def check_choice(field: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a value that is not one of the allowed names.

    Raises:
        ValueError: it is not.
    """
    if value not in allowed:
        raise ValueError(f"{field} must be one of {', '.join(allowed)}, is {value!r}")


def check_number(field: str, value: float, least: float, most: float) -> None:
    """Refuse a number outside of bounds, NaN among them.

    Raises:
        ValueError: it is.
    """
    if not least <= value <= most:
        raise ValueError(f"{field} must be in [{least:g}, {most:g}], is {value:g}")


def check_epsilon(epsilon: float) -> None:
    """Refuse an epsilon of a norm that no backend could take.

    Raises:
        ValueError: it is not in [1e-12, 1].
    """
    check_number("epsilon", epsilon, 1e-12, 1.0)


def check_tensor(
    field: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
    device: torch.device | None = None,
) -> None:
    """Refuse a tensor of the wrong shape, dtype or device.

    Args:
        field: Its name in the message.
        tensor: The tensor.
        shape: Wanted sizes, None where any size will do.
        dtypes: Allowed types.
        device: Where it must be; None: anywhere.

    Raises:
        ValueError: a rule is broken.
    """
    sizes = tuple(tensor.shape)
    fits = len(sizes) == len(shape) and all(w is None or s == w for s, w in zip(sizes, shape, strict=True))
    if not fits or tensor.dtype not in dtypes:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{field} must be {names} [{wanted}], is {found} {list(sizes)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{field} must be on {device}, is on {tensor.device}")


def check_index(field: str, index: Tensor | None, length: int, limit: int, device: torch.device) -> None:
    """Refuse a request index that does not fit.

    Values are checked where that costs nothing; on a GPU a check would wait for the device, and the caller answers for
    them.

    Args:
        field: Its name in the message.
        index: int32 or int64 [length] in ``[0, limit)``, or None, which is right for a single request only.
        length: Number of candidates.
        limit: Number of requests.
        device: Where the other tensors are.

    Raises:
        ValueError: a rule is broken.
    """
    if index is None:
        if limit != 1:
            raise ValueError(f"{field} may be None for one request only, there are {limit}")
        return
    check_tensor(field, index, (length,), (torch.int32, torch.int64))
    if index.device != device:
        raise ValueError(f"{field} must be on {device}, is on {index.device}")
    if device.type == "cpu" and length > 0:
        least, most = int(index.min()), int(index.max())
        if least < 0 or most >= limit:
            raise ValueError(f"{field} must be in [0, {limit}), holds {least} to {most}")


def check_offsets(field: str, offsets: Tensor, count: int) -> None:
    """Refuse offsets of jagged rows that do not fit.

    Values are checked where that costs nothing; on a GPU a check would wait for the device, and the caller answers for
    them.

    Args:
        field: Its name in the message.
        offsets: int32 or int64 [B + 1] from 0 to ``count``, non-decreasing.
        count: Number of rows.

    Raises:
        ValueError: a rule is broken.
    """
    check_tensor(field, offsets, (None,), (torch.int32, torch.int64))
    if len(offsets) == 0:
        raise ValueError(f"{field} must be [B + 1], is empty")
    if offsets.device.type != "cpu":
        return
    if int(offsets[0]) != 0 or int(offsets[-1]) != count or bool((offsets.diff() < 0).any()):
        raise ValueError(f"{field} must rise from 0 to {count}, are {offsets.tolist()[:8]}")


def interpreting() -> bool:
    """Whether Triton kernels are interpreted on the CPU, as ``TRITON_INTERPRET`` said when triton was imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "y", "yes"}


def native_forbidden() -> bool:
    """Whether ``RANKMESH_NATIVE=0`` keeps every kernel on its portable path."""
    return os.environ.get("RANKMESH_NATIVE", "1") == "0"


def require_triton(tensor: Tensor) -> None:
    """Refuse to run a Triton kernel on this tensor's device if that is impossible.

    Raises:
        BackendUnavailableError: triton is not installed, or the tensor is not on a GPU and nothing is interpreted.
    """
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailableError("backend 'triton' needs the package triton, which is not installed")
    if tensor.device.type != "cuda" and not interpreting():
        raise BackendUnavailableError(
            f"backend 'triton' needs tensors on a GPU, they are on {tensor.device}; "
            "TRITON_INTERPRET=1 set before the start interprets kernels on a CPU"
        )


def native_library(tensor: Tensor) -> Any:
    """Return ``kernels.native``, ready to be called with tensors like this one.

    Raises:
        BackendUnavailableError: the library is not built, cannot run on this CPU, or the tensor is elsewhere.
    """
    if tensor.device.type != "cpu":
        raise BackendUnavailableError(f"backend 'native' runs on CPUs, the tensors are on {tensor.device}")
    if "kernels.native" not in sys.modules and importlib.util.find_spec("kernels.native") is None:
        raise BackendUnavailableError("backend 'native' needs kernels.native, which is not part of this installation")
    native = importlib.import_module("kernels.native")
    try:
        native.load()  # the status alone costs 2 ms: it hashes all sources and reads the process's map
    except native.NativeUnavailableError as error:
        raise BackendUnavailableError(f"backend 'native' cannot run here: {error}") from error
    return native
