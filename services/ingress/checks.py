"""Rules of a deployment that a request must keep, beyond the types that its schema demands."""

from __future__ import annotations

from services.ingress.text import shown
from shared.errors import InvalidRequestError
from shared.hashing import EntityId, canonical_id
from shared.schema.api import ApiLimits, EventsRequest, RankRequest


def check_rank(request: RankRequest, limits: ApiLimits) -> list[EntityId]:
    """Check a rank request against the deployment's limits.

    Returns:
        The candidates in canonical form, same order, distinct.

    Raises:
        InvalidRequestError: names field, limit and value.
    """
    check_count("candidates", len(request.candidates), limits.candidates_max)
    if request.limit is not None and request.limit > limits.candidates_max:
        _refuse("limit", f"at most {limits.candidates_max}", limits.candidates_max, request.limit)
    if request.deadline_ms is not None and not limits.deadline_ms_min <= request.deadline_ms <= limits.deadline_ms_max:
        bounds = f"{limits.deadline_ms_min} to {limits.deadline_ms_max}"
        _refuse("deadline_ms", f"from {bounds}", bounds, request.deadline_ms)
    candidates = [canonical_id(value) for value in request.candidates]
    if len(set(candidates)) != len(candidates):
        first: dict[EntityId, int] = {}
        for position, value in enumerate(candidates):
            if value in first:
                raise InvalidRequestError(
                    f"candidates must be distinct: {shown(value)} is at positions {first[value]} and {position}",
                    field=f"candidates.{position}", limit="distinct", value=shown(value),
                )  # fmt: skip
            first[value] = position
    return candidates


def check_events(request: EventsRequest, limits: ApiLimits) -> None:
    """Check an append against the deployment's limits.

    Raises:
        InvalidRequestError: there are more events than the limit.
    """
    check_count("events", len(request.events), limits.events_max)


def check_count(field: str, count: int, count_max: int) -> None:
    """Refuse a list that is longer than the deployment allows.

    Raises:
        InvalidRequestError: names the field, the limit and the length.
    """
    if count > count_max:
        raise InvalidRequestError(
            f"{field} has {count} entries, limit {count_max}", field=field, limit=count_max, value=count
        )


def _refuse(field: str, rule: str, limit: int | str, value: int) -> None:
    raise InvalidRequestError(
        f"{field} must be {rule}, is {shown(value)}", field=field, limit=limit, value=shown(value)
    )
