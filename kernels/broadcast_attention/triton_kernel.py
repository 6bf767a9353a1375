"""Triton kernel of broadcast_attention: flash attention whose query rows are all candidates of one request."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.aot.case import AotCase
from kernels.backends import interpreting
from kernels.gpu.lang import dot, jit, narrow

_ROWS, _KEYS = 128, 64
_FEW_ROWS = 64
_LOG2_E = 1 / math.log(2)


@jit
def attend_keys(
    queries: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    head: tl.tensor,
    scale: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SOFTMAX: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the weighted sums [BM, BK] of values first to last of one head, and the sums of the weights [BM]."""
    width, keys = tl.arange(0, BK), tl.arange(0, BN)
    in_width = width < K
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BK), tl.float32)
    for t in tl.range(first, last, BN):
        in_keys = (t + keys) < last
        key_rows = ((t + keys).to(tl.int64) * H + head) * K
        inside = in_keys[:, None] & in_width[None, :]
        key = tl.load(k + key_rows[:, None] + width[None, :], mask=inside, other=0.0)
        scores = dot(queries, tl.trans(key), tl.zeros((BM, BN), tl.float32), WIDEN)
        value = tl.load(v + key_rows[:, None] + width[None, :], mask=inside, other=0.0)
        if SOFTMAX:
            scores = tl.where(in_keys[None, :], scores * scale, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(most - higher)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None]
            most = higher
        else:
            # A key outside is zero, and silu(0) = 0.
            weights = scores / (1.0 + tl.exp2(scores * -1.4426950408889634))
        acc = dot(narrow(weights, v.dtype.element_ty, WIDEN), value, acc, WIDEN)
    return acc, total


@jit
def broadcast_attention_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    ends: tl.tensor,
    order: tl.tensor,
    first_candidate: tl.tensor,
    tile_request: tl.tensor,
    first_tile: tl.tensor,
    C: tl.tensor,
    B: tl.tensor,
    scale: tl.tensor,
    Q: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SOFTMAX: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Attend from BM query rows of one request, in one head: q and out [C, Q, H, K], k and v [T, H, K], ends [B + 1].

    With an index, candidates are taken in ``order`` (sorted by request), request r has those from
    ``first_candidate[r]`` to ``first_candidate[r + 1]``, and tile t belongs to ``tile_request[t]``, B for none.
    ``scale`` has log2(e) in it for softmax. Tiles vary fastest, so the programs that run together read the same keys.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    request, begin, end = 0, 0, C
    if HAS_INDEX:
        request = tl.load(tile_request + tile)
        if request >= B:
            return
        tile -= tl.load(first_tile + request)
        begin = tl.load(first_candidate + request)
        end = tl.load(first_candidate + request + 1)
    rows = tile * BM + tl.arange(0, BM)
    in_rows = rows < (end - begin) * Q
    candidate = begin + rows // Q
    if HAS_INDEX:
        candidate = tl.load(order + candidate, mask=in_rows, other=0)
    width = tl.arange(0, BK)
    in_width = width < K
    q_rows = ((candidate.to(tl.int64) * Q + rows % Q) * H + head) * K
    seen = in_rows[:, None] & in_width[None, :]
    queries = tl.load(q + q_rows[:, None] + width[None, :], mask=seen, other=0.0)
    first, last = tl.load(ends + request).to(tl.int32), tl.load(ends + request + 1).to(tl.int32)
    acc, total = attend_keys(queries, k, v, first, last, head, scale, H, K, BM, BN, BK, SOFTMAX, WIDEN)
    # No key at all: the sum is empty and the answer zero.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None] if SOFTMAX else acc * scale
    tl.store(out + q_rows[:, None] + width[None, :], narrow(acc, out.dtype.element_ty, WIDEN), mask=seen)


