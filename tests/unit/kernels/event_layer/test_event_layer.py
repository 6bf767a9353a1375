"""New events through the history encoder's layers: C++ against the plain form, and what cuts must not change."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.event_layer import Backend, LayerGiven, LayerMade, LayerWeights, SelfAttention, append, pack
from kernels.native import NativeUnavailableError
from kernels.tolerance import largest_error, tolerance
from tests.unit.kernels.native.support import assert_close, require_native


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int = 32
    num_heads: int = 2
    hidden: int = 24
    block: int = 8
    window_blocks: int = 2
    parts: tuple[str, ...] = ("f", "a", "fa", "")  # of each layer: feed-forward network, self-attention


GRID = [
    Sizes(),
    Sizes(width=128, num_heads=2, hidden=256, block=128, parts=("f", "a", "f", "a")),
    Sizes(width=20, num_heads=5, hidden=7, block=3, window_blocks=3),
    Sizes(width=6, num_heads=1, hidden=1, block=1, window_blocks=1),
    Sizes(width=48, num_heads=1, hidden=65, block=32, window_blocks=1, parts=("fa", "fa")),
    Sizes(width=2, num_heads=1, hidden=130, block=5, window_blocks=9, parts=("a",)),
    Sizes(width=33, num_heads=1, hidden=9, parts=("f", "", "f")),
    Sizes(width=72, num_heads=4, hidden=64, block=100, window_blocks=4, parts=("fa",)),
]


def _attention(sizes: Sizes) -> SelfAttention | None:
    if not any("a" in part for part in sizes.parts):
        return None
    pairs = sizes.width // sizes.num_heads // 2
    rates = torch.logspace(0, -3, pairs, dtype=torch.float64)
    return SelfAttention(
        sizes.num_heads, sizes.block, sizes.window_blocks, rates[: -(pairs // 2) or None], rates[pairs - pairs // 2 :]
    )


def _make(
    sizes: Sizes, num_before: int, dtype: torch.dtype, seed: int = 0
) -> tuple[list[LayerWeights], list[LayerGiven]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, fan_in: int = 1) -> Tensor:
        return torch.randn(*shape, generator=generator).mul_(fan_in**-0.5)

    d, attention = sizes.width, _attention(sizes)
    weights, given = [], []
    for part in sizes.parts:
        has_attention = "a" in part
        weights.append(
            LayerWeights(
                norm=1 + 0.1 * normal(d),
                key_value=normal(2 * d, d, fan_in=d).bfloat16(),
                norm_feed_forward=1 + 0.1 * normal(d) if "f" in part else None,
                norm_attention=1 + 0.1 * normal(d) if has_attention else None,
                query_key_value=normal(3 * d, d, fan_in=d).bfloat16() if has_attention else None,
                attention_out=normal(d, d, fan_in=d).bfloat16() if has_attention else None,
            )
        )
        hidden = (normal(sizes.hidden, d, fan_in=d), normal(sizes.hidden, d, fan_in=sizes.hidden))
        window = None
        if has_attention and attention is not None:
            shape = (attention.window_of(num_before), sizes.num_heads, d // sizes.num_heads)
            window = (normal(*shape).bfloat16().to(dtype), normal(*shape).bfloat16().to(dtype))
        given.append(
            LayerGiven(
                (hidden[0].bfloat16().to(dtype), hidden[1].bfloat16().to(dtype)) if "f" in part else None, window
            )
        )
    return weights, given


def _events(sizes: Sizes, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(count, sizes.width, generator=generator).bfloat16()
    return tokens, 100 * torch.rand(count, generator=generator, dtype=torch.float64).cumsum(0)


def _run(sizes: Sizes, count: int, num_before: int, backend: Backend, dtype: torch.dtype) -> list[LayerMade]:
    weights, given = _make(sizes, num_before, dtype)
    tokens, clock = _events(sizes, count)
    layers = pack(weights, _attention(sizes), backend=backend, dtype=dtype)
    return append(layers, tokens.to(dtype), clock, num_before, given)


def _tensors(made: list[LayerMade]) -> list[list[Tensor]]:
    return [[each.keys, each.values, *(each.window or ())] for each in made]


def _check(found: list[LayerMade], expected: list[LayerMade], sizes: Sizes, num_seen: int) -> None:
    longest = max(sizes.hidden, sizes.width, num_seen)
    # Of each layer: normed, hidden, tokens; normed, queries, keys, values, weights, answers, tokens; normed, output.
    for index, (own, truth) in enumerate(zip(_tensors(found), _tensors(expected), strict=True)):
        for x, y in zip(own, truth, strict=True):
            assert x.dtype == torch.bfloat16
            roundings = 12 * (index + 1)
            assert_close(x, y, dtype=torch.bfloat16, reduction=longest * (index + 1), roundings=roundings)


@pytest.mark.parametrize("sizes", GRID)
@pytest.mark.parametrize(("count", "num_before"), [(1, 0), (8, 0), (8, 11), (3, 5), (32, 250), (17, 3)])
@pytest.mark.parametrize("exact", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("poisoned_memory")
def test_native_equals_reference(sizes: Sizes, count: int, num_before: int, exact: torch.dtype) -> None:
    require_native()
    found = _run(sizes, count, num_before, "native", torch.bfloat16)
    _check(found, _run(sizes, count, num_before, "reference", exact), sizes, num_before + count)


@settings(max_examples=25)
@hypothesis_given(
    st.builds(
        lambda heads, pairs, **rest: Sizes(width=2 * heads * pairs, num_heads=heads, **rest),
        heads=st.integers(1, 5),
        pairs=st.integers(1, 20),
        hidden=st.integers(1, 140),
        block=st.integers(1, 40),
        window_blocks=st.integers(1, 4),
        parts=st.lists(st.sampled_from(["", "f", "a", "fa"]), min_size=1, max_size=3).map(tuple),
    ),
    st.integers(1, 32),
    st.integers(0, 200),
)
def test_native_equals_reference_for_any_sizes(sizes: Sizes, count: int, num_before: int) -> None:
    require_native()
    found = _run(sizes, count, num_before, "native", torch.bfloat16)
    _check(found, _run(sizes, count, num_before, "reference", torch.float32), sizes, num_before + count)


@pytest.mark.parametrize("sizes", [GRID[0], GRID[2], GRID[4]])
def test_how_events_are_cut_into_calls_changes_no_bit(sizes: Sizes) -> None:
    require_native()
    weights, given = _make(sizes, 0, torch.bfloat16)
    attention = _attention(sizes)
    assert attention is not None
    tokens, clock = _events(sizes, 32)
    layers = pack(weights, attention, backend="native")
    whole = append(layers, tokens, clock, 0, given)
    for cut in (1, 3, 8, 20):
        own, parts = given, []
        for begin in range(0, 32, cut):
            made = append(layers, tokens[begin : begin + cut], clock[begin : begin + cut], begin, own)
            parts.append(made)
            keep = attention.window_of(min(begin + cut, 32))
            own = [_behind(before, each, keep) for before, each in zip(own, made, strict=True)]
        for index, layer in enumerate(whole):
            assert torch.equal(torch.cat([made[index].keys for made in parts]), layer.keys)
            assert torch.equal(torch.cat([made[index].values for made in parts]), layer.values)


def _behind(before: LayerGiven, made: LayerMade, keep: int) -> LayerGiven:
    window = made.window
    return LayerGiven(before.hidden, None if window is None else (_last(window[0], keep), _last(window[1], keep)))


def _last(x: Tensor, count: int) -> Tensor:
    return x[len(x) - count :].contiguous()


def test_an_event_sees_its_block_up_to_itself_and_the_whole_blocks_before() -> None:
    require_native()
    sizes = Sizes(block=4, window_blocks=2, parts=("a",))
    weights, given = _make(sizes, 6, torch.bfloat16)
    tokens, clock = _events(sizes, 12)
    layers = pack(weights, _attention(sizes), backend="native")
    before = append(layers, tokens, clock, 6, given)[0].keys
    changed = tokens.clone()
    changed[3] += 1.0  # event 9, of the block 8 to 11, which 12 to 15 see as well
    after = append(layers, changed, clock, 6, given)[0].keys
    assert [6 + int(row) for row in torch.nonzero((before != after).any(-1))[:, 0]] == [9, 10, 11, 12, 13, 14, 15]


def test_turns_stay_exact_far_along_a_history() -> None:
    require_native()
    sizes = Sizes(parts=("a",), block=8, window_blocks=1)
    far = 8 * 10**9
    found = _run(sizes, 8, far, "native", torch.bfloat16)[0].window
    expected = _run(sizes, 8, far, "reference", torch.float32)[0].window
    assert found is not None
    assert expected is not None
    assert largest_error(found[0], expected[0]) <= tolerance(torch.bfloat16, sizes.width, 2)


def test_a_nan_stays_with_its_event_and_those_that_see_it() -> None:
    require_native()
    sizes = Sizes(block=4, window_blocks=1, parts=("fa", "fa"))
    weights, given = _make(sizes, 0, torch.bfloat16)
    tokens, clock = _events(sizes, 12)
    layers = pack(weights, _attention(sizes), backend="native")
    clean = append(layers, tokens, clock, 0, given)
    spoiled = tokens.clone()
    spoiled[11] = torch.nan
    assert torch.isnan(append(layers, spoiled, clock, 0, given)[1].keys[11]).all()
    # Nor does it stay in the working memory, which is kept from call to call.
    again = append(layers, tokens, clock, 0, given)
    assert all(
        torch.equal(x, y)
        for own, truth in zip(_tensors(again), _tensors(clean), strict=True)
        for x, y in zip(own, truth, strict=True)
    )


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_a_later_change_of_weights_does_not_reach_the_stack(backend: Backend) -> None:
    if backend == "native":
        require_native()
    weights, given = _make(GRID[0], 8, torch.bfloat16)
    tokens, clock = _events(GRID[0], 4)
    layers = pack(weights, _attention(GRID[0]), backend=backend)
    before = append(layers, tokens, clock, 8, given)
    for layer in weights:
        layer.norm.mul_(2.0)
        layer.key_value.mul_(2.0)
    assert torch.equal(append(layers, tokens, clock, 8, given)[-1].keys, before[-1].keys)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": torch.zeros(0)}, r"weights\[0\].norm must be \[D\]"),
        ({"key_value": torch.zeros(32, 32)}, r"weights\[0\].key_value must be \[64, 32\], is \[32, 32\]"),
        ({"attention_out": torch.zeros(32, 32)}, "norm_attention, query_key_value and attention_out, or none"),
        (
            {"norm_feed_forward": torch.zeros(32, dtype=torch.int64)},
            "must be floating-point on the CPU, is torch.int64",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    weights, _ = _make(GRID[0], 0, torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        pack([dataclasses.replace(weights[0], **changes)], backend="reference")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "num_heads must be at least 1 and twice it divide the width 32, is 3"),
        ({"block": 0}, "block must be a whole number in"),
        ({"window_blocks": 0}, "window_blocks must be a whole number in"),
        ({"by_time": torch.zeros(1, dtype=torch.float64)}, "must be of 8 pairs of channels, are of 5"),
        ({"by_position": torch.zeros(4)}, "by_position must be torch.float64"),
    ],
)
def test_attention_that_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    weights, _ = _make(GRID[0], 0, torch.bfloat16)
    attention = _attention(GRID[0])
    assert attention is not None
    with pytest.raises(ValueError, match=message):
        pack(weights, dataclasses.replace(attention, **changes), backend="reference")


def test_what_is_given_is_checked() -> None:
    weights, given = _make(GRID[0], 11, torch.bfloat16)
    tokens, clock = _events(GRID[0], 4)
    layers = pack(weights, _attention(GRID[0]), backend="reference")
    short = LayerGiven(None, _make(GRID[0], 10, torch.bfloat16)[1][1].window)
    for bad, message in (
        ((tokens.float(), clock, 11, given), r"tokens must be torch.bfloat16 \[n, 32\]"),
        ((tokens[:0], clock[:0], 11, given), "n at least 1"),
        ((tokens, clock.float(), 11, given), r"clock must be torch.float64 \[4\]"),
        ((tokens, clock, -1, given), "num_before must be at least 0, is -1"),
        ((tokens, clock, 11, given[:3]), "one entry for each of 4 layers, has 3"),
        ((tokens, clock, 11, [LayerGiven(), *given[1:]]), r"given\[0\].hidden must be there"),
        ((tokens, clock, 11, [given[0], LayerGiven(), *given[2:]]), r"given\[1\].window must be there"),
        ((tokens, clock, 11, [given[0], short, *given[2:]]), r"given\[1\].window must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            append(layers, *bad)


def test_backend_and_dtype_are_kept_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, _ = _make(GRID[0], 0, torch.bfloat16)
    attention = _attention(GRID[0])
    with pytest.raises(ValueError, match="backend must be one of"):
        pack(weights, attention, backend=cast(Any, "torch"))
    with pytest.raises(ValueError, match="dtype of backend native must be"):
        pack(weights, attention, backend="native", dtype=torch.float32)
    with pytest.raises(ValueError, match="attention must be given"):
        pack(weights, backend="reference")
    with pytest.raises(ValueError, match="at least one layer"):
        pack([], backend="reference")

    def unavailable() -> None:
        raise NativeUnavailableError("native backend: RANKMESH_NATIVE is 0")

    pytest.importorskip("kernels.event_layer.native")
    monkeypatch.setattr("kernels.event_layer.native.load", unavailable)
    with pytest.raises(NativeUnavailableError, match="RANKMESH_NATIVE is 0"):
        pack(weights, attention, backend="native")
