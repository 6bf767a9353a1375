from __future__ import annotations

import pytest

from benchmarks.chaos.outcome import (
    Injected,
    Observed,
    degraded_by,
    ends_of,
    in_time_of,
    normal_ms,
    not_allowed,
    recovery_s,
    relapses,
)
from benchmarks.chaos.scenario import FaultPlan
from benchmarks.chaos.schedule import Planned

LIMIT_MS = 100.0


def answers(
    outcomes: dict[float, str], until_s: float = 20.0, slow: dict[float, float] | None = None
) -> list[Observed]:
    """Four requests a second, whole and fast, but for those named by their due time."""
    times = [number / 4 for number in range(int(until_s * 4))]
    return [Observed(at_s, (slow or {}).get(at_s, 50.0), outcomes.get(at_s, "ok")) for at_s in times]


def injected(at_s: float, kind: str = "kill", target: str = "store", **fields: object) -> Injected:
    plan = FaultPlan.model_validate({"kind": kind, "target": target, **fields})
    return Injected(Planned(plan.label, at_s, plan, 0.5), at_s, "process 1")


def test_a_fault_that_nobody_noticed_has_recovered_at_once() -> None:
    assert recovery_s(answers({}), 5.0, 20.0, LIMIT_MS) == 0.0


def test_recovery_is_from_the_fault_to_the_first_whole_second_after_a_bad_answer() -> None:
    bad = dict.fromkeys([5.25, 5.5, 6.25], "degraded")
    assert recovery_s(answers(bad), 5.0, 20.0, LIMIT_MS) == pytest.approx(1.5)


def test_a_fault_that_shows_late_has_not_recovered_before() -> None:
    assert recovery_s(answers({8.0: "degraded"}), 5.0, 20.0, LIMIT_MS) == pytest.approx(3.25)
    assert recovery_s(answers({8.0: "degraded"}, slow={5.0: 400.0}), 5.0, 20.0, LIMIT_MS) == pytest.approx(3.25)


def test_a_mesh_that_is_well_for_a_second_and_then_worse_has_relapsed() -> None:
    observed = answers({5.25: "degraded", 12.0: "failed", 20.0: "failed"}, until_s=30.0)
    assert recovery_s(observed, 5.0, 20.0, LIMIT_MS) == pytest.approx(0.5)
    window = in_time_of(observed, 5.0, 20.0, LIMIT_MS)
    assert relapses(window, 5.0, 0.5) == 1
    assert relapses(window, 5.0, None) == 0


def test_who_is_on_the_way_when_a_fault_strikes_met_that_one() -> None:
    observed = answers({10.0: "degraded"}, slow={10.0: 700.0})
    former, latter = (
        in_time_of(observed, begin_s, end_s, LIMIT_MS) for begin_s, end_s in ((5.0, 10.01), (10.01, 20.0))
    )
    assert {each.outcome for each in former} == {"ok"}
    assert [each.due_s for each in latter][:2] == [10.0, 10.25]
    assert recovery_s(observed, 5.0, 10.01, LIMIT_MS) == 0.0
    assert recovery_s(observed, 10.01, 20.0, LIMIT_MS) == pytest.approx(0.24)


def test_who_was_late_or_answered_when_a_fault_struck_met_the_former() -> None:
    observed = answers({9.75: "degraded"}, slow={9.75: 700.0})
    assert "degraded" in {each.outcome for each in in_time_of(observed, 5.0, 10.0, LIMIT_MS)}
    assert in_time_of(observed, 10.06, 20.0, LIMIT_MS)[0].due_s == 10.25, "50 ms after 10.0 it had been answered"


def test_slow_answers_count_until_a_second_has_none() -> None:
    slow = {5.0: 400.0, 6.0: 400.0, 7.5: 101.0}
    assert recovery_s(answers({}, slow=slow), 5.0, 20.0, LIMIT_MS) == pytest.approx(1.25)


def test_no_recovery_before_the_next_fault_is_none() -> None:
    assert recovery_s(answers({9.5: "degraded"}), 5.0, 10.0, LIMIT_MS) is None
    assert recovery_s(answers({8.75: "degraded"}), 5.0, 10.0, LIMIT_MS) == pytest.approx(4.0)
    assert recovery_s(answers(dict.fromkeys([5.0 + n / 4 for n in range(20)], "hung")), 5.0, 10.0, LIMIT_MS) is None


def test_normal_is_the_calms_99th_percentile_times_the_slack() -> None:
    assert normal_ms(answers({}), 2.0) == pytest.approx(100.0)
    with pytest.raises(ValueError, match="cannot bear this load"):
        normal_ms([Observed(0.0, 5.0, "shed")], 2.0)


def test_the_time_of_a_fault_ends_at_the_next_that_is_not_its_pair() -> None:
    faults = [injected(5.0), injected(6.0), injected(15.0)]
    assert ends_of(faults, 30.0) == [6.0, 15.0, 30.0]
    assert ends_of(faults, 30.0, pair_gap_s=2.0) == [15.0, 15.0, 30.0]


def test_only_what_a_fault_of_that_time_allows_is_excused() -> None:
    faults = [injected(5.0, allows=["lost"]), injected(12.0)]
    ends = ends_of(faults, 20.0)
    observed = answers({5.5: "broken", 6.0: "failed", 13.0: "hung", 2.0: "unavailable", 7.0: "shed", 8.0: "degraded"})
    assert not_allowed(observed, faults, ends, 1.0) == 3
    assert not_allowed(answers({4.5: "broken"}), faults, ends, 1.0) == 0, "it was in flight when the fault came"
    assert not_allowed(answers({3.5: "broken"}), faults, ends, 1.0) == 1


@pytest.mark.parametrize(
    ("outcome", "cost"),
    [("ok", None), ("degraded", None), ("shed", None), ("broken", "lost"), ("hung", "lost"), ("not_sent", "lost"),
     ("failed", "server_errors"), ("unavailable", "server_errors"), ("deadline", "server_errors"),
     ("garbled", "server_errors")],
)  # fmt: skip
def test_what_an_outcome_denies(outcome: str, cost: str | None) -> None:
    assert Observed(0.0, 1.0, outcome).cost == cost


def test_marks_are_counted_by_part_and_reason() -> None:
    marked = [Observed(0.0, 1.0, "degraded", (("sequence", "late"), ("deadline", "gone")))] * 2
    assert degraded_by([*marked, *answers({})]) == {"sequence: late": 2, "deadline: gone": 2}
