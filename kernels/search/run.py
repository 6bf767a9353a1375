"""The search itself: check, then time, then choose."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kernels.search.problem import Problem, Solve, UnavailableVariantError, Variant
from kernels.search.store import SearchStore

Fate: TypeAlias = Literal["chosen", "slower", "wrong", "failed", "unavailable"]

NUM_CHECKS = 3
"""Inputs on which a variant must agree with the reference."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one variant.

    Args:
        variant: Its name.
        fate: ``chosen`` or why not.
        error: Largest absolute error over all checks; infinite for a wrong shape or an unwritten value; None when it
            never ran.
        time_us: Median time of a call, microseconds; None unless it was right.
        detail: Why, in words.
    """

    variant: str
    fate: Fate
    error: float | None = None
    time_us: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The answer for one problem.

    Args:
        op: Operator.
        shape: Sizes.
        dtype: Of the inputs.
        winner: Name of the chosen variant.
        outcomes: Of all variants, in the problem's order.
        cached: Whether the search ran before and only its result was read.
        beside_us: Least time of what was timed beside the variants, microseconds; never stored.
    """

    op: str
    shape: dict[str, int]
    dtype: str
    winner: str
    outcomes: tuple[Outcome, ...]
    cached: bool = False
    beside_us: dict[str, float] = field(default_factory=dict)


def search(
    problem: Problem,
    store: SearchStore | None = None,
    num_rounds: int = 9,
    seed: int = 0,
    budget_s: float = 20.0,
    beside: Mapping[str, Callable[[], object]] | None = None,
) -> SearchResult:
    """Return the fastest variant that is right.

    Args:
        problem: What to solve.
        store: Where results are kept; None searches anew and keeps nothing.
        num_rounds: Timed rounds; each calls every variant once, in shuffled order.
        seed: Of inputs and order.
        budget_s: Timing stops after the round in which this is passed.
        beside: Name -> what else to time in the same rounds, to compare with; only of a search that runs anew.

    Raises:
        ValueError: no variant is right, the first one included: nothing may run then. Or something beside has the name
            of a variant.
    """
    beside = beside or {}
    if taken := sorted(beside.keys() & {variant.name for variant in problem.variants}):
        raise ValueError(f"beside must have other names than variants, has {', '.join(taken)}")
    if store is not None and (known := store.read(problem)) is not None:
        return known
    built, outcomes = _build(problem)
    sound: dict[str, Solve] = {}
    for name, solve in built.items():
        outcome = _check(problem, name, solve, seed)
        outcomes[name] = outcome
        if outcome.fate == "slower":
            sound[name] = solve
    if not sound:
        told = "; ".join(f"{each.variant}: {each.detail or each.error}" for each in outcomes.values())
        raise ValueError(f"{problem.op} {problem.shape} {problem.dtype}: no variant is right ({told})")
    given = problem.inputs(seed)
    calls = {name: partial(solve, *given) for name, solve in sound.items()}
    samples = _time({**calls, **beside}, num_rounds, seed, budget_s)
    times = {name: float(np.median(samples[name])) for name in calls}
    beside_us = {name: min(samples[name]) for name in beside}
    winner = min(times, key=lambda name: times[name])
    for name, time_us in times.items():
        fate: Fate = "chosen" if name == winner else "slower"
        detail = "" if name == winner else f"{time_us / times[winner]:.2f} times the winner's"
        outcomes[name] = Outcome(name, fate, outcomes[name].error, round(time_us, 2), detail)
    ordered = tuple(outcomes[variant.name] for variant in problem.variants)
    result = SearchResult(problem.op, dict(problem.shape), problem.dtype, winner, ordered, beside_us=beside_us)
    if store is not None:
        store.write(problem, result)
    return result


def _build(problem: Problem) -> tuple[dict[str, Solve], dict[str, Outcome]]:
    built: dict[str, Solve] = {}
    outcomes: dict[str, Outcome] = {}
    for variant in problem.variants:
        try:
            built[variant.name] = variant.build()
        except UnavailableVariantError as error:
            outcomes[variant.name] = Outcome(variant.name, "unavailable", detail=str(error))
        except Exception as error:  # noqa: BLE001  # a variant that cannot even be built must not end the search
            outcomes[variant.name] = _failed(variant, error)
    return built, outcomes


def _failed(variant: Variant | str, error: Exception) -> Outcome:
    name = variant if isinstance(variant, str) else variant.name
    return Outcome(name, "failed", detail=f"{type(error).__name__}: {error}")


def _check(problem: Problem, name: str, solve: Solve, seed: int) -> Outcome:
    """Hold a variant against the reference; ``slower`` stands for right until the times are known."""
    worst = 0.0
    for index in range(NUM_CHECKS):
        expected = _several(problem.reference(*problem.inputs(seed + index)))
        given = problem.inputs(seed + index)
        kept = [tensor.clone() for tensor in given]
        try:
            with _poisoned():
                found = _several(solve(*given))
        except Exception as error:  # noqa: BLE001  # whatever a variant raises, it is the variant that loses
            return _failed(name, error)
        if any(not torch.equal(_bytes(before), _bytes(after)) for before, after in zip(kept, given, strict=True)):
            return Outcome(name, "wrong", float("inf"), detail="it changes its inputs")
        worst = max(worst, _error(expected, found))
        if not worst <= problem.tolerance:
            detail = f"error {worst:.3g} over tolerance {problem.tolerance:.3g} with seed {seed + index}"
            return Outcome(name, "wrong", worst, detail=detail)
    return Outcome(name, "slower", worst)


def _bytes(x: Tensor) -> Tensor:
    """Return the bits of a tensor: NaN is unequal to itself, its bits are not."""
    return x.contiguous().view(torch.uint8) if x.dim() else x


def _several(values: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return values if isinstance(values, tuple) else (values,)


def _error(expected: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> float:
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in found]:
        return float("inf")
    worst = 0.0
    for truth, answer in zip(expected, found, strict=True):
        if truth.numel() == 0:
            continue
        difference = (truth.double() - answer.double()).abs()
        # Where the truth is not finite (a NaN that must come last, say) the answer must be the same.
        same = (truth.double() == answer.double()) | (truth.isnan() & answer.isnan())
        difference = torch.where(same, torch.zeros_like(difference), difference)
        worst = max(worst, float(torch.nan_to_num(difference, nan=float("inf")).max()))
    return worst


@contextmanager
def _poisoned() -> Iterator[None]:
    """Fill every new tensor that nobody has written with NaN (integers with their maximum), so that a gap shows."""
    was_on, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic  # its one setting is a property of the module itself
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(was_on, warn_only=warns)


def _time(
    calls: Mapping[str, Callable[[], object]], num_rounds: int, seed: int, budget_s: float
) -> dict[str, list[float]]:
    """Return the microseconds of each call, a sample a round, from interleaved rounds after one that warms up."""
    names = list(calls)
    rng = np.random.default_rng(seed)
    samples: dict[str, list[float]] = {name: [] for name in names}
    end_s = time.perf_counter() + budget_s
    for round_ in range(-1, num_rounds):
        for index in rng.permutation(len(names)):
            began_s = time.perf_counter()
            calls[names[index]]()
            taken_us = (time.perf_counter() - began_s) * 1e6
            if round_ >= 0:
                samples[names[index]].append(taken_us)
        if round_ >= 0 and time.perf_counter() > end_s:
            break
    return samples
