from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from benchmarks.cases import HISTORY_KINDS
from benchmarks.client import WIRES
from benchmarks.trials import SIZES, trial_plan


def test_three_hundred_trials_hold_every_mix_evenly() -> None:
    plan = trial_plan(300)
    assert [trial.number for trial in plan] == list(range(300))
    mixes = Counter((trial.size, trial.kind, trial.wire, trial.at_once) for trial in plan)
    assert set(mixes) == set(product(SIZES, HISTORY_KINDS, WIRES, (False, True)))
    assert max(mixes.values()) - min(mixes.values()) <= 1
    assert Counter(trial.at_once for trial in plan) == {False: 150, True: 150}


def test_tiers_and_limits_meet_every_size_and_history() -> None:
    plan = trial_plan(300)
    for tier in ("auto", "light"):
        assert {(trial.size, trial.kind) for trial in plan if trial.tier == tier} == set(product(SIZES, HISTORY_KINDS))
    limits = {(trial.size, trial.limit is None) for trial in plan}
    assert limits == set(product(SIZES, (True, False)))


def test_a_short_plan_alternates_sizes_and_histories_first() -> None:
    plan = trial_plan(18)
    assert {(trial.size, trial.kind) for trial in plan if not trial.at_once} == set(product(SIZES, HISTORY_KINDS))
    assert len(trial_plan(1)) == 1
    with pytest.raises(ValueError, match="at least 1"):
        trial_plan(0)
