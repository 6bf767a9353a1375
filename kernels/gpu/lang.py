"""Device functions that every kernel uses, and the decorator that makes kernels.

The interpreter stores bfloat16 as 16-bit integers and multiplies those, and truncates where a GPU rounds. Kernels
therefore take ``WIDEN``, true when interpreted: products widen to float32 first and casts round to nearest even by
hand, so that an interpreted kernel gives what a GPU would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


def jit(function: Callable[..., Any]) -> Any:
    """Make a Triton kernel, or a device function, of a Python function; ``triton.jit`` with a type."""
    return triton.jit(function)


@jit
def dot(a: tl.tensor, b: tl.tensor, acc: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    """Return ``acc + a @ b`` accumulated in float32; float32 inputs are multiplied as such, not as TF32."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@jit
def product_tile(
    a_rows: tl.tensor,
    b_columns: tl.tensor,
    in_rows: tl.tensor,
    in_columns: tl.tensor,
    K: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:
    """Return one tile [BM, BN] of A B^T in float32, both with K contiguous; rows outside count as zero.

    Args:
        a_rows: Where each row of A begins, [BM, 1].
        b_columns: Where each row of B begins, [1, BN].
        in_rows: Which rows of A are there, [BM].
        in_columns: Which rows of B are there, [BN].
        K: Length of a row.
        BM: Rows of A in a tile.
        BN: Rows of B in a tile.
        BK: Elements of a row that are loaded at once.
        WIDEN: Whether this is interpreted.
    """
    inner = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK):
        in_k = (k + inner) < K
        a = tl.load(a_rows + (k + inner)[None, :], mask=in_rows[:, None] & in_k[None, :], other=0.0)
        b = tl.load(b_columns + (k + inner)[:, None], mask=in_k[:, None] & in_columns[None, :], other=0.0)
        acc = dot(a, b, acc, WIDEN)
    return acc


@jit
def narrow(x: tl.tensor, dtype: tl.constexpr, WIDEN: tl.constexpr) -> tl.tensor:
    """Cast float32 to the type that is stored, to nearest even also in the interpreter."""
    if WIDEN and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    return x.to(dtype)


@jit
def narrow_e4m3(x: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    """Cast float32 to e4m3, to nearest even, saturating at 448 as torch does; NaN becomes a number.

    The interpreter's own cast loses the carry of a mantissa that rounds up (1.96 becomes 1.0), and below the smallest
    normal number 2^-6 it has fewer bits to keep: there the step is 2^-9, reached by adding and taking away 1.5 * 2^14.
    """
    clamped = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if WIDEN:
        size = tl.abs(clamped)
        bits = size.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576
        subnormal = (size + 24576.0) - 24576.0
        size = tl.where(size < 0.015625, subnormal, bits.to(tl.float32, bitcast=True))
        clamped = size * tl.where(clamped < 0, -1.0, 1.0)
    return clamped.to(tl.float8e4nv)
