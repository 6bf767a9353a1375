"""Triton kernel of broadcast_attention: flash attention whose query rows are all candidates of one request."""

from __future__ import annotations

import math

import triton.language as tl
from torch import Tensor

from kernels.aot.case import AotCase
from kernels.gpu.attention import FEW_ROWS, ROWS, launch, load_head, query_rows, request_case, store_head
from kernels.gpu.lang import dot, jit, narrow

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
    keys = tl.arange(0, BN)
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BK), tl.float32)
    for t in tl.range(first, last, BN):
        in_keys = (t + keys) < last
        key = load_head(k, t + keys, in_keys, head, H, K, BK)
        scores = dot(queries, tl.trans(key), tl.zeros((BM, BN), tl.float32), WIDEN)
        value = load_head(v, t + keys, in_keys, head, H, K, BK)
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
    first_row: tl.tensor,
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

    With an index, tile t belongs to ``tile_request[t]``, B for none; see ``query_rows``.
    ``scale`` has log2(e) in it for softmax. Tiles vary fastest, so the programs that run together read the same keys.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    request = 0
    if HAS_INDEX:
        request = tl.load(tile_request + tile)
        if request >= B:
            return
    rows, in_rows = query_rows(tile, request, order, first_row, first_tile, C, Q, BM, HAS_INDEX)
    queries = load_head(q, rows, in_rows, head, H, K, BK)
    first, last = tl.load(ends + request).to(tl.int32), tl.load(ends + request + 1).to(tl.int32)
    acc, total = attend_keys(queries, k, v, first, last, head, scale, H, K, BM, BN, BK, SOFTMAX, WIDEN)
    # No key at all: the sum is empty and the answer zero.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None] if SOFTMAX else acc * scale
    store_head(out, rows, in_rows, head, acc, H, K, BK, WIDEN)


def broadcast_attention(
    q_CQHK: Tensor, k_THK: Tensor, v_THK: Tensor, ends: Tensor, index_C: Tensor | None, activation: str, scale: float
) -> Tensor:
    """Launch the kernel; see the facade."""
    is_softmax = activation == "softmax"
    factor = scale * _LOG2_E if is_softmax else scale
    return launch(broadcast_attention_kernel, q_CQHK, k_THK, v_THK, ends, index_C, factor, SOFTMAX=is_softmax)


def _case(tile_rows: int, head_width: int, softmax: bool) -> AotCase:
    name = f"broadcast_attention.{'softmax' if softmax else 'silu'}"
    constants = {"Q": 4, "H": 2, "K": head_width, "SOFTMAX": softmax}
    return request_case(name, broadcast_attention_kernel, tile_rows, constants)


AOT_CASES = [
    _case(ROWS, 16, True),
    _case(ROWS, 64, True),
    _case(ROWS, 128, True),
    _case(FEW_ROWS, 64, True),
    _case(ROWS, 128, False),
]
