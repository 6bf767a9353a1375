"""What must hold in every world: nothing wrong may happen (safety), and what was promised must come (liveness)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from cluster.simulation.mesh import Outcome, Report
from cluster.simulation.numbers import COLD, part, value_of
from cluster.simulation.releases import released, served
from cluster.simulation.stations import RANKING_QUEUE_MAX
from cluster.simulation.world import NUM_SHARDS, SECOND
from shared.errors import DeadlineExceededError, OverloadedError, StageUnavailableError

SLACK_S = 0.001
"""Rounding of sums of simulated seconds."""

ALLOWED = (DeadlineExceededError, OverloadedError, StageUnavailableError)
"""What a request may end with when there is trouble: 504, 429 and 503; but none for want of the version it asks for."""

CALLS_MAX = {"preprocess": 2, "sequence": 2, "speculative": 4, "embedding": 8, "ranking": 2}
"""Calls of one request to one station: twice; and inputs that take the features again with these, and hedged."""

_LATE = {"precompute", "fill"}
"""Methods that run after the answer."""


def check(report: Report) -> list[str]:
    """Return every rule that a world broke, as a sentence."""
    return [*safety(report), *liveness(report)]


def safety(report: Report) -> Iterator[str]:
    """Yield what went wrong."""
    if report.error:
        yield f"the simulation failed: {report.error}"
    for outcome in report.outcomes:
        where = f"user {outcome.ask.user} at {outcome.ask.at_s:.3f} s"
        if outcome.error is not None and not isinstance(outcome.error, ALLOWED):
            yield f"{where}: failed with {type(outcome.error).__name__}: {outcome.error}"
        if outcome.ended_s is not None and not outcome.is_gone:
            took_s = outcome.ended_s - outcome.ask.at_s
            if took_s > outcome.ask.deadline_ms / 1e3 + SLACK_S:
                yield f"{where}: answered after {took_s * 1e3:.1f} of {outcome.ask.deadline_ms} ms"
        if outcome.body is not None:
            yield from (f"{where}: {what}" for what in _wrong(outcome, outcome.body, report))
    yield from served(report)
    yield from _bounds(report)
    yield from _tries(report)
    yield from _late_work(report)


def liveness(report: Report) -> Iterator[str]:
    """Yield what did not come."""
    yield from (f"{number} {what} at the end" for what, number in report.left.items())
    for outcome in report.outcomes:
        if outcome.ended_s is None:
            yield f"user {outcome.ask.user} at {outcome.ask.at_s:.3f} s: never answered"
    probe = report.probe
    if _is_flawed(report):
        pass  # that it is not asked for what it cannot do is nobody's promise
    elif probe is None or probe.body is None:
        yield f"a request after all faults were over has no answer: {probe and probe.error!r}"
    elif probe.body["degraded"]:
        yield f"a request after all faults were over is degraded: {probe.body['reasons']}"
    yield from released(report)
    if not report.lost_buffers:
        wanted = Counter(user for user, _ in report.acknowledged)
        for user, number in wanted.items():
            if report.stored[user] < number:
                yield f"{number} events of user {user} were acknowledged, {report.stored[user]} are stored"


def _is_flawed(report: Report) -> bool:
    """Return whether all are served with a version that a station answers nothing with: asked for without a canary."""
    rollout = report.world.rollout
    return rollout is not None and rollout.flaw == "failing" and report.ended.version == SECOND


def _wrong(outcome: Outcome, body: dict[str, Any], report: Report) -> Iterator[str]:
    ask, rows, version = outcome.ask, body["candidates"], body["weights_version"]
    keys = [row["id"] for row in rows]
    if body["user_id"] != ask.user or sorted(keys) != sorted(ask.candidates):
        yield f"an answer for user {body['user_id']} with {keys} to one who asked for {list(ask.candidates)}"
        return
    if not all(math.isfinite(row["value"]) for row in rows):
        yield "a value that is no number"
        return
    order = [(-row["value"], row["id"]) for row in rows]
    if order != sorted(order):
        yield f"out of order: {order}"
    if set(body["reasons"]) != set(body["degraded"]):
        yield f"marked as {body['degraded']} for {list(body['reasons'])}"
    lengths = _lengths(outcome, body, report)
    if not _is_explained(body, ask.user, lengths, rows, version):
        yield f"values that nothing explains: {[(row['id'], row['value']) for row in rows]}, marks {body['reasons']}"
    if body["history_length"] not in lengths:
        yield f"a history of {body['history_length']} events, not of {sorted(lengths)}, marks {body['reasons']}"
    if ask.at_s > report.forgotten_s.get(ask.user, math.inf) and any(row["speculative"] != "none" for row in rows):
        yield "an embedding of a user who was forgotten before"


def _lengths(outcome: Outcome, body: dict[str, Any], report: Report) -> set[int]:
    """Return how many events the state of an answer may be made of; each user has as many as his number."""
    user = outcome.ask.user
    if _is_marked(body, "sequence"):  # after a deletion too another replica keeps what it read: docs/history.md
        return {0, user}
    begun_s, done_s = (each.get(user, math.inf) for each in (report.forgetting_s, report.forgotten_s))
    if outcome.ask.at_s > done_s:
        return {0}
    return {user} if outcome.ended_s is not None and outcome.ended_s < begun_s else {0, user}


def _is_marked(body: dict[str, Any], station: str) -> bool:
    return station in body["degraded"]


def _is_explained(body: dict[str, Any], user: int, lengths: set[int], rows: list[dict[str, Any]], version: str) -> bool:
    """Return whether the values are those of this user, version and candidates, but for inputs that are marked."""
    states = [(user, length) for length in lengths]
    if _is_marked(body, "sequence"):
        states.append((COLD, 0))
    unsure = [shard for shard in range(NUM_SHARDS) if _is_marked(body, f"embedding:{shard}")]
    sure = [shard for shard in range(NUM_SHARDS) if shard not in unsure]
    for state, number in itertools.product(states, range(len(unsure) + 1)):
        for some in itertools.combinations(unsure, number):
            shards = [*sure, *some]
            if all(row["value"] == _expected(version, user, state, row, shards) for row in rows):
                return True
    return False


def _expected(version: str, user: int, state: tuple[int, int], row: dict[str, Any], shards: list[int]) -> int:
    value = value_of(version, *state, row["id"], shards)
    if row["speculative"] == "exact":  # of this user, whatever became of the state
        value += part(version, "spec", user, row["id"])
    return value


def _bounds(report: Report) -> Iterator[str]:
    peaks, config = report.peaks, report.config
    limits = {
        "requests in flight": (peaks.in_flight, config.in_flight_max),
        "precomputations": (peaks.precompute, config.precompute.in_flight_max),
        "pieces of work held by a replica": (peaks.held_work, RANKING_QUEUE_MAX),
        "calls queued in a caller": (peaks.queued, report.world.wire.queued_max),
    }
    for what, (most, limit) in limits.items():
        if most > limit:
            yield f"{most} {what}, limit {limit}"
    numbers = Counter((call.asker, call.station) for call in report.calls if call.asker.startswith(("ask", "probe")))
    for (asker, station), number in numbers.items():
        limit = CALLS_MAX[station.partition(":")[0]]
        if number > limit:
            yield f"{number} calls of {station} for {asker}, limit {limit}"


def _tries(report: Report) -> Iterator[str]:
    """Find calls that nobody waits for and that nobody should have made so soon again."""
    period_s = report.config.breaker.open_ms / 1e3 - SLACK_S
    last_s: dict[tuple[str, str], float] = {}
    for call in report.calls:
        if not call.tries:
            continue
        before_s = last_s.get((call.caller, call.tries), -math.inf)
        if call.started_s - before_s < period_s:
            yield f"{call.tries} is tried by {call.caller} at {before_s:.3f} s and again at {call.started_s:.3f} s"
        last_s[call.caller, call.tries] = call.started_s
    breaker = report.config.breaker
    apart_s = (breaker.failures - 1) * breaker.apart_ms / 1e3 - SLACK_S
    left = sorted((call.caller, call.replica, call.left_s) for call in report.calls if call.left_s is not None)
    for (caller, replica, at_s), (caller_after, replica_after, after_s) in itertools.pairwise(left):
        if (caller, replica) == (caller_after, replica_after) and after_s - at_s < apart_s:
            yield f"{replica} is left a call by {caller} at {at_s:.3f} s and again at {after_s:.3f} s"


def _late_work(report: Report) -> Iterator[str]:
    """Find work that began, or went on, after its request was over and everybody could know it."""
    ended = {f"ask {number}": ask.at_s + ask.deadline_ms / 1e3 for number, ask in enumerate(report.world.asks)}
    for number, ask in enumerate(report.world.asks):
        for outcome in report.outcomes:
            if outcome.ask is ask and outcome.ended_s is not None:
                ended[f"ask {number}"] = min(ended[f"ask {number}"], outcome.ended_s)
    way_s = report.world.wire.delay_s_max + SLACK_S
    for call in report.calls:
        over_s = ended.get(call.asker)
        if over_s is None or call.method in _LATE or call.is_excused or call.began_s is None:
            continue
        if call.left_s is not None and call.left_s <= over_s + SLACK_S:
            continue  # bounded by `_tries`
        last_s = call.began_s if call.ended_s is None else call.ended_s
        if last_s > over_s + way_s:
            yield (
                f"{call.station}.{call.method} for {call.asker} went on until {last_s:.3f} s, "
                f"the request was over at {over_s:.3f} s"
            )
