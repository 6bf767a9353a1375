"""Which fault comes when, by seed: the same scenario and seed give the same schedule on every machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.chaos.scenario import FaultPlan, Scenario


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault at its time.

    Args:
        label: ``kind target``, with ``#2`` and so on when it comes again; unique in a schedule.
        at_s: When, seconds since the load began.
        plan: The fault.
        pick: Which of several victims, as a share in 0..1 of their list.
    """

    label: str
    at_s: float
    plan: FaultPlan
    pick: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """All faults of a run.

    Args:
        faults: By time.
        duration_s: Length of the load.
        left_out: Faults that the swarm left out.
    """

    faults: tuple[Planned, ...]
    duration_s: float
    left_out: tuple[str, ...]


def make_schedule(scenario: Scenario, seed: int) -> Schedule:
    """Draw the schedule of a scenario."""
    rng = np.random.default_rng(seed)
    pool = list(scenario.faults)
    # All draws are made, whatever the scenario uses: a pool of the same length is drawn from alike.
    chance, order = rng.random(len(pool)), rng.permutation(len(pool))
    positions = [number for number, draw in enumerate(chance) if draw >= scenario.swarm_off]
    positions = positions or [int(chance.argmax())]
    if scenario.shuffle:
        positions = [int(number) for number in order if number in positions]
    kept = [pool[number] for number in positions]
    groups = [[plan] for plan in kept]
    num_groups = len(kept)
    if scenario.duration_s is not None:
        num_groups = int((scenario.duration_s - scenario.calm_s) / scenario.spacing_s)
        while len(groups) < num_groups:
            again = rng.permutation(len(kept)) if scenario.shuffle else range(len(kept))
            groups += [[kept[int(number)]] for number in again]
        groups = groups[:num_groups]
    if scenario.num_pairs and len(kept) > 1:
        num_groups = scenario.num_pairs if scenario.duration_s is None else num_groups
        draws = [rng.choice(len(kept), 2, replace=False) for _ in range(num_groups)]
        groups = [[kept[int(first)], kept[int(second)]] for first, second in draws]
    planned: list[Planned] = []
    seen: dict[str, int] = {}
    for number, group in enumerate(groups):
        at_s = scenario.calm_s + number * scenario.spacing_s + float(rng.uniform(0, scenario.jitter_s))
        for plan in group:
            seen[plan.label] = seen.get(plan.label, 0) + 1
            label = plan.label if seen[plan.label] == 1 else f"{plan.label} #{seen[plan.label]}"
            planned.append(Planned(label, round(at_s, 3), plan, float(rng.random())))
            at_s += float(rng.uniform(0, scenario.pair_gap_s))
    left_out = tuple(plan.label for number, plan in enumerate(pool) if number not in positions)
    duration_s = scenario.duration_s or scenario.calm_s + len(groups) * scenario.spacing_s
    return Schedule(tuple(sorted(planned, key=lambda each: each.at_s)), duration_s, left_out)
