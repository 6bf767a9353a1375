"""Rules of a deployment that a request must keep, beyond the types that its schema demands."""

from __future__ import annotations

from models.carried import check_carried
from models.config import RankerConfig
from services.ingress.question import TIMEOUT_HEADER, RankQuestion
from services.ingress.text import shown
from shared.errors import InvalidRequestError
from shared.hashing import canonical_id
from shared.schema.api import ApiLimits, EventsRequest


def check_limits(question: RankQuestion, limits: ApiLimits) -> None:
    """Check a rank request against the deployment's limits: what no retry makes right is not told to come back.

    Raises:
        InvalidRequestError: names field, limit and value.
    """
    fields = question.fields
    check_count("candidates", len(question.ids), limits.candidates_max)
    if fields.limit is not None and fields.limit > limits.candidates_max:
        _refuse("limit", f"at most {limits.candidates_max}", limits.candidates_max, fields.limit)
    for field, given_ms in (("deadline_ms", fields.deadline_ms), (TIMEOUT_HEADER, question.sender.timeout_ms)):
        if given_ms is not None and not limits.deadline_ms_min <= given_ms <= limits.deadline_ms_max:
            bounds = f"{limits.deadline_ms_min} to {limits.deadline_ms_max}"
            _refuse(field, f"from {bounds}", bounds, given_ms)


def check_candidates(question: RankQuestion, model: RankerConfig) -> None:
    """Check that candidates carry what a model takes, and differ.

    Raises:
        InvalidRequestError: names field, limit and value.
    """
    check_carried(question.batch, model)
    keys = question.batch.keys.tolist()
    if len(set(keys)) != len(keys):
        first: dict[int, int] = {}
        for position, key in enumerate(keys):
            if key in first:
                value = canonical_id(question.ids[position])
                raise InvalidRequestError(
                    f"candidates must be distinct: {shown(value)} is at positions {first[key]} and {position}",
                    field=f"candidates.{position}", limit="distinct", value=shown(value),
                )  # fmt: skip
            first[key] = position


def check_events(request: EventsRequest, limits: ApiLimits, now_s: float) -> None:
    """Check an append against the deployment's limits.

    Raises:
        InvalidRequestError: there are more events than the limit, or one is of a time too far ahead.
    """
    check_count("events", len(request.events), limits.events_max)
    last_s = int(now_s) + limits.event_ahead_s_max
    for position, event in enumerate(request.events):
        if event.timestamp_s > last_s:
            _refuse(
                f"events.{position}.timestamp_s",
                f"at most {last_s}, {limits.event_ahead_s_max} s ahead of now",
                last_s,
                event.timestamp_s,
            )


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
