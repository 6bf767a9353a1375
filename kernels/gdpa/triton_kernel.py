"""Triton kernel of gdpa: two chained products over tiles of one request's rows, no softmax stage between them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.aot.case import AotCase
from kernels.backends import interpreting
from kernels.broadcast_attention.triton_kernel import plan_tiles
from kernels.gpu.lang import dot, jit, narrow

_ROWS, _KEYS = 128, 64
_FEW_ROWS = 64
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

    With an index, rows are taken in ``order`` (sorted by request), request r has those from ``first_row[r]`` to
    ``first_row[r + 1]``, and tile t belongs to ``tile_request[t]``, B for none.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    request, begin, end = 0, 0, C
    if HAS_INDEX:
        request = tl.load(tile_request + tile)
        if request >= B:
            return
        tile -= tl.load(first_tile + request)
        begin = tl.load(first_row + request)
        end = tl.load(first_row + request + 1)
    rows = tile * BM + tl.arange(0, BM)
    in_rows = rows < (end - begin) * Q
    row = begin + rows // Q
    if HAS_INDEX:
        row = tl.load(order + row, mask=in_rows, other=0)
    width, keys = tl.arange(0, BK), tl.arange(0, BN)
    in_width = width < K
    q_rows = ((row.to(tl.int64) * Q + rows % Q) * H + head) * K
    seen = in_rows[:, None] & in_width[None, :]
    queries = tl.load(q + q_rows[:, None] + width[None, :], mask=seen, other=0.0)
    acc = tl.zeros((BM, BK), tl.float32)
    first, last = tl.load(ends + request).to(tl.int32), tl.load(ends + request + 1).to(tl.int32)
    for t in tl.range(first, last, BN):
        key_rows = ((t + keys).to(tl.int64) * H + head) * K
        inside = ((t + keys) < last)[:, None] & in_width[None, :]
        key = tl.load(k + key_rows[:, None] + width[None, :], mask=inside, other=0.0)
        scores = dot(queries, tl.trans(key), tl.zeros((BM, BN), tl.float32), WIDEN) * scale
        value = tl.load(v + key_rows[:, None] + width[None, :], mask=inside, other=0.0)
        acc = dot(narrow(activate(scores, ACTIVATION), v.dtype.element_ty, WIDEN), value, acc, WIDEN)
    tl.store(out + q_rows[:, None] + width[None, :], narrow(acc, out.dtype.element_ty, WIDEN), mask=seen)


def gdpa(
    q_CQHK: Tensor, k_MHK: Tensor, v_MHK: Tensor, ends: Tensor, index_C: Tensor | None, activation: str, tau: float
) -> Tensor:
    """Launch the kernel; see the facade."""
    num_rows, num_queries, num_heads, head_width = q_CQHK.shape
    q_CQHK = q_CQHK.contiguous()
    out = torch.empty_like(q_CQHK)
    if out.numel() == 0:
        return out
    tile_rows = _ROWS if num_rows * num_queries >= _ROWS else _FEW_ROWS
    ends = ends.int()
    if index_C is None:
        plan: tuple[Tensor, ...] = (ends, ends, ends, ends)
        num_tiles = triton.cdiv(num_rows * num_queries, tile_rows)
    else:
        plan = plan_tiles(index_C, len(ends) - 1, num_queries, tile_rows)
        num_tiles = len(plan[2])
    gdpa_kernel[(num_tiles, num_heads)](
        q_CQHK,
        k_MHK.contiguous(),
        v_MHK.contiguous(),
        out,
        ends,
        *plan,
        num_rows,
        len(ends) - 1,
        1.0 / tau,
        Q=num_queries,
        H=num_heads,
        K=head_width,
        **_options(tile_rows, head_width, q_CQHK.element_size()),
        ACTIVATION=_ACTIVATIONS[activation],
        HAS_INDEX=index_C is not None,
        WIDEN=interpreting(),
    )
    return out


def _options(tile_rows: int, head_width: int, item_bytes: int) -> dict[str, int]:
    """Return tile sizes and launch options: eight warps hold 128 rows, four 64; float32 leaves room for one stage."""
    width = max(16, int(triton.next_power_of_2(head_width)))
    num_stages = 3 if item_bytes == 2 else 1
    return {"BM": tile_rows, "BN": _KEYS, "BK": width, "num_warps": tile_rows // 16, "num_stages": num_stages}


def _case(tile_rows: int, head_width: int, activation: str) -> AotCase:
    options = _options(tile_rows, head_width, item_bytes=2)
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    floats = dict.fromkeys(("q", "k", "v", "out"), "*bf16")
    integers = dict.fromkeys(("ends", "order", "first_row", "tile_request", "first_tile"), "*i32")
    constants = {"Q": 1, "H": 3, "K": head_width, "ACTIVATION": _ACTIVATIONS[activation]}
    return AotCase(
        name=f"gdpa.{activation}.{tile_rows}x{head_width}",
        kernel=gdpa_kernel,
        arguments=floats | integers | {"C": "i32", "B": "i32", "scale": "fp32"},
        constants=options | constants | {"HAS_INDEX": True, "WIDEN": False},
        aligned=(*floats, *integers),
        tensor_cores="hgmma",
        **launch,
    )


AOT_CASES = [
    _case(_ROWS, 128, "gelu"),
    _case(_ROWS, 128, "relu"),
    _case(_ROWS, 64, "silu"),
    _case(_FEW_ROWS, 64, "identity"),
]
