"""What crosses the trust border: HTTP request and response bodies (JSON or msgpack, same fields).

Fixed ceilings live here; a deployment's own, lower limits come from its configuration (``ApiLimits``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    Tag,
    model_validator,
)

from shared.config import Config
from shared.hashing import ID_CHARS_MAX, ID_MAX

CANDIDATES_CEILING = 10_000
FEATURES_CEILING = 1_024
TIMESTAMP_MAX_S = 2**40
FLOAT_MAX = 3e38
"""Largest number of a feature: it must fit float32."""

Pass: TypeAlias = Literal["full", "first"]
Level: TypeAlias = Literal["exact", "user", "none"]


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("an id is an integer or a string, not a boolean")
    return value


def _id_in_range(value: int | str) -> int | str:
    if isinstance(value, int) and not 0 <= value <= ID_MAX:
        raise ValueError(f"integer id must be from 0 to {ID_MAX}")
    if isinstance(value, str):
        if not value:
            raise ValueError("string id must not be empty")
        if len(value) > ID_CHARS_MAX:  # characters, not bytes: what JSON Schema, and so the API's document, counts
            raise ValueError(f"string id must be at most {ID_CHARS_MAX} characters, has {len(value)}")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError("string id must be valid Unicode without lone surrogates")
    return value


ApiId: TypeAlias = Annotated[
    StrictInt | StrictStr,
    BeforeValidator(_not_bool),
    AfterValidator(_id_in_range),
    Field(description="64-bit id: an integer 0 .. 2**63-1, its decimal string (the same entity), or any other string"),
]
Name: TypeAlias = Annotated[StrictStr, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Number: TypeAlias = Annotated[StrictFloat | StrictInt, Field(ge=-FLOAT_MAX, le=FLOAT_MAX)]
Token: TypeAlias = Annotated[StrictStr, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]


# A list is left at its first wrong element: one of each kind is told, and all of them would be made and kept.
Ids: TypeAlias = Annotated[list[ApiId], Field(max_length=CANDIDATES_CEILING, fail_fast=True)]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ApiLimits(Config):
    """Limits of one deployment on what a client may send.

    Args:
        candidates_max: Candidates of one request.
        events_max: Events of one append.
        event_ahead_s_max: How far an event's time may lie ahead of the server's clock, seconds. One from the far future
            would be newer than all that its user does until then, and would push it out of the log.
        body_bytes_max: Bytes of a request body.
        deadline_ms_min: Smallest budget that is accepted.
        deadline_ms_max: Largest budget that is accepted.
        deadline_ms_default: Budget of a request that names none.
        limit_default: Returned candidates when the request names none.
        features_max: Features that the candidates of one request may carry.
        feature_ids_max: Ids in all of them together.
    """

    candidates_max: int = Field(2_000, ge=1, le=CANDIDATES_CEILING)
    events_max: int = Field(1_000, ge=1, le=10_000)
    event_ahead_s_max: int = Field(86_400, ge=0)
    body_bytes_max: int = Field(1_048_576, ge=1_024)
    deadline_ms_min: int = Field(1, ge=1)
    deadline_ms_max: int = Field(10_000, ge=1)
    deadline_ms_default: int = Field(1_000, ge=1)
    limit_default: int = Field(100, ge=1)
    features_max: int = Field(64, ge=0, le=FEATURES_CEILING)
    feature_ids_max: int = Field(200_000, ge=0, le=10_000_000)

    @model_validator(mode="after")
    def _deadlines_agree(self) -> ApiLimits:
        if not self.deadline_ms_min <= self.deadline_ms_default <= self.deadline_ms_max:
            raise ValueError(
                f"deadline_ms_default must lie between deadline_ms_min {self.deadline_ms_min} and deadline_ms_max "
                f"{self.deadline_ms_max}, is {self.deadline_ms_default}"
            )
        return self


class WeightedIds(_Body):
    """Ids of one feature with a weight each; where a model takes fewer, the heaviest stay."""

    ids: Ids
    weights: Annotated[
        list[Number], Field(max_length=CANDIDATES_CEILING, fail_fast=True, description="one for each id")
    ]

    @model_validator(mode="before")
    @classmethod
    def _names_are_few(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > 2 * len(cls.model_fields):
            raise ValueError(f"an object has ids and weights, this one has {len(value)} names")
        return value


def _form_of(value: object) -> str:
    # Tags stand in the place of an error; angle brackets are in no name of a feature.
    if isinstance(value, list):
        return "<ids>"
    return "<weighted>" if isinstance(value, dict | WeightedIds) else "<number>"


FeatureInput: TypeAlias = Annotated[
    Annotated[Number, Tag("<number>")] | Annotated[Ids, Tag("<ids>")] | Annotated[WeightedIds, Tag("<weighted>")],
    Discriminator(_form_of),
]


Features: TypeAlias = Annotated[dict[Name, FeatureInput], Field(max_length=FEATURES_CEILING)]


class RankFields(_Body):
    """What a rank request says beside its candidates: the same fields in every format of the body."""

    user_id: ApiId
    surface: Name = Field("ml-1m", description="where the answer is shown")
    limit: StrictInt | None = Field(
        None, ge=1, le=CANDIDATES_CEILING, description="how many candidates to return, default from the deployment"
    )
    timestamp_s: StrictInt | None = Field(
        None,
        ge=0,
        le=TIMESTAMP_MAX_S,
        description="request time, seconds since the epoch; default now. Only earlier events count",
    )
    deadline_ms: StrictInt | None = Field(None, ge=1, description="time budget; default and bounds from the deployment")
    tier: Name = Field("auto", description="auto, or the name of a ranking tier to force")
    speculative: StrictBool = Field(True, description="use and fill the speculative-embedding cache")
    request_id: Token | None = Field(None, description="echoed; made up when absent")


class RankRequest(RankFields):
    """Rank the candidates of one user."""

    candidates: list[ApiId] = Field(
        min_length=1, max_length=CANDIDATES_CEILING, fail_fast=True, description="distinct candidate ids"
    )
    features: Annotated[list[Features], Field(max_length=CANDIDATES_CEILING, fail_fast=True)] | None = Field(
        None,
        description="what candidates carry themselves, one map each, in the order of the candidates: a number, a list "
        "of ids, or ids with weights, by feature of the model; it wins over the catalog",
    )


class RankedCandidate(_Body):
    """One candidate of the answer."""

    id: ApiId = Field(description="as the client sent it")
    scores: dict[str, float] = Field(description="probability by objective: click, conversion (of all impressions)")
    value: float = Field(description="what the order follows: the weighted sum of the scores")
    scored_by: Pass = Field(description="full: the tier's full pass; first: the first pass over all candidates")
    speculative: Level = Field(description="where the speculative embedding came from")


class StageTime(_Body):
    """One bar of the waterfall, seen from the ingress; the bars marked critical add up to the total."""

    name: str
    start_ms: float
    duration_ms: float
    compute_ms: float | None = Field(None, description="time the station computed, without waiting and transport")
    critical: bool = Field(False, description="on the path that makes the total")


class RankResponse(_Body):
    """The ordered head of the candidates and how it came to be."""

    request_id: str
    user_id: ApiId
    weights_version: str
    tier: str
    tier_reason: str
    candidates: list[RankedCandidate]
    num_candidates: int
    history_length: int
    degraded: list[str] = Field(
        description="stations whose part was replaced, e.g. embedding:1; empty when the answer is whole"
    )
    reasons: dict[str, str] = Field(description="why, by station of `degraded`")
    num_oov: dict[str, int] = Field(description="ids by feature that the model does not know")
    stages: list[StageTime]
    total_ms: float


class Event(_Body):
    """One thing that a user did."""

    event_id: Token = Field(description="makes the append idempotent: the same id of a user is kept once")
    user_id: ApiId
    item_id: ApiId
    weight: StrictFloat | StrictInt = Field(
        ge=0, le=1e6, description="what it is worth to the model, here the rating 0.5 to 5"
    )
    timestamp_s: StrictInt = Field(ge=0, le=TIMESTAMP_MAX_S)
    source: Name | None = Field(
        None, description="where it happened; one of the deployment's sources, default the first"
    )


class EventsRequest(_Body):
    """Append events to users' logs."""

    events: list[Event] = Field(min_length=1, max_length=10_000, fail_fast=True)


class EventsResponse(_Body):
    """What became of the events."""

    appended: int
    duplicates: int = Field(description="events whose id the user's log already holds")
    expired: int = Field(description="events older than all that a full log holds; not kept")
    buffered: int = Field(
        description="events kept in memory because the store is out of reach; they are written when it is back"
    )


class UserPath(_Body):
    """The user whom a path names."""

    user_id: ApiId


class ForgetResponse(_Body):
    """A user's log was deleted."""

    user_id: ApiId
    deleted: bool = Field(description="whether there was anything: events, profile, or events that waited")


class ErrorBody(_Body):
    """Every answer that is not 2xx."""

    code: str
    message: str
    context: dict[str, str | int | float | bool | None]
