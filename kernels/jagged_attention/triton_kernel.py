"""Triton kernel of jagged_attention: flash attention over tiles of one sequence's queries."""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor

from kernels.aot.case import AotCase
from kernels.backends import interpreting
from kernels.gpu.attention import FEW_ROWS, ROWS, attention_case, launch_options, lay_tiles, load_head, store_head
from kernels.gpu.lang import dot, jit, narrow

_LOG2_E = 1 / math.log(2)


@jit
def online_softmax(
    scores: tl.tensor, most: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the weights of one more tile of keys, how much what was summed before shrinks, and the new state.

    Scores are in units of log 2, -inf where a key is not seen; a row may have seen none yet.
    """
    higher = tl.maximum(most, tl.max(scores, 1))
    # Of a row that saw nothing: exp2(-inf - 0) = 0 instead of exp2(-inf + inf).
    finite = tl.where(higher > float("-inf"), higher, 0.0)
    weights = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(most - finite)
    return weights, shrink, higher, total * shrink + tl.sum(weights, 1)


@jit
def jagged_attention_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    query_ends: tl.tensor,
    key_ends: tl.tensor,
    tile_sequence: tl.tensor,
    first_tile: tl.tensor,
    B: tl.tensor,
    scale: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Attend from BM queries of one sequence, in one head: q and out [T, H, K], k and v [S, H, K], ends [B + 1].

    Tile t belongs to ``tile_sequence[t]``, B for none, whose tiles begin at ``first_tile``. ``scale`` has log2(e) in
    it. A causal tile stops at the key where its last query stands.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tile_sequence + tile)
    if sequence >= B:
        return
    tile -= tl.load(first_tile + sequence)
    first_query = tl.load(query_ends + sequence).to(tl.int32)
    num_queries = tl.load(query_ends + sequence + 1).to(tl.int32) - first_query
    first_key = tl.load(key_ends + sequence).to(tl.int32)
    num_keys = tl.load(key_ends + sequence + 1).to(tl.int32) - first_key
    rows = tile * BM + tl.arange(0, BM)
    stands = rows + num_keys - num_queries
    last = num_keys
    if CAUSAL:
        last = tl.minimum(num_keys, (tile + 1) * BM + num_keys - num_queries)
    keys = tl.arange(0, BN)
    in_rows = rows < num_queries
    queries = load_head(q, first_query + rows, in_rows, head, H, K, BK)
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BK), tl.float32)
    for t in tl.range(0, last, BN):
        in_keys = (t + keys) < num_keys
        key = load_head(k, first_key + t + keys, in_keys, head, H, K, BK)
        scores = dot(queries, tl.trans(key), tl.zeros((BM, BN), tl.float32), WIDEN) * scale
        visible = in_keys[None, :]
        if CAUSAL:
            visible = visible & ((t + keys)[None, :] <= stands[:, None])
        weights, shrink, most, total = online_softmax(tl.where(visible, scores, float("-inf")), most, total)
        value = load_head(v, first_key + t + keys, in_keys, head, H, K, BK)
        acc = dot(narrow(weights, v.dtype.element_ty, WIDEN), value, acc * shrink[:, None], WIDEN)
    # No key at all: the sum is empty and the answer zero.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    store_head(out, first_query + rows, in_rows, head, acc, H, K, BK, WIDEN)


def jagged_attention(
    q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, query_ends: Tensor, key_ends: Tensor, causal: bool, scale: float
) -> Tensor:
    """Launch the kernel; see the facade. Tiles are laid over the sequences on the device, without waiting for it."""
    num_queries, num_heads, head_width = q_THK.shape
    out = torch.empty(q_THK.shape, dtype=q_THK.dtype, device=q_THK.device)
    if out.numel() == 0:
        return out
    num_sequences = len(query_ends) - 1
    num_rows = ROWS if num_queries >= ROWS * num_sequences else FEW_ROWS
    tile_sequence, first_tile = lay_tiles(query_ends.diff(), num_queries, num_rows)
    jagged_attention_kernel[(len(tile_sequence), num_heads)](
        q_THK.contiguous(),
        k_SHK.contiguous(),
        v_SHK.contiguous(),
        out,
        query_ends.int(),
        key_ends.int(),
        tile_sequence,
        first_tile,
        num_sequences,
        scale * _LOG2_E,
        H=num_heads,
        K=head_width,
        **launch_options(num_rows, head_width, q_THK.element_size()),
        CAUSAL=causal,
        WIDEN=interpreting(),
    )
    return out


def _case(tile_rows: int, head_width: int, causal: bool) -> AotCase:
    name = f"jagged_attention.{'causal' if causal else 'whole'}"
    integers = ("query_ends", "key_ends", "tile_sequence", "first_tile")
    constants = {"H": 2, "K": head_width, "CAUSAL": causal}
    return attention_case(name, jagged_attention_kernel, tile_rows, integers, ("B",), constants)


AOT_CASES = [_case(ROWS, 64, True), _case(ROWS, 128, True), _case(FEW_ROWS, 64, False), _case(ROWS, 128, False)]
