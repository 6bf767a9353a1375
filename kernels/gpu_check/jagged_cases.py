"""Checks of the operators of the history encoder: jagged attention, generalised dot-product attention, jagged norms."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from kernels.gdpa import gdpa
from kernels.gpu_check.check import Check, Prepared
from kernels.jagged_attention import jagged_attention
from kernels.jagged_norm import jagged_norm
from kernels.roofline import counts
from kernels.tolerance import tolerance

BF16 = torch.bfloat16

PADDED = tuple(range(32, 1_025, 32))
"""Lengths of a batch whose padded form is twice as large."""


def jagged_checks() -> list[Check]:
    """Return all of them: empty and one-event sequences, and batches of real sizes."""
    attention = [((65, 0, 1, 130), 2, 24), ((2_048,), 2, 64), (PADDED, 2, 64)]
    feed_forward = [((70, 0, 1), 33, 24, 1), ((2_048,), 256, 64, 1), ((512,) * 32, 256, 128, 3)]
    norms = [((65, 0, 1, 130), 19), (PADDED, 256)]
    return [
        *(
            Check("jagged_attention", f"{'causal' if causal else 'whole'} B{len(t)} T{sum(t)} H{h} K{k}",
                  partial(_attention, t, h, k, causal), is_timed=max(t) > 1_000,
                  work=counts.jagged_attention(t, h, k, causal=causal))
            for causal in (True, False)
            for t, h, k in attention
        ),
        *(
            Check("gdpa", f"{activation} B{len(t)} T{sum(t)} M{m} K{k} H{h}",
                  partial(_gdpa, t, m, k, h, activation), is_timed=max(t) > 500,
                  work=counts.gdpa(sum(t), len(t), m, k, h))
            for activation in ("gelu", "relu")
            for t, m, k, h in feed_forward
        ),
        *(
            Check("jagged_norm", f"{over} B{len(t)} T{sum(t)} D{d}", partial(_norm, t, d, over),
                  is_timed=max(t) > 1_000, work=counts.jagged_norm(sum(t), d))
            for over in ("row", "sequence")
            for t, d in norms
        ),
    ]  # fmt: skip


def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def _attention(lengths: tuple[int, ...], num_heads: int, width: int, causal: bool, device: torch.device) -> Prepared:
    q, k, v = (torch.randn(sum(lengths), num_heads, width, device=device, dtype=BF16) for _ in range(3))
    ends = _ends(lengths, device)

    def expected() -> tuple[Tensor, Tensor]:
        out, size = (torch.zeros(q.shape, device=device, dtype=torch.float64) for _ in range(2))
        for begin, end in pairwise(ends.tolist()):
            scores = torch.einsum("qhk,shk->hqs", q[begin:end].double(), k[begin:end].double()) * width**-0.5
            if causal:
                scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
            weights = torch.softmax(scores, -1)
            out[begin:end] = torch.einsum("hqs,shk->qhk", weights, v[begin:end].double())
            size[begin:end] = torch.einsum("hqs,shk->qhk", weights, v[begin:end].double().abs())
        return out, size

    def unfused() -> Tensor:
        queries, keys, values = (_pad(x, lengths).transpose(1, 2) for x in (q, k, v))
        answers = functional.scaled_dot_product_attention(queries, keys, values, is_causal=causal)
        return _cut(answers.transpose(1, 2), lengths)

    return Prepared(
        fused=lambda: jagged_attention(q, k, v, ends, ends, causal=causal, backend="triton"),
        unfused=unfused,
        expected=expected,
        # exp moves a weight by as much as its score is wrong, and scores here stay below about 6.
        tolerance=tolerance(BF16, 36 * (width + max(lengths)), roundings=3),
    )


def _gdpa(
    lengths: tuple[int, ...], num_keys: int, width: int, num_heads: int, activation: str, device: torch.device
) -> Prepared:
    q = torch.randn(sum(lengths), 1, num_heads, width, device=device, dtype=BF16)
    k, v = (torch.randn(len(lengths), num_keys, num_heads, width, device=device, dtype=BF16) for _ in range(2))
    index = torch.repeat_interleave(torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device))
    tau = width**0.5

    def act(scores: Tensor) -> Tensor:
        return functional.gelu(scores, approximate="tanh") if activation == "gelu" else functional.relu(scores)

    def expected() -> tuple[Tensor, Tensor]:
        outs, sizes = [], []
        for request, rows in enumerate(torch.split(q[:, 0].double(), list(lengths))):
            keys, values = k[request].double(), v[request].double()
            scores = torch.einsum("thk,mhk->htm", rows, keys) / tau
            terms = torch.einsum("thk,mhk->htm", rows.abs(), keys.abs()) / tau
            outs.append(torch.einsum("htm,mhk->thk", act(scores), values))
            sizes.append(torch.einsum("htm,mhk->thk", terms, values.abs()))
        return torch.cat(outs)[:, None], torch.cat(sizes)[:, None]

    def unfused() -> Tensor:
        padded = _pad(q[:, 0], lengths).transpose(1, 2)
        scores = torch.matmul(padded, k.permute(0, 2, 3, 1)) / tau
        return _cut(torch.matmul(act(scores), v.transpose(1, 2)).transpose(1, 2), lengths)[:, None]

    return Prepared(
        fused=lambda: gdpa(
            q, k, v, None, index.int(), activation="gelu" if activation == "gelu" else "relu", tau=tau, backend="triton"
        ),
        unfused=unfused,
        expected=expected,
        tolerance=tolerance(BF16, width + num_keys, roundings=3),
    )


def _norm(lengths: tuple[int, ...], width: int, over: str, device: torch.device) -> Prepared:
    x, residual = (torch.randn(sum(lengths), width, device=device, dtype=BF16) for _ in range(2))
    gain, ends = torch.randn(width, device=device, dtype=BF16), _ends(lengths, device)

    def expected() -> tuple[Tensor, Tensor]:
        total = (x.float() + residual.float()).to(BF16).double()
        square = total.square().mean(1, keepdim=True)
        if over == "sequence":
            parts = torch.split(square, list(lengths))
            square = torch.cat([part.mean().expand(len(part), 1) for part in parts])
        truth = total * torch.rsqrt(square + 1e-6) * gain.double()
        return truth, truth.abs()

    def unfused() -> Tensor:
        return functional.rms_norm(x + residual, gain.shape, gain, 1e-6)

    return Prepared(
        fused=lambda: jagged_norm(
            x, gain, ends, residual_TD=residual, over="row" if over == "row" else "sequence", backend="triton"
        )[1],
        unfused=unfused,
        expected=expected,
        tolerance=tolerance(BF16, width * max(lengths), roundings=1),
    )


def _pad(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Pad jagged rows to the longest sequence: [T, H, K] -> [B, longest, H, K]."""
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(x, list(lengths))), batch_first=True)


def _cut(padded: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Take the padding away again: [B, longest, H, K] -> [T, H, K]."""
    return torch.cat([rows[:length] for rows, length in zip(padded, lengths, strict=True)])
