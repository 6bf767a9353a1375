"""Checks of tensors at the border to C: dtype, shape, place and layout, each named in the error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_tensor(name: str, x: Tensor, dtypes: torch.dtype | Sequence[torch.dtype], *shape: int | None) -> Tensor:
    """Return the tensor, detached, or say what is wrong with it.

    Args:
        name: Name for the message.
        x: The tensor.
        dtypes: Allowed dtypes.
        shape: Size of each axis, None where any size will do.

    Raises:
        ValueError: its dtype, shape, device or memory layout is not what C expects.
    """
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    fits = x.dim() == len(shape) and all(size in (None, own) for size, own in zip(shape, x.shape, strict=True))
    if not fits or x.dtype not in allowed:
        wanted = f"{' or '.join(str(dtype) for dtype in allowed)} {_shape(shape)}"
        raise ValueError(f"{name} must be {wanted}, is {x.dtype} {_shape(tuple(x.shape))}")
    if x.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, is on {x.device}")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, has strides {x.stride()}")
    return x.detach()


def check_range(name: str, value: float, least: float, most: float) -> None:
    """Check a number.

    Raises:
        ValueError: it is below ``least``, above ``most``, or NaN.
    """
    if not least <= value <= most:
        raise ValueError(f"{name} must be in [{least}, {most}], is {value}")


def check_requests(candidate_to_request: Tensor | None, num_candidates: int, num_requests: int) -> Tensor:
    """Return the request of each candidate, int32 [C]; None means the only request.

    Raises:
        ValueError: it is not int32 [C], there are several requests and None was given, or an entry names no request.
    """
    if candidate_to_request is None:
        if num_requests != 1:
            raise ValueError(f"candidate_to_request must be given for {num_requests} requests, is None")
        return torch.zeros(num_candidates, dtype=torch.int32)
    index = check_tensor("candidate_to_request", candidate_to_request, torch.int32, num_candidates)
    if num_candidates:
        low, high = (int(x) for x in torch.aminmax(index))
        if low < 0 or high >= num_requests:
            raise ValueError(f"candidate_to_request must be in [0, {num_requests}), has values from {low} to {high}")
    return index


def sort_by_request(index: Tensor, num_requests: int) -> tuple[Tensor, Tensor]:
    """Return candidates sorted by request, stable, int64 [C], and where each request begins, int64 [B + 1]."""
    if num_requests == 1:
        return torch.arange(len(index)), torch.tensor([0, len(index)])
    order = torch.argsort(index, stable=True)
    begins = torch.zeros(num_requests + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(index, minlength=num_requests), 0, out=begins[1:])
    return order, begins


def _shape(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"
