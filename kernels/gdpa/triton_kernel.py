"""Triton kernel of gdpa: two chained products over tiles of one request's rows, no softmax stage between them."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from kernels.aot.case import AotCase
from kernels.gpu.attention import FEW_ROWS, ROWS, launch, load_head, query_rows, request_case, store_head
from kernels.gpu.lang import dot, jit, narrow

_ACTIVATIONS = {"identity": 0, "relu": 1, "silu": 2, "gelu": 3}


@jit
def activate(scores: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Apply an activation; each gives 0 at 0, so keys outside add nothing."""
    if ACTIVATION == 1:
        return tl.maximum(scores, 0.0)
    # Exponents end at 126, where a float32 does: what they divide is 0 long before.
    if ACTIVATION == 2:
        return scores / (1.0 + tl.exp2(tl.minimum(scores * -1.4426950408889634, 126.0)))
    if ACTIVATION == 3:
        # x (1 + tanh(y)) / 2 = x / (1 + exp(-2 y)), y = sqrt(2 / pi) (x + 0.044715 x^3).
        inner = scores * (1.5957691216057308 + 0.07135481282553026 * scores * scores)
        return scores / (1.0 + tl.exp2(tl.minimum(inner * -1.4426950408889634, 126.0)))
    return scores


@jit
def gdpa_kernel(
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
    ACTIVATION: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Attend from BM query rows of one request, in one head: q and out [C, Q, H, K], k and v [M, H, K], ends [B + 1].

    With an index, tile t belongs to ``tile_request[t]``, B for none; see ``query_rows``.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    request = 0
    if HAS_INDEX:
        request = tl.load(tile_request + tile)
        if request >= B:
            return
    rows, in_rows = query_rows(tile, request, order, first_row, first_tile, C, Q, BM, HAS_INDEX)
    queries = load_head(q, rows, in_rows, head, H, K, BK)
    keys = tl.arange(0, BN)
    acc = tl.zeros((BM, BK), tl.float32)
    first, last = tl.load(ends + request).to(tl.int32), tl.load(ends + request + 1).to(tl.int32)
    for t in tl.range(first, last, BN):
        in_keys = (t + keys) < last
        key = load_head(k, t + keys, in_keys, head, H, K, BK)
        scores = dot(queries, tl.trans(key), tl.zeros((BM, BN), tl.float32), WIDEN) * scale
        value = load_head(v, t + keys, in_keys, head, H, K, BK)
        acc = dot(narrow(activate(scores, ACTIVATION), v.dtype.element_ty, WIDEN), value, acc, WIDEN)
    store_head(out, rows, in_rows, head, acc, H, K, BK, WIDEN)


def gdpa(
    q_CQHK: Tensor, k_MHK: Tensor, v_MHK: Tensor, ends: Tensor, index_C: Tensor | None, activation: str, tau: float
) -> Tensor:
    """Launch the kernel; see the facade."""
    return launch(gdpa_kernel, q_CQHK, k_MHK, v_MHK, ends, index_C, 1.0 / tau, ACTIVATION=_ACTIVATIONS[activation])


def _case(tile_rows: int, head_width: int, activation: str) -> AotCase:
    constants = {"Q": 1, "H": 3, "K": head_width, "ACTIVATION": _ACTIVATIONS[activation]}
    return request_case(f"gdpa.{activation}", gdpa_kernel, tile_rows, constants)


AOT_CASES = [
    _case(ROWS, 128, "gelu"),
    _case(ROWS, 128, "relu"),
    _case(ROWS, 64, "silu"),
    _case(FEW_ROWS, 64, "identity"),
]
