"""What must hold of versions, deltas, canaries and roll-backs, whatever else happens; judged from outside the loop."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from cluster.simulation.mesh import Outcome, Report
from cluster.simulation.owner import UPDATES
from cluster.simulation.world import FIRST, NUM_INGRESS, SECOND
from services.ingress.serving import ServingOrder
from shared.errors import VersionMismatchError
from shared.weights.deltas import parse_stamp

SLACK_S = 0.001
HELD_MAX = 6
"""States that a replica may hold at the end: those of a version to go back to, and of the one that serves."""


def served(report: Report) -> Iterator[str]:
    """Yield what requests were ranked with that they must not be."""
    timelines = [_Timeline(report, number) for number in range(NUM_INGRESS)]
    seen: dict[tuple[str, float, int], set[str]] = defaultdict(set)
    for outcome in report.outcomes:
        where = f"user {outcome.ask.user} at {outcome.ask.at_s:.3f} s"
        if isinstance(outcome.error, VersionMismatchError):
            yield f"{where}: {outcome.error}"
        if outcome.body is None:
            continue
        version, timeline = outcome.body["weights_version"], timelines[outcome.ask.ingress]
        asked = timeline.during(outcome)
        if version not in {stamp for order in asked for stamp in (order.version, order.canary)}:
            yield f"{where}: weights {version}, with which its ingress was not to rank then"
        for station, reason in outcome.body["reasons"].items():
            if "version_mismatch" in reason:
                yield f"{where}: {station} was asked for a version that it does not hold: {reason}"
        if len(asked) == 1 and asked[0].canary is not None:
            canary = asked[0]
            seen[parse_stamp(str(canary.canary))[0], canary.share, outcome.ask.user].add(parse_stamp(version)[0])
    for (canary_version, share, user), bases in seen.items():
        if len(bases) > 1:
            yield f"user {user} gets {sorted(bases)} while {canary_version} is tried with {share:.0%}"
    yield from _promoted(report)


def released(report: Report) -> Iterator[str]:
    """Yield what did not come of a roll-out, and what was not cleared up."""
    rollout, ended = report.world.rollout, report.ended
    if rollout is None and not report.world.deltas_s:
        return
    base, sequence = parse_stamp(ended.version)
    if ended.canary is not None:
        yield f"{ended.canary} is still tried at the end"
    if base == FIRST and sequence != len(report.world.deltas_s):
        yield f"{len(report.world.deltas_s)} deltas came, {ended.version} serves: {ended.updates.reason}"
    for number in range(NUM_INGRESS):
        if (last := _Timeline(report, number).last) != (ended.version, None):
            yield f"ingress {number} ranks with {last} at the end, not with {ended.version}"
    for replica, held in report.held.items():
        if ended.version not in held:
            yield f"{replica} holds {list(held)} at the end, not {ended.version}"
        if len(held) > HELD_MAX:
            yield f"{replica} holds {len(held)} states at the end, limit {HELD_MAX}"
    if rollout is not None:
        yield from _outcome(report)


def _outcome(report: Report) -> Iterator[str]:
    rollout, ended = report.world.rollout, report.ended
    assert rollout is not None
    phase, base = ended.rollout.phase, parse_stamp(ended.version)[0]
    if phase not in ("served", "rolled_back", "refused"):
        yield f"the roll-out did not end: {phase}, {ended.rollout.reason}"
    if (phase == "served") != (base == SECOND):
        yield f"the roll-out is {phase}, {base} serves"
    if phase == "refused" and not rollout.flaw and rollout.back_at_s is None:
        yield f"a sound version was refused: {ended.rollout.reason}"
    if phase == "rolled_back" and not ended.rollout.reason:
        yield "a version was rolled back without a reason"
    if rollout.back_at_s is not None and base == SECOND:
        yield f"{SECOND} serves, though a roll-back was asked for"


def _promoted(report: Report) -> Iterator[str]:
    """Check what became of the second version against what was asked for."""
    rollout, orders = report.world.rollout, report.taken
    tried_s = min((each.at_s for each in orders if each.order.canary is not None), default=math.inf)
    given_s = min((each.at_s for each in orders if parse_stamp(each.order.version)[0] == SECOND), default=math.inf)
    if rollout is None:
        if given_s < math.inf or tried_s < math.inf:
            yield f"weights {SECOND}, which nobody rolled out"
        return
    if rollout.flaw == "refused" and min(tried_s, given_s) < math.inf:
        yield f"weights {SECOND} serve, which {rollout.station} cannot read"
    if rollout.share and given_s < tried_s + rollout.watch_s - SLACK_S:
        yield f"{SECOND} was to be watched for {rollout.watch_s} s, and was from {tried_s:.3f} to {given_s:.3f} s"
    if rollout.flaw == "failing" and given_s < math.inf and rollout.share:
        until_s = given_s - 2 * UPDATES.period_s
        known = [each for each in report.outcomes if each.ask.at_s >= tried_s and (each.ended_s or math.inf) < until_s]
        (tried_bad, tried), (usual_bad, usual) = _judged(known)
        share, usual_share = tried_bad / max(tried, 1), usual_bad / max(usual, 1)
        if tried >= 2 * UPDATES.canary.answers_min and share - usual_share > 0.5:
            yield f"{SECOND} was given to all, though {share:.0%} of {tried} answers were bad, {usual_share:.0%} else"


def _judged(outcomes: list[Outcome]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return bad answers and all of the second version, and of the others; who has no answer is the others' bad one."""
    bodies = [each.body for each in outcomes if each.body is not None]
    second = [body for body in bodies if body["weights_version"] == SECOND]
    first = [body for body in bodies if body["weights_version"] != SECOND]
    failed = sum(each.error is not None for each in outcomes)
    bad, usual_bad = (sum(bool(body["degraded"]) for body in group) for group in (second, first))
    return (bad, len(second)), (usual_bad + failed, len(first) + failed)


class _Timeline:
    """What one ingress replica was to rank with, and when."""

    def __init__(self, report: Report, number: int) -> None:
        own = [each for each in report.taken if each.ingress == number]
        self._orders = [ServingOrder.first(FIRST), *(each.order for each in own)]
        self._since_s = [-math.inf, *(each.at_s for each in own)]

    def during(self, outcome: Outcome) -> list[ServingOrder]:
        """Return the orders that held at some moment of a request, each with other stamps than the one before."""
        end_s = outcome.ended_s or math.inf
        untils_s = [*self._since_s[1:], math.inf]
        held = [
            order
            for order, since_s, until_s in zip(self._orders, self._since_s, untils_s, strict=True)
            if since_s <= end_s + SLACK_S and until_s >= outcome.ask.at_s - SLACK_S
        ]
        return [
            order for number, order in enumerate(held) if number == 0 or _stamps(order) != _stamps(held[number - 1])
        ]

    @property
    def last(self) -> tuple[str, str | None]:
        """The stamps at the end."""
        return _stamps(self._orders[-1])


def _stamps(order: ServingOrder) -> tuple[str, str | None]:
    return order.version, order.canary
