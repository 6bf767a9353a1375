"""X (X^T Y) of every backend against float64: odd sizes, no candidate, one, shared request parts, the fused norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.fm_block import NUM_MIXTURES_MAX, NUM_TOKENS_MAX, fm_block
from kernels.tolerance import largest_error, tolerance

pytestmark = pytest.mark.usefixtures("poisoned_memory")
BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpret)]
# candidates, tokens, mixtures, width, requests
SHAPES = [(1, 1, 1, 1, 1), (5, 17, 7, 33, 2), (3, 32, 16, 64, 3), (0, 8, 4, 16, 2), (2, 70, 33, 130, 2)]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def _truth(
    x: Tensor, y: Tensor, part: Tensor | None, index: Tensor | None, gain: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the products over n x n token pairs in float64, and the magnitude of what was summed."""
    x, y = x.double(), y.double()
    out, size = (x @ x.mT) @ y, (x.abs() @ x.abs().mT) @ y.abs()
    if part is not None:
        rows = torch.zeros(len(x), dtype=torch.int64) if index is None else index.long()
        mine = part.double()[rows].mT
        out, size = out + x @ mine, size + x.abs() @ mine.abs()
    if gain is not None:
        scale = torch.rsqrt(out.square().mean((1, 2), keepdim=True) + 1e-6) * gain.double().view(y.shape)
        out, size = out * scale, size * scale.abs()
    return out, size


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["plain", "part", "part and norm, token-major"])
def test_equals_products_over_token_pairs(backend: Any, dtype: torch.dtype, shape: Any, form: str) -> None:
    num_candidates, num_tokens, num_mixtures, width, num_requests = shape
    y = _random(num_tokens, num_mixtures, dtype=dtype, seed=1)
    part = None if form == "plain" else _random(num_requests, num_mixtures, width, seed=2)
    generator = torch.Generator().manual_seed(7)
    index = torch.randint(0, num_requests, (num_candidates,), generator=generator, dtype=torch.int32)
    given = None if form == "plain" or num_requests == 1 else index
    gain = _random(num_tokens * num_mixtures, dtype=dtype, seed=3) if "norm" in form else None
    if "token-major" in form:
        x = _random(num_tokens, num_candidates, width, dtype=dtype).transpose(0, 1)
    else:
        x = _random(num_candidates, num_tokens, width, dtype=dtype)
    out = fm_block(x, y, part, given, gain=gain, backend=backend)
    expected, magnitude = _truth(x, y, part, given, gain)
    # Rounded in the storage type: X^T Y, once more with the part added, the product, the normalised product.
    assert largest_error(out, expected, magnitude) <= tolerance(dtype, num_tokens + width, roundings=4)
    assert out.dtype == dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_request_tokens_enter_through_their_part(backend: Any) -> None:
    candidate, request = _random(4, 6, 16), _random(1, 9, 16, seed=5)
    y_candidate, y_request = _random(6, 3, seed=1), _random(9, 3, seed=2)
    part = (request.mT @ y_request).mT
    shared = fm_block(candidate, y_candidate, part, backend=backend)
    both = torch.cat([candidate, request.expand(4, -1, -1)], 1)
    whole = fm_block(both, torch.cat([y_candidate, y_request]), backend="reference")[:, :6]
    assert largest_error(shared, whole) <= tolerance(torch.float32, 31)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_products_stay_zero_under_the_norm(backend: Any) -> None:
    out = fm_block(torch.zeros(2, 3, 16), torch.ones(3, 4), gain=torch.ones(12), backend=backend)
    torch.testing.assert_close(out, torch.zeros(2, 3, 4), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 1), {}, r"x_CnD must be .* \[any, any, any\]"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 1), {}, r"y_nk must be float32 \[3, any\]"),
        (torch.zeros(2, 3, 4), torch.zeros(3, 1).bfloat16(), {}, "y_nk must be float32"),
        (torch.zeros(2, 3, 4), torch.zeros(3, 1), {"part_BkD": torch.zeros(1, 2, 4)}, "part_BkD must be float32"),
        (torch.zeros(2, 3, 4), torch.zeros(3, 1), {"part_BkD": torch.zeros(2, 1, 4)}, "None for one request only"),
        (torch.zeros(2, 3, 4), torch.zeros(3, 1), {"candidate_to_request_C": torch.zeros(2)}, "needs part_BkD"),
        (torch.zeros(2, 3, 4), torch.zeros(3, 1), {"gain": torch.zeros(4)}, r"gain must be float32 \[3\]"),
        (torch.zeros(2, 3, 4), torch.zeros(3, 1), {"backend": "native"}, "backend must be one of"),
        (
            torch.zeros(2, NUM_TOKENS_MAX + 1, 4),
            torch.zeros(NUM_TOKENS_MAX + 1, 1),
            {"backend": "triton"},
            "at most 256 tokens and 64 mixtures, got 257 and 1",
        ),
        (
            torch.zeros(2, 3, 4),
            torch.zeros(3, NUM_MIXTURES_MAX + 1),
            {"backend": "triton"},
            "at most 256 tokens and 64 mixtures, got 3 and 65",
        ),
    ],
)
def test_a_wrong_call_is_refused(x: Tensor, y: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fm_block(x, y, **{"backend": "torch", **options})


@pytest.mark.interpret
def test_the_largest_sizes_that_triton_takes() -> None:
    x, y = _random(1, NUM_TOKENS_MAX, 16), _random(NUM_TOKENS_MAX, NUM_MIXTURES_MAX, seed=1)
    expected, magnitude = _truth(x, y, None, None, None)
    found = fm_block(x, y, backend="triton")
    assert largest_error(found, expected, magnitude) <= tolerance(torch.float32, NUM_TOKENS_MAX + 16)
