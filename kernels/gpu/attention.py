"""What the attention kernels share: tiles of one head, tiles over the rows of each request, launch and compile options.

Shape letters: B requests, C rows (candidates, or events), Q queries a row, H heads, K head width, M keys in all.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.aot.case import AotCase
from kernels.backends import interpreting
from kernels.gpu.lang import jit, narrow

ROWS, KEYS = 128, 64
FEW_ROWS = 64


@jit
def load_head(
    x: tl.tensor,
    rows: tl.tensor,
    in_rows: tl.tensor,
    head: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """Load rows of one head of x [any, H, K]: [rows, BK], 0 outside the rows and the width."""
    width = tl.arange(0, BK)
    begins = (rows.to(tl.int64) * H + head) * K
    inside = in_rows[:, None] & (width < K)[None, :]
    return tl.load(x + begins[:, None] + width[None, :], mask=inside, other=0.0)


@jit
def store_head(
    out: tl.tensor,
    rows: tl.tensor,
    in_rows: tl.tensor,
    head: tl.tensor,
    answers: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Store float32 answers [rows, BK] to rows of one head of out [any, H, K], in its type."""
    width = tl.arange(0, BK)
    begins = (rows.to(tl.int64) * H + head) * K
    inside = in_rows[:, None] & (width < K)[None, :]
    tl.store(out + begins[:, None] + width[None, :], narrow(answers, out.dtype.element_ty, WIDEN), mask=inside)


