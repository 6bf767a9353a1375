"""Weights in the layouts of the kernels: pairs of consecutive k in one 32-bit element, in panels of 64 columns."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

PANEL = 64
LANES = 16


class PackedMatrixStruct(ctypes.Structure):
    """``PackedMatrix`` of gemm.h."""

    _fields_ = [("data", ctypes.c_void_p), ("num_pairs", ctypes.c_int32), ("columns", ctypes.c_int32)]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [N, K], packed; ``data`` keeps the memory alive that ``struct`` points to.

    Args:
        data: int32 [ceil(K / 2) * N rounded up to 16].
        struct: What C reads.
    """

    data: Tensor
    struct: PackedMatrixStruct = field(repr=False, compare=False)


def pair_rows(x: Tensor) -> Tensor:
    """Put rows 2i and 2i + 1 of [2R, N] into the low and high halves of int32 [R, N], rounded to bf16."""
    halves = x.detach().to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    return (halves[0::2] | halves[1::2] << 16).contiguous()


def pack_panels(elements: Tensor) -> Tensor:
    """Lay int32 [R, N], N a multiple of 16, out as panels [R, 64]; the last one may have fewer columns."""
    columns = elements.shape[1]
    return torch.cat([elements[:, first : first + PANEL].reshape(-1) for first in range(0, columns, PANEL)])


def pack_matrix(weight: Tensor) -> PackedMatrix:
    """Pack a weight [N, K] of any floating dtype for products x @ weight.T in bf16; padding is zero."""
    num_columns, num_inputs = weight.shape
    columns = -(-num_columns // LANES) * LANES
    padded = torch.nn.functional.pad(weight.detach(), (0, num_inputs % 2, 0, columns - num_columns))
    pairs = pair_rows(padded.T)
    data = pack_panels(pairs)
    return PackedMatrix(data, PackedMatrixStruct(data.data_ptr(), len(pairs), columns))
