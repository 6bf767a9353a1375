"""FLOPs and necessary bytes of one call, by operator.

Bytes are inputs read once and outputs written once, as the operator's caller sees them: what a form spills, reads again
or pads is its own loss, and what stays in a cache between two calls is its gain. Indices and offsets are left out where
they are under a thousandth. Shape letters as in the operators' READMEs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.roofline.model import Precision, Work

_ITEM_BYTES: dict[Precision, int] = {"bf16": 2, "fp8": 1, "int8": 1, "fp32": 4}
_BF16 = 2


def broadcast_gemm(c: int, n: int, k: int, r: int, b: int, precision: Precision = "bf16") -> Work:
    """Count ``BroadcastGemm`` with its request half: both weights, both inputs, the output."""
    values = c * k + n * (k + r) + b * r + c * n
    return Work(2.0 * n * (c * k + b * r), float(_ITEM_BYTES[precision] * values), precision)


def broadcast_token_gemm(c: int, m: int, k: int, r: int, d: int, b: int) -> Work:
    """Count ``BroadcastTokenGemm`` with its request half."""
    values = c * k * d + m * (k + r) + b * r * d + c * m * d
    return Work(2.0 * m * d * (c * k + b * r), float(_BF16 * values))


def fm_block(c: int, n: int, k: int, d: int, b: int, precision: Precision = "bf16") -> Work:
    """Count both products; tokens in, products out, the parts of B requests in float32 (0: there is none)."""
    num_bytes = _ITEM_BYTES[precision] * c * n * (d + k) + 4 * b * k * d
    return Work(4.0 * c * n * d * k, float(num_bytes), precision)


def broadcast_attention(c: int, q: int, h: int, k: int, lengths: Sequence[int], precision: Precision = "bf16") -> Work:
    """Count both products of C Q H query rows and the keys of their request, candidates spread evenly."""
    pairs = sum(lengths) / len(lengths) * c * q * h
    return Work(4.0 * pairs * k, float(_ITEM_BYTES[precision] * 2 * h * k * (c * q + sum(lengths))), precision)


def jagged_attention(lengths: Sequence[int], h: int, k: int, *, causal: bool) -> Work:
    """Count the pairs that are seen; queries, keys, values and answers once."""
    pairs = sum(n * (n + 1) / 2 if causal else n * n for n in lengths)
    return Work(4.0 * pairs * h * k, float(_BF16 * 4 * sum(lengths) * h * k))


def block_attention(lengths: Sequence[int], h: int, k: int, *, block: int, window_blocks: int, causal: bool) -> Work:
    """Count the pairs that are seen within windows of whole blocks."""
    pairs = sum(window_pairs(length, block, window_blocks, causal=causal) for length in lengths)
    return Work(4.0 * pairs * h * k, float(_BF16 * 4 * sum(lengths) * h * k))


def window_pairs(length: int, block: int, window_blocks: int, *, causal: bool) -> int:
    """Return how many pairs of positions of one sequence see one another; its last block may be a part of one."""
    pairs = 0
    for begin in range(0, length, block):
        own = min(block, length - begin)
        before = min(begin // block, window_blocks - 1) * block
        pairs += own * before + (own * (own + 1) // 2 if causal else own * own)
    return pairs


def gdpa(num_rows: int, num_requests: int, m: int, k: int, h: int) -> Work:
    """Count both products of every row with its request's M keys."""
    return Work(4.0 * num_rows * h * k * m, float(_BF16 * 2 * h * k * (num_rows + num_requests * m)))


def jagged_norm(num_rows: int, d: int) -> Work:
    """Count norm and residual: two read, two written a value."""
    return Work(6.0 * num_rows * d, float(_BF16 * 4 * num_rows * d), "fp32")


def linear(m: int, n: int, k: int, precision: Precision = "bf16") -> Work:
    """Count x W^T: rows enter and leave in bf16 (float32 if that multiplies), the weight lies in its own format.

    Low-precision rows are rounded by the call itself, so it reads bf16.
    """
    row_bytes = _ITEM_BYTES[precision] if precision == "fp32" else _BF16
    return Work(2.0 * m * n * k, float(row_bytes * m * (k + n) + _ITEM_BYTES[precision] * n * k), precision)


