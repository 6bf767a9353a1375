"""The search never chooses a variant that is wrong, however fast it is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.search import Problem, SearchStore, UnavailableVariantError, Variant, search
from kernels.search.problem import Inputs, Solve

ROWS, WIDTH = 33, 64


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads would spin on a busy machine, and these products are too small for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def inputs(seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(WIDTH, WIDTH, generator=generator)


def right(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def slow(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(20):
        x @ w
    return x @ w


def leaves_the_last_row(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty(ROWS, WIDTH)
    out[:-1] = x[:-1] @ w
    return out


def remembers(seed: int) -> Solve:
    """Return the right answer of one input, whatever is asked."""
    known = right(*inputs(seed))
    return lambda x, w: known


def slightly_off(x: Tensor, w: Tensor) -> Tensor:
    out = x @ w
    out[ROWS // 2, 3] += 1e-2
    return out


def spoils_its_input(x: Tensor, w: Tensor) -> Tensor:
    out = x @ w
    x.zero_()
    return out


def raises(x: Tensor, w: Tensor) -> Tensor:
    raise RuntimeError("no such instruction")


def wrong_shape(x: Tensor, w: Tensor) -> Tensor:
    return x[:1] @ w


def not_here() -> Solve:
    raise UnavailableVariantError("needs a device that this machine has not")


def problem(*variants: Variant, reference: Solve = right) -> Problem:
    return Problem("matmul", {"m": ROWS, "k": WIDTH, "n": WIDTH}, "float32", inputs, reference, 1e-3, variants)


def variant(solve: Solve, name: str | None = None) -> Variant:
    return Variant(name or solve.__name__, lambda: solve)


def test_the_faster_of_two_right_ones_wins() -> None:
    result = search(problem(variant(slow), variant(right)))
    assert result.winner == "right"
    assert [each.fate for each in result.outcomes] == ["slower", "chosen"]
    assert all(each.time_us is not None for each in result.outcomes)


def test_what_is_timed_beside_the_variants_cannot_win_and_is_not_stored(tmp_path: Path) -> None:
    calls: list[str] = []
    store, asked = SearchStore(tmp_path), problem(variant(right))
    result = search(asked, store, num_rounds=3, beside={"roof": lambda: calls.append("roof")})
    assert len(calls) == 1 + 3, "once to warm up, then in every round"
    assert (result.winner, [each.variant for each in result.outcomes]) == ("right", ["right"])
    assert result.beside_us.keys() == {"roof"}
    assert search(asked, store, beside={"roof": lambda: calls.append("roof")}).beside_us == {}
    assert len(calls) == 4
    with pytest.raises(ValueError, match="other names than variants, has right"):
        search(asked, beside={"right": lambda: None})


@pytest.mark.parametrize(
    "planted",
    [leaves_the_last_row, remembers(0), slightly_off, spoils_its_input, wrong_shape],
    ids=lambda each: each.__name__,
)
def test_a_planted_wrong_variant_is_never_chosen(planted: Solve) -> None:
    result = search(problem(variant(slow), variant(planted, "planted")))
    assert result.winner == "slow"
    assert result.outcomes[1].fate == "wrong"
    assert result.outcomes[1].time_us is None, "a wrong variant is not even timed"


def test_a_variant_that_raises_loses_and_says_why() -> None:
    result = search(problem(variant(right), variant(raises)))
    assert result.winner == "right"
    assert result.outcomes[1].fate == "failed"
    assert "no such instruction" in result.outcomes[1].detail


def test_a_variant_that_this_machine_lacks_is_named_as_such() -> None:
    result = search(problem(variant(right), Variant("elsewhere", not_here)))
    assert result.outcomes[1].fate == "unavailable"


def test_without_a_right_variant_nothing_is_chosen() -> None:
    with pytest.raises(ValueError, match="no variant is right"):
        search(problem(variant(slightly_off)))


def test_values_that_are_not_finite_must_be_the_same() -> None:
    def holes(x: Tensor, w: Tensor) -> Tensor:
        out = x @ w
        out[0, 0], out[1, 1] = float("nan"), float("inf")
        return out

    result = search(problem(variant(right), variant(holes), reference=holes))
    assert result.winner == "holes"


def test_the_poison_is_gone_afterwards() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    search(problem(variant(right)))
    assert torch.are_deterministic_algorithms_enabled() == before


def count_builds(solve: Solve) -> tuple[list[int], Callable[[], Solve]]:
    builds: list[int] = []

    def build() -> Solve:
        builds.append(1)
        return solve

    return builds, build


def test_a_second_search_reads_the_first(tmp_path: Path) -> None:
    builds, build = count_builds(right)
    asked = problem(variant(slow), Variant("right", build))
    store = SearchStore(tmp_path / "search")
    first, second = search(asked, store), search(asked, store)
    assert (first.winner, first.outcomes) == (second.winner, second.outcomes)
    assert (first.cached, second.cached) == (False, True)
    assert len(builds) == 1
    evidence = json.loads(store.path(asked).read_text())
    assert evidence["versions"]["torch"] == torch.__version__


def test_another_machine_searches_anew(tmp_path: Path) -> None:
    asked = problem(variant(right))
    search(asked, SearchStore(tmp_path, "one machine"))
    assert not search(asked, SearchStore(tmp_path, "another")).cached


@pytest.mark.parametrize("damage", ["", "{", '{"winner": "right"}', "[]", "[" * 100_000, " " * (2 << 20)])
def test_a_damaged_file_is_searched_anew(tmp_path: Path, damage: str) -> None:
    asked, store = problem(variant(right)), SearchStore(tmp_path)
    search(asked, store)
    store.path(asked).write_text(damage)
    assert not search(asked, store).cached


def test_a_stored_winner_must_be_among_the_variants_that_passed(tmp_path: Path) -> None:
    asked, store = problem(variant(right), variant(slow)), SearchStore(tmp_path)
    search(asked, store)
    held = json.loads(store.path(asked).read_text())
    held["winner"] = "slow"
    store.path(asked).write_text(json.dumps(held))
    assert not search(asked, store).cached


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("time_us", None),
        ("time_us", "fast"),
        ("time_us", True),
        ("time_us", [1]),
        ("time_us", float("inf")),
        ("time_us", float("nan")),
        ("time_us", 0),
        ("time_us", 10**400),
        ("error", None),
        ("error", 1e9),
        ("error", float("nan")),
        ("variant", ["right"]),
        ("detail", {}),
        ("fate", "slower"),
    ],
)
def test_an_outcome_that_no_search_writes_is_damage(tmp_path: Path, field: str, value: object) -> None:
    asked, store = problem(variant(right)), SearchStore(tmp_path)
    search(asked, store)
    held = json.loads(store.path(asked).read_text())
    held["outcomes"][0][field] = value
    if field == "variant":
        held["winner"] = value
    store.path(asked).write_text(json.dumps(held))
    assert not search(asked, store).cached


@pytest.mark.parametrize("field", ["op", "shape", "dtype"])
def test_a_result_of_another_problem_is_damage(tmp_path: Path, field: str) -> None:
    asked, store = problem(variant(right)), SearchStore(tmp_path)
    search(asked, store)
    held = json.loads(store.path(asked).read_text())
    store.path(asked).write_text(json.dumps({**held, field: "other"}))
    assert not search(asked, store).cached


def test_a_pipe_in_place_of_a_result_is_not_read(tmp_path: Path) -> None:
    asked, store = problem(variant(right)), SearchStore(tmp_path)
    os.mkfifo(store.path(asked))
    assert store.read(asked) is None


def test_inputs_may_hold_nan() -> None:
    def given(seed: int) -> Inputs:
        x, w = inputs(seed)
        x[0, 0] = float("nan")
        return x, w

    asked = Problem("double", {}, "float32", given, lambda x, w: x * 2, 1e-6, [variant(lambda x, w: x + x, "sum")])
    assert search(asked).winner == "sum"


@pytest.mark.parametrize("variants", [(), (variant(right), variant(right))])
def test_variants_are_distinct_and_at_least_one(variants: tuple[Variant, ...]) -> None:
    with pytest.raises(ValueError, match="variants must be distinct"):
        problem(*variants)
