"""The candidate side of interaction layers: every backend against the plain form, and what a batch must not change."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.native import NativeUnavailableError
from kernels.wukong_layer import Backend, LayerGiven, LayerWeights, give, pack, rank
from kernels.wukong_layer.native import chunk_size
from tests.unit.kernels.native.support import assert_close, require_native


@dataclasses.dataclass(frozen=True)
class Sizes:
    num_tokens: int = 5
    num_queries: int = 2
    width: int = 32
    num_heads: int = 2
    num_mixtures: int = 8
    num_mlp_tokens: int = 2
    num_linear_tokens: int = 2
    hidden: int = 24
    num_requests: int = 1
    num_keys: int = 20
    num_layers: int = 2
    mapped_residual: bool = False
    num_residual_tokens: int = 0
    product_epsilon: float = 1e-6


GRID = [
    Sizes(),
    Sizes(num_tokens=32, num_queries=0, width=64, num_mixtures=16, num_mlp_tokens=16, num_linear_tokens=16, hidden=48),
    Sizes(num_tokens=7, num_queries=1, width=20, num_mixtures=5, num_mlp_tokens=3, num_linear_tokens=4, hidden=30),
    Sizes(num_tokens=33, num_queries=3, width=128, num_heads=4, num_mixtures=40, hidden=100, num_keys=70),
    Sizes(num_tokens=1, num_queries=1, width=1, num_heads=1, num_mixtures=1, num_mlp_tokens=1, num_linear_tokens=0),
    Sizes(width=96, num_heads=3, num_mixtures=17, hidden=1, num_keys=600, num_requests=3),
    Sizes(num_tokens=4, mapped_residual=True, num_requests=4, num_keys=1),
    Sizes(num_keys=0, num_requests=2),
    Sizes(num_residual_tokens=3, mapped_residual=True, product_epsilon=0.5),
    Sizes(num_tokens=5, num_residual_tokens=1),
    Sizes(num_mlp_tokens=1, num_linear_tokens=3, num_mixtures=33, width=48, num_heads=16),
]


def _make(sizes: Sizes, seed: int = 0) -> tuple[list[LayerWeights], list[LayerGiven]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, fan_in: int = 1) -> Tensor:
        return torch.randn(*shape, generator=generator).mul_(fan_in**-0.5)

    weights, given = [], []
    num_tokens, s, d = sizes.num_tokens, sizes, sizes.width
    num_out = s.num_mlp_tokens + s.num_linear_tokens + s.num_residual_tokens
    for _ in range(s.num_layers):
        seen = num_tokens + s.num_queries
        products = seen * s.num_mixtures
        weights.append(
            LayerWeights(
                query_tokens=normal(s.num_queries, num_tokens, fan_in=num_tokens),
                query=normal(d, d, fan_in=d),
                attention_out=normal(d, d, fan_in=d),
                mixtures=normal(s.num_mixtures, seen, fan_in=seen),
                norm_products=1 + 0.1 * normal(products),
                up=normal(s.hidden, products, fan_in=products),
                down=normal(s.num_mlp_tokens * d, s.hidden, fan_in=s.hidden),
                linear=normal(s.num_linear_tokens, seen, fan_in=seen),
                residual=normal(num_out, num_tokens, fan_in=num_tokens)
                if num_out != num_tokens or s.mapped_residual
                else None,
                norm=1 + 0.1 * normal(d),
                num_heads=s.num_heads,
                num_residual_tokens=s.num_residual_tokens,
                product_epsilon=s.product_epsilon,
            )
        )
        b = s.num_requests
        given.append(
            LayerGiven(
                keys=normal(b, s.num_keys, d),
                values=normal(b, s.num_keys, d),
                queries=normal(b, s.num_queries, d),
                mixtures=normal(b, s.num_mixtures, d, fan_in=8),
                linear=normal(b, s.num_linear_tokens, d, fan_in=8),
                hidden=normal(b, s.hidden, fan_in=8),
            )
        )
        num_tokens = num_out
    return weights, given


def _candidates(sizes: Sizes, count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(count, sizes.num_tokens, sizes.width, generator=generator).bfloat16()
    return tokens, torch.randint(0, sizes.num_requests, (count,), generator=generator, dtype=torch.int32)


def _run(
    sizes: Sizes, count: int, backend: Backend, dtype: torch.dtype = torch.bfloat16, mask: Tensor | None = None
) -> Tensor:
    weights, given = _make(sizes)
    tokens, request = _candidates(sizes, count)
    layers = pack(weights, backend=backend, dtype=dtype)
    return rank(layers, tokens, give(layers, given, mask=mask), request)


def _check(found: Tensor, expected: Tensor, sizes: Sizes, dtype: torch.dtype = torch.bfloat16, extra: int = 1) -> None:
    longest = max(
        sizes.hidden, (sizes.num_tokens + sizes.num_queries) * sizes.num_mixtures, sizes.num_keys, sizes.width
    )
    # Of each layer: tokens, mapped, queries, weights of keys, answers, seen, mixtures, products, hidden, output.
    roundings = 10 * sizes.num_layers * extra
    assert_close(found, expected, dtype=dtype, reduction=longest * sizes.num_layers, roundings=roundings)


@pytest.mark.parametrize("sizes", GRID)
@pytest.mark.parametrize("count", [0, 1, 17])
@pytest.mark.usefixtures("poisoned_memory")
def test_native_equals_reference(sizes: Sizes, count: int) -> None:
    require_native()
    found = _run(sizes, count, "native")
    assert found.dtype == torch.bfloat16
    _check(found, _run(sizes, count, "reference"), sizes)


@pytest.mark.parametrize("sizes", GRID)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_equals_reference(sizes: Sizes, dtype: torch.dtype) -> None:
    expected = _run(sizes, 17, "reference", torch.float32)
    # Every operator of the torch path rounds its result, where the fused form keeps sums in fp32: twice as often.
    _check(_run(sizes, 17, "torch", dtype), expected, sizes, dtype, extra=2)


@pytest.mark.parametrize("sizes", GRID[:3])
def test_rounding_costs_what_the_bound_says(sizes: Sizes) -> None:
    expected = _run(sizes, 17, "reference", torch.float32)
    _check(_run(sizes, 17, "reference"), expected, sizes)


@settings(max_examples=12)
@hypothesis_given(
    st.builds(
        Sizes,
        num_tokens=st.integers(1, 20),
        num_queries=st.integers(0, 4),
        width=st.sampled_from([8, 16, 24, 32, 64, 80]),
        num_heads=st.sampled_from([1, 2, 4, 8]),
        num_mixtures=st.integers(1, 35),
        num_mlp_tokens=st.integers(1, 6),
        num_linear_tokens=st.integers(0, 6),
        hidden=st.integers(1, 130),
        num_requests=st.integers(1, 4),
        num_keys=st.integers(0, 130),
        num_residual_tokens=st.integers(0, 2),
        num_layers=st.integers(1, 2),
    ),
    st.integers(1, 9),
)
def test_native_equals_reference_for_any_sizes(sizes: Sizes, count: int) -> None:
    require_native()
    _check(_run(sizes, count, "native"), _run(sizes, count, "reference"), sizes)


@pytest.mark.parametrize("backend", ["reference", "torch", "native"])
def test_masked_keys_are_not_there(backend: Backend) -> None:
    if backend == "native":
        require_native()
    sizes = dataclasses.replace(GRID[5], num_keys=70)
    mask = torch.rand(3, 70, generator=torch.Generator().manual_seed(2)) < 0.6
    mask[1] = False  # one request shows no key at all
    weights, given = _make(sizes)
    hidden = ~mask[:, :, None]
    spoiled = [dataclasses.replace(g, keys=g.keys + 9 * hidden, values=g.values + 9 * hidden) for g in given]
    tokens, request = _candidates(sizes, 11)
    layers = pack(weights, backend=backend)
    clean = rank(layers, tokens, give(layers, given, mask=mask), request)
    assert torch.equal(clean, rank(layers, tokens, give(layers, spoiled, mask=mask), request))
    nan = [
        dataclasses.replace(
            g, keys=g.keys.masked_fill(hidden, torch.nan), values=g.values.masked_fill(hidden, torch.nan)
        )
        for g in given
    ]
    assert torch.equal(clean, rank(layers, tokens, give(layers, nan, mask=mask), request))
    expected = _run(sizes, 11, "reference", torch.float32, mask)
    _check(clean, expected, sizes, extra=2)


@pytest.mark.parametrize("backend", ["reference", "torch", "native"])
def test_a_mask_is_nothing_to_layers_without_queries(backend: Backend) -> None:
    if backend == "native":
        require_native()
    sizes = dataclasses.replace(GRID[1], num_keys=0)
    mask = torch.ones(sizes.num_requests, 7, dtype=torch.bool)
    assert torch.equal(_run(sizes, 3, backend, mask=mask), _run(sizes, 3, backend))


@pytest.mark.parametrize("sizes", [GRID[0], GRID[1], GRID[5]])
def test_a_candidate_does_not_depend_on_its_batch(sizes: Sizes) -> None:
    require_native()
    weights, given = _make(sizes)
    tokens, request = _candidates(sizes, 203)
    layers = pack(weights, backend="native")
    packed = give(layers, given)
    whole = rank(layers, tokens, packed, request)
    for cut in (1, 5, 64, 97):
        parts = [
            rank(layers, t, packed, r)
            for t, r in zip(torch.split(tokens, cut)[:3], torch.split(request, cut)[:3], strict=True)
        ]
        assert torch.equal(torch.cat(parts), whole[: min(3 * cut, 203)])
    order = torch.randperm(203, generator=torch.Generator().manual_seed(3))
    assert torch.equal(rank(layers, tokens[order], packed, request[order]), whole[order])


def test_threads_do_not_change_a_bit() -> None:
    require_native()
    sizes = GRID[5]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = _run(sizes, 205, "native")
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(_run(sizes, 205, "native"), one)
    finally:
        torch.set_num_threads(before)


def test_layers_in_one_call_equal_layers_one_by_one() -> None:
    require_native()
    weights, given = _make(GRID[1])
    tokens, request = _candidates(GRID[1], 70)
    for weight, own in zip(weights, given, strict=True):
        layer = pack([weight], backend="native")
        tokens = rank(layer, tokens, give(layer, [own]), request)
    assert torch.equal(tokens, _run(GRID[1], 70, "native"))


@pytest.mark.parametrize("backend", ["reference", "torch", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_later_change_of_weights_does_not_reach_the_stack(backend: Backend, dtype: torch.dtype) -> None:
    if backend == "native":
        require_native()
    weights, given = _make(GRID[6])
    tokens, request = _candidates(GRID[6], 9)
    cast = [dataclasses.replace(w, **{k: v.to(dtype) for k, v in _tensors(w).items()}) for w in weights]
    layers = pack(cast, backend=backend)
    before = rank(layers, tokens, give(layers, given), request)
    for layer in cast:
        for tensor in _tensors(layer).values():
            tensor.mul_(2.0)
    assert torch.equal(rank(layers, tokens, give(layers, given), request), before)


def _tensors(weights: LayerWeights) -> dict[str, Any]:
    values = {field.name: getattr(weights, field.name) for field in dataclasses.fields(weights)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def test_nan_stays_with_its_candidate_and_is_not_hidden() -> None:
    require_native()
    weights, given = _make(GRID[0])
    tokens, request = _candidates(GRID[0], 13)
    layers = pack(weights, backend="native")
    packed = give(layers, given)
    clean = rank(layers, tokens, packed, request)
    spoiled = tokens.clone()
    spoiled[4] = torch.nan
    found = rank(layers, spoiled, packed, request)
    others = torch.arange(13) != 4
    assert torch.isnan(found[4]).all()
    assert torch.equal(found[others], clean[others])
    # Nor does it stay in the working memory, which is kept from call to call.
    rank(layers, torch.full_like(tokens, torch.nan), packed, request)
    assert torch.equal(rank(layers, tokens, packed, request), clean)


@pytest.mark.parametrize(("count", "threads", "expected"), [(1, 2, 6), (100, 2, 54), (100, 1, 54), (1000, 2, 84)])
def test_chunks_give_every_thread_the_same_work(count: int, threads: int, expected: int) -> None:
    assert chunk_size(count, threads, 84) == expected


def _replace(layer: LayerWeights, **changes: Any) -> list[LayerWeights]:
    return [dataclasses.replace(layer, **changes)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(32, 31)}, r"weights\[0\].query must be \[32, 32\], is \[32, 31\]"),
        ({"up": torch.zeros(24, 9)}, r"weights\[0\].up must be \[24, 56\], is \[24, 9\]"),
        ({"residual": None}, r"weights\[0\].residual must be given: 5 tokens enter, 4 leave"),
        ({"num_heads": 3}, r"weights\[0\].num_heads must divide the width 32, is 3"),
    ],
)
def test_bad_weights_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(_replace(_make(GRID[0])[0][0], **changes), backend="reference")


def test_layers_must_fit_together() -> None:
    weights = _make(GRID[0])[0]
    with pytest.raises(ValueError, match=r"weights\[1\] must take 4 tokens of width 32, takes 5 of width 32"):
        pack([weights[0], weights[0]], backend="reference")
    with pytest.raises(ValueError, match="at least one layer"):
        pack([], backend="reference")


def test_unknown_backends_and_dtypes_are_refused() -> None:
    weights = _make(GRID[0])[0]
    with pytest.raises(ValueError, match=r"backend must be one of .* is 'triton'"):
        pack(weights, backend=cast(Backend, "triton"))
    with pytest.raises(ValueError, match="dtype of backend native must be one of"):
        pack(weights, backend="native", dtype=torch.float32)


def test_native_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable() -> None:
        raise NativeUnavailableError("native backend: no such instructions")

    monkeypatch.setattr("kernels.wukong_layer.native.load", unavailable)
    with pytest.raises(NativeUnavailableError, match="no such instructions"):
        pack(_make(GRID[0])[0], backend="native")


def test_bad_requests_and_candidates_are_refused() -> None:
    weights, given = _make(GRID[6])
    tokens, request = _candidates(GRID[6], 3)
    layers = pack(weights, backend="reference")
    packed = give(layers, given)
    for bad, message in (
        ((tokens[:, :3], packed, request), r"tokens must be \[C, 4, 32\], are \[3, 3, 32\]"),
        ((tokens.int(), packed, request), "tokens must be floating-point"),
        ((tokens, packed, None), "candidate_to_request must be given for 4 requests"),
        ((tokens, packed, request.long()), r"candidate_to_request must be torch.int32 \[3\]"),
        ((tokens, packed, request + 4), r"candidate_to_request must be in \[0, 4\)"),
        ((tokens, give(pack(weights, backend="reference"), given), request), "given must have been made for these"),
    ):
        with pytest.raises(ValueError, match=message):
            rank(layers, *bad)
    with pytest.raises(ValueError, match="one entry for each of 2 layers, has 1"):
        give(layers, given[:1])
    with pytest.raises(ValueError, match=r"given\[1\].hidden must be \[4, 24\]"):
        give(layers, [given[0], dataclasses.replace(given[1], hidden=torch.zeros(4, 3))])
    with pytest.raises(ValueError, match=r"mask must be torch.bool \[4, 1\]"):
        give(layers, given, mask=torch.ones(4, 2, dtype=torch.bool))