def norm_quantize(m: int, k: int) -> Work:
    """Count the RMS norm with the quantize step: bf16 read, one byte written a value."""
    return Work(4.0 * m * k, 3.0 * m * k, "fp32")


def grouped_gemm(rows: Sequence[int], n: int, k: int, precision: Precision = "bf16") -> Work:
    """Count products of jagged groups, a weight each; rows in and out."""
    total = sum(rows)
    return Work(2.0 * total * n * k, float(_ITEM_BYTES[precision] * (total * (k + n) + len(rows) * n * k)), precision)


def linear_batch(shapes: Sequence[tuple[int, int, int]]) -> Work:
    """Count linears of unlike (M, N, K)."""
    flops = sum(2.0 * m * n * k for m, n, k in shapes)
    return Work(flops, float(sum(_BF16 * (m * k + n * k + m * n) for m, n, k in shapes)))


def segmented_topk(lengths: Sequence[int], k: int, *, with_tie_keys: bool) -> Work:
    """Count float32 values and int64 tie keys read once, int64 indices written; nothing is multiplied."""
    value_bytes = 12 if with_tie_keys else 4
    return Work(0.0, float(value_bytes * sum(lengths) + 8 * sum(min(k, length) for length in lengths)), "fp32")


def event_layers(n: int, d: int, m: int, window: int, *, feed_forward: int, attention: int, layers: int) -> Work:
    """Count n new events through layers of the history encoder, some of which have a network or self-attention.

    Every event sees the window and the new events up to itself. The window is written once more, with the new events.
    """
    pairs = n * window + n * (n + 1) // 2
    flops = layers * 4 * n * d * d + feed_forward * 4 * n * d * m + attention * (8 * n * d * d + 4 * pairs * d)
    weights = layers * 2 * d * d + feed_forward * 2 * m * d + attention * 4 * d * d
    rows = n * d + layers * 2 * n * d + attention * 2 * d * (2 * window + n)
    return Work(float(flops), float(_BF16 * (weights + rows)))


@dataclass(frozen=True, slots=True)
class StackSizes:
    """A stack of equal fused layers.

    Args:
        layers: How many.
        tokens: n.
        width: D.
        mixtures: k.
        hidden: h.
        mlp_tokens: m.
        linear_tokens: l.
        queries: Q, to the history.
        keys: T of the one request.
    """

    layers: int
    tokens: int
    width: int
    mixtures: int
    hidden: int
    mlp_tokens: int
    linear_tokens: int
    queries: int = 0
    keys: int = 0

    @property
    def seen(self) -> int:
        """Tokens that are mixed: s."""
        return self.tokens + self.queries


def wukong_stack(c: int, sizes: StackSizes) -> Work:
    """Count a stack of layers for the candidates of one request: tokens in and out, weights, what the request gives."""
    n, d, k, h, s, q = sizes.tokens, sizes.width, sizes.mixtures, sizes.hidden, sizes.seen, sizes.queries
    m, linear_tokens = sizes.mlp_tokens, sizes.linear_tokens
    flops = 4 * s * k * d + 2 * s * k * h + 2 * h * m * d + 2 * linear_tokens * s * d
    weights = k * s + s * k + h * s * k + m * d * h + linear_tokens * s + d
    given = 4 * d * (k + linear_tokens) + 4 * h
    if q:
        flops += 2 * q * n * d + 4 * q * d * d + 4 * q * sizes.keys * d
        weights += q * n + 2 * d * d
        given += _BF16 * 2 * sizes.keys * d + 4 * q * d
    tokens_out = m + linear_tokens
    num_bytes = _BF16 * c * d * (n + tokens_out) + sizes.layers * (_BF16 * weights + given)
    return Work(float(c * sizes.layers * flops), float(num_bytes))
