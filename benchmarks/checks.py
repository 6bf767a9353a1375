"""What must hold in every answer, whatever the model says: echoes, limits, finite numbers, times that add up."""

from __future__ import annotations

import math

from shared.schema.api import RankRequest, RankResponse

STAGE_TOLERANCE = 0.15
"""Share of the total by which the critical stages' sum may differ from it."""

STAGE_SLACK_MS = 1.0
"""Absolute slack of the same, for answers of a few milliseconds."""


def echo_faults(
    request: RankRequest, response: RankResponse, default_limit: int, history_length: int | None
) -> list[str]:
    """Return what of the request did not come back as sent; empty when all is well.

    Args:
        request: What was sent.
        response: What came back.
        default_limit: Returned candidates when the request names no limit.
        history_length: Events that the answer must have seen, None when nobody can know.
    """
    faults = []
    if request.request_id is not None and response.request_id != request.request_id:
        faults.append(f"request_id {response.request_id!r}, sent {request.request_id!r}")
    if not _same_id(response.user_id, request.user_id):
        faults.append(f"user_id {response.user_id!r}, sent {request.user_id!r}")
    if response.num_candidates != len(request.candidates):
        faults.append(f"num_candidates {response.num_candidates}, sent {len(request.candidates)}")
    expected = min(request.limit or default_limit, len(request.candidates))
    if len(response.candidates) != expected:
        faults.append(f"{len(response.candidates)} candidates returned, {expected} expected")
    sent = {(type(candidate), candidate) for candidate in request.candidates}
    returned = [(type(candidate.id), candidate.id) for candidate in response.candidates]
    if len(set(returned)) != len(returned):
        faults.append("a candidate is returned twice")
    if strange := [candidate for candidate in returned if candidate not in sent]:
        faults.append(f"returned id {strange[0][1]!r} was not sent in that form")
    if history_length is not None and response.history_length != history_length:
        faults.append(f"history_length {response.history_length}, must be {history_length}")
    return faults


def number_faults(response: RankResponse) -> list[str]:
    """Return which numbers are not finite or no probabilities, or break conversion <= click."""
    faults = []
    for candidate in response.candidates:
        numbers = {**candidate.scores, "value": candidate.value}
        if not all(math.isfinite(number) for number in numbers.values()):
            faults.append(f"candidate {candidate.id!r} has {numbers}")
        elif not all(0.0 <= score <= 1.0 for score in candidate.scores.values()):
            faults.append(f"candidate {candidate.id!r} has a probability outside 0..1: {candidate.scores}")
        elif candidate.scores.get("conversion", 0.0) > candidate.scores.get("click", 1.0):
            faults.append(f"candidate {candidate.id!r} converts more than it is clicked: {candidate.scores}")
    return faults


def stage_fault(response: RankResponse) -> str | None:
    """Return how the critical stages fail to add up to the total, or None."""
    critical_ms = sum(stage.duration_ms for stage in response.stages if stage.critical)
    allowed_ms = max(STAGE_TOLERANCE * response.total_ms, STAGE_SLACK_MS)
    if abs(critical_ms - response.total_ms) > allowed_ms:
        return f"critical stages add up to {critical_ms:.2f} ms of {response.total_ms:.2f} ms"
    return None


def _same_id(one: int | str, other: int | str) -> bool:
    return type(one) is type(other) and one == other
