"""What a run came to: counts, what each fault cost, and how long the mesh took to be itself again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.chaos.scenario import Allowed
from benchmarks.chaos.schedule import Planned

HEALTHY_S = 1.0
"""Answers of so long, all whole and in normal time, make a mesh healthy again."""

LATE_SLACK_MS = 750.0
"""Between the deadline and the last byte on a busy two-core machine, a retry by the balancer included."""

_LOST = ("broken", "hung", "not_sent")
_SERVER_ERRORS = ("failed", "unavailable", "deadline", "garbled")


@dataclass(frozen=True, slots=True)
class Observed:
    """One request of the load.

    Args:
        due_s: When it was due, seconds since the load began.
        latency_ms: From then to the last byte of the answer.
        outcome: See ``benchmarks.client.Answer``, or ``not_sent``.
        late_ms: By how much the client itself was late to send it.
        total_ms: Time that the mesh says it took, None without an answer.
        reasons: Part -> why it was replaced, of a marked answer.
        wrong: What the oracle has against the answer.
        by_form: Only its form could be judged: nobody outside knew the history that it was made with.
        detail: What went wrong in words.
    """

    due_s: float
    latency_ms: float
    outcome: str
    reasons: tuple[tuple[str, str], ...] = ()
    wrong: tuple[str, ...] = ()
    by_form: bool = False
    detail: str = ""
    late_ms: float = 0.0
    total_ms: float | None = None

    @property
    def answer_ms(self) -> float:
        """From when it was sent to the last byte of the answer."""
        return self.latency_ms - self.late_ms

    @property
    def cost(self) -> Allowed | None:
        """What the request was denied: an answer, or an answer that is no error; None: it was answered or shed."""
        if self.outcome in _LOST:
            return "lost"
        return "server_errors" if self.outcome in _SERVER_ERRORS else None


@dataclass(frozen=True, slots=True)
class Injected:
    """One fault as it happened.

    Args:
        planned: What was planned.
        at_s: When it was put in, seconds since the load began.
        what: What was done, e.g. ``process 123``; empty when there was no victim.
        healed_s: When it was taken back; None for a kill.
        error: Why it could not be put in, or taken back.
    """

    planned: Planned
    at_s: float
    what: str
    healed_s: float | None = None
    error: str = ""


def normal_ms(calm: Sequence[Observed], slack: float) -> float:
    """Return the latency up to which an answer is normal: the calm's 99th percentile times a slack.

    Raises:
        ValueError: the calm has no whole answer.
    """
    latencies = [each.latency_ms for each in calm if each.outcome == "ok"]
    if not latencies:
        raise ValueError("no whole answer before the first fault: the mesh cannot bear this load")
    return float(np.quantile(latencies, 0.99)) * slack


def in_time_of(observed: Sequence[Observed], begin_s: float, end_s: float, limit_ms: float) -> list[Observed]:
    """Return the requests that a fault may have touched, by due time.

    Who was on the way when a fault struck, and not late yet, met that fault and no earlier one.

    Args:
        observed: Requests by due time.
        begin_s: When the fault was put in.
        end_s: When the next one was, or the end of the load.
        limit_ms: Normal latency.
    """
    return [each for each in observed if _met(each, begin_s, limit_ms) and not _met(each, end_s, limit_ms)]


def _met(each: Observed, fault_s: float, limit_ms: float) -> bool:
    waited_ms = (fault_s - each.due_s) * 1e3
    return waited_ms <= 0 or waited_ms < min(each.latency_ms, limit_ms)


def recovery_s(observed: Sequence[Observed], begin_s: float, end_s: float, limit_ms: float) -> float | None:
    """Return how long after a fault the mesh was itself again: the begin of the first second of normal answers.

    It is looked for from the first answer on that was not whole (or, where all were, the first slow one), as a fault
    may go unnoticed at first. ``relapses`` says whether it held.

    Args:
        observed: Requests by due time.
        begin_s: When the fault was put in.
        end_s: When the next one was, or the end of the load.
        limit_ms: Normal latency.

    Returns:
        Seconds; 0 when no answer was touched; None when it was not itself again by ``end_s``.
    """
    window = in_time_of(observed, begin_s, end_s, limit_ms)
    touched = [each.outcome != "ok" or each.latency_ms > limit_ms for each in window]
    if not any(touched):
        return 0.0
    not_whole = [number for number, each in enumerate(window) if each.outcome != "ok"]
    for number in range(not_whole[0] if not_whole else touched.index(True), len(window)):
        start_s = window[number].due_s
        if start_s + HEALTHY_S > end_s:
            return None
        second = [later for later in range(number, len(window)) if window[later].due_s < start_s + HEALTHY_S]
        if not any(touched[later] for later in second):
            return start_s - begin_s
    return None


def relapses(window: Sequence[Observed], begin_s: float, recovered_s: float | None) -> int:
    """Return how many answers after the recovery from a fault were not whole.

    Args:
        window: ``in_time_of`` the fault.
        begin_s: When it was put in.
        recovered_s: ``recovery_s`` of it.
    """
    if recovered_s is None:
        return 0
    return sum(each.outcome != "ok" and begin_s + recovered_s <= each.due_s for each in window)


def ends_of(faults: Sequence[Injected], duration_s: float, pair_gap_s: float = 0.0) -> list[float]:
    """Return where the time of each fault ends: at the next one that is not its pair, or at the end of the load."""
    ends = []
    for number, fault in enumerate(faults):
        later = [other.at_s for other in faults[number + 1 :] if other.at_s > fault.at_s + pair_gap_s]
        ends.append(min(later, default=duration_s))
    return ends


def degraded_by(observed: Sequence[Observed]) -> dict[str, int]:
    """Return how many answers were marked for each part and reason, most frequent first."""
    marks = Counter(f"{part}: {why}" for each in observed for part, why in each.reasons)
    return dict(marks.most_common())


def not_allowed(observed: Sequence[Observed], faults: Sequence[Injected], ends: Sequence[float], lead_s: float) -> int:
    """Return how many requests were denied what no fault of their time allows to be denied.

    Args:
        observed: Requests.
        faults: Faults.
        ends: ``ends_of`` them.
        lead_s: A request that was due so long before a fault may still have met it.
    """
    count = 0
    for each in observed:
        if each.cost is None:
            continue
        meets = [fault for fault, end_s in zip(faults, ends, strict=True) if fault.at_s - lead_s <= each.due_s < end_s]
        count += not any(each.cost in fault.planned.plan.allows for fault in meets)
    return count