def plan_tiles(index_C: Tensor, num_requests: int, num_queries: int, num_rows: int) -> tuple[Tensor, ...]:
    """Lay tiles over the candidates of each request, on the device and without waiting for it.

    Args:
        index_C: The request of each candidate.
        num_requests: B.
        num_queries: Q.
        num_rows: Query rows of a tile.

    Returns:
        int32: candidates sorted by request [C]; where each request's begin [B + 1]; the request of each tile, B for
        tiles that are not needed [at most ceil(C Q / rows) + B]; each request's first tile [B].
    """
    device = index_C.device
    order = torch.argsort(index_C, stable=True)
    bounds = torch.arange(num_requests + 1, dtype=index_C.dtype, device=device)
    first_candidate = torch.searchsorted(index_C.index_select(0, order), bounds)
    tiles = (first_candidate.diff() * num_queries + num_rows - 1) // num_rows
    ends = torch.cumsum(tiles, 0)
    num_tiles_max = triton.cdiv(len(index_C) * num_queries, num_rows) + num_requests
    tile_request = torch.searchsorted(ends, torch.arange(num_tiles_max, device=device), right=True)
    return order.int(), first_candidate.int(), tile_request.int(), (ends - tiles).int()


def broadcast_attention(
    q_CQHK: Tensor, k_THK: Tensor, v_THK: Tensor, ends: Tensor, index_C: Tensor | None, activation: str, scale: float
) -> Tensor:
    """Launch the kernel; see the facade."""
    num_candidates, num_queries, num_heads, head_width = q_CQHK.shape
    q_CQHK = q_CQHK.contiguous()
    out = torch.empty_like(q_CQHK)
    if out.numel() == 0:
        return out
    num_rows = _ROWS if num_candidates * num_queries >= _ROWS else _FEW_ROWS
    ends = ends.int()
    if index_C is None:
        plan: tuple[Tensor, ...] = (ends, ends, ends, ends)
        num_tiles = triton.cdiv(num_candidates * num_queries, num_rows)
    else:
        plan = plan_tiles(index_C, len(ends) - 1, num_queries, num_rows)
        num_tiles = len(plan[2])
    broadcast_attention_kernel[(num_tiles, num_heads)](
        q_CQHK,
        k_THK.contiguous(),
        v_THK.contiguous(),
        out,
        ends,
        *plan,
        num_candidates,
        len(ends) - 1,
        scale * _LOG2_E if activation == "softmax" else scale,
        Q=num_queries,
        H=num_heads,
        K=head_width,
        **_options(num_rows, head_width, q_CQHK.element_size()),
        SOFTMAX=activation == "softmax",
        HAS_INDEX=index_C is not None,
        WIDEN=interpreting(),
    )
    return out


def _options(num_rows: int, head_width: int, item_bytes: int) -> dict[str, int]:
    """Return tile sizes and launch options: eight warps hold 128 rows, four 64; float32 leaves room for one stage."""
    width = max(16, int(triton.next_power_of_2(head_width)))
    num_stages = 3 if item_bytes == 2 else 1
    return {"BM": num_rows, "BN": _KEYS, "BK": width, "num_warps": num_rows // 16, "num_stages": num_stages}


def _case(num_rows: int, head_width: int, softmax: bool) -> AotCase:
    options = _options(num_rows, head_width, item_bytes=2)
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    floats = dict.fromkeys(("q", "k", "v", "out"), "*bf16")
    integers = dict.fromkeys(("ends", "order", "first_candidate", "tile_request", "first_tile"), "*i32")
    return AotCase(
        name=f"broadcast_attention.{'softmax' if softmax else 'silu'}.{num_rows}x{head_width}",
        kernel=broadcast_attention_kernel,
        arguments=floats | integers | {"C": "i32", "B": "i32", "scale": "fp32"},
        constants=options | {"Q": 4, "H": 2, "K": head_width, "SOFTMAX": softmax, "HAS_INDEX": True, "WIDEN": False},
        aligned=(*floats, *integers),
        tensor_cores="hgmma",
        **launch,
    )


AOT_CASES = [
    _case(_ROWS, 16, True),
    _case(_ROWS, 64, True),
    _case(_ROWS, 128, True),
    _case(_FEW_ROWS, 64, True),
    _case(_ROWS, 128, False),
]