@jit
def query_rows(
    tile: tl.tensor,
    request: tl.tensor,
    order: tl.tensor,
    first_row: tl.tensor,
    first_tile: tl.tensor,
    C: tl.tensor,
    Q: tl.constexpr,
    BM: tl.constexpr,
    HAS_INDEX: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return which of the C Q query rows a tile of one request has, [BM], and which of them are there.

    With an index, rows are taken in ``order`` (sorted by request), and request r has those from ``first_row[r]`` to
    ``first_row[r + 1]`` and tiles from ``first_tile[r]``.
    """
    begin, end = 0, C
    if HAS_INDEX:
        tile -= tl.load(first_tile + request)
        begin = tl.load(first_row + request)
        end = tl.load(first_row + request + 1)
    rows = tile * BM + tl.arange(0, BM)
    in_rows = rows < (end - begin) * Q
    row = begin + rows // Q
    if HAS_INDEX:
        row = tl.load(order + row, mask=in_rows, other=0)
    return row.to(tl.int64) * Q + rows % Q, in_rows


def lay_tiles(num_rows_B: Tensor, num_rows_all: int, tile_rows: int) -> tuple[Tensor, Tensor]:
    """Lay tiles over the rows of each request, on the device and without waiting for it.

    Args:
        num_rows_B: Rows of each request.
        num_rows_all: Their sum.
        tile_rows: Rows of a tile.

    Returns:
        int32: the request of each tile, B for tiles that are not needed [ceil(all / tile_rows) + B]; each request's
        first tile [B].
    """
    tiles = (num_rows_B + tile_rows - 1) // tile_rows
    ends = torch.cumsum(tiles, 0)
    num_tiles_max = triton.cdiv(num_rows_all, tile_rows) + len(num_rows_B)
    tile_request = torch.searchsorted(ends, torch.arange(num_tiles_max, device=ends.device), right=True)
    return tile_request.int(), (ends - tiles).int()


def plan_tiles(index_C: Tensor, num_requests: int, num_queries: int, tile_rows: int) -> tuple[Tensor, ...]:
    """Sort rows by request and lay tiles over those of each.

    Args:
        index_C: The request of each row.
        num_requests: B.
        num_queries: Q.
        tile_rows: Query rows of a tile.

    Returns:
        int32: rows sorted by request [C]; where each request's begin [B + 1]; then what ``lay_tiles`` returns.
    """
    order = torch.argsort(index_C, stable=True)
    bounds = torch.arange(num_requests + 1, dtype=index_C.dtype, device=index_C.device)
    first_row = torch.searchsorted(index_C.index_select(0, order), bounds)
    tiles = lay_tiles(first_row.diff() * num_queries, len(index_C) * num_queries, tile_rows)
    return order.int(), first_row.int(), *tiles


def launch(
    kernel: Any,
    q_CQHK: Tensor,
    k_MHK: Tensor,
    v_MHK: Tensor,
    ends: Tensor,
    index_C: Tensor | None,
    scale: float,
    **constants: int,
) -> Tensor:
    """Launch a kernel of queries on the keys of their own request.

    Args:
        kernel: With the arguments of ``request_case``.
        q_CQHK: Queries.
        k_MHK: Keys.
        v_MHK: Values.
        ends: [B + 1] from 0 to M.
        index_C: The request of each row; None for one request.
        scale: As the kernel takes it.
        **constants: The kernel's own.

    Returns:
        [C, Q, H, K], dtype of q.
    """
    num_rows, num_queries, num_heads, head_width = q_CQHK.shape
    q_CQHK = q_CQHK.contiguous()
    out = torch.empty_like(q_CQHK)
    if out.numel() == 0:
        return out
    tile_rows = ROWS if num_rows * num_queries >= ROWS else FEW_ROWS
    ends = ends.int()
    if index_C is None:
        plan: tuple[Tensor, ...] = (ends, ends, ends, ends)
        num_tiles = triton.cdiv(num_rows * num_queries, tile_rows)
    else:
        plan = plan_tiles(index_C, len(ends) - 1, num_queries, tile_rows)
        num_tiles = len(plan[2])
    kernel[(num_tiles, num_heads)](
        q_CQHK,
        k_MHK.contiguous(),
        v_MHK.contiguous(),
        out,
        ends,
        *plan,
        num_rows,
        len(ends) - 1,
        scale,
        Q=num_queries,
        H=num_heads,
        K=head_width,
        **launch_options(tile_rows, head_width, q_CQHK.element_size()),
        **constants,
        HAS_INDEX=index_C is not None,
        WIDEN=interpreting(),
    )
    return out


def launch_options(tile_rows: int, head_width: int, item_bytes: int) -> dict[str, int]:
    """Return tile sizes and launch options: eight warps hold 128 rows, four 64; float32 leaves room for one stage."""
    width = max(16, int(triton.next_power_of_2(head_width)))
    num_stages = 3 if item_bytes == 2 else 1
    return {"BM": tile_rows, "BN": KEYS, "BK": width, "num_warps": tile_rows // 16, "num_stages": num_stages}


def attention_case(
    name: str,
    kernel: Any,
    tile_rows: int,
    integers: tuple[str, ...],
    sizes: tuple[str, ...],
    constants: dict[str, int],
) -> AotCase:
    """Return the bf16 case of an attention kernel.

    Args:
        name: Of the kernel and its variant; the tile is added.
        kernel: Takes q, k, v, out, then integer tensors, then sizes, then a scale.
        tile_rows: Query rows of a tile.
        integers: Names of the integer tensors.
        sizes: Names of the sizes.
        constants: With K, without tiles and WIDEN.
    """
    options = launch_options(tile_rows, constants["K"], item_bytes=2)
    num_warps, num_stages = options.pop("num_warps"), options.pop("num_stages")
    floats = ("q", "k", "v", "out")
    tensors = dict.fromkeys(floats, "*bf16") | dict.fromkeys(integers, "*i32")
    return AotCase(
        name=f"{name}.{tile_rows}x{constants['K']}",
        kernel=kernel,
        arguments=tensors | dict.fromkeys(sizes, "i32") | {"scale": "fp32"},
        constants=options | constants | {"WIDEN": False},
        aligned=tuple(tensors),
        num_warps=num_warps,
        num_stages=num_stages,
        tensor_cores="hgmma",
    )


def request_case(name: str, kernel: Any, tile_rows: int, constants: dict[str, int]) -> AotCase:
    """Return the case of a kernel that ``launch`` launches, with an index."""
    integers = ("ends", "order", "first_row", "tile_request", "first_tile")
    return attention_case(name, kernel, tile_rows, integers, ("C", "B"), constants | {"HAS_INDEX": True})
