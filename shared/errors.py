"""Every error that rankmesh raises on purpose.

The tree (HTTP status in brackets, ``*`` = a retry on another replica may help)::

    RankMeshError
    ├── InvalidRequestError [422]         a field breaks a limit; names field, limit and value
    │   ├── MalformedBodyError [400]      the body cannot be parsed at all
    │   ├── PayloadTooLargeError [413]    the body is over the byte limit
    │   ├── UnsupportedMediaTypeError [415]
    │   ├── NotAcceptableError [406]      the client accepts no media type that the answer can have
    │   └── SlowBodyError [408]           the body did not arrive in time
    ├── UnauthenticatedError [401]        no bearer token, or one that nobody has
    ├── ForbiddenError [403]              the token does not allow it
    ├── OverloadedError [429] *           shed before any work; carries retry_after_s
    ├── DeadlineExceededError [504]       the budget is gone and there is no answer to give
    ├── StageUnavailableError [503] *     a station has no live replica, or one died under the call
    │   └── StageSilentError [503]        none of its replicas answers; the call is not made, now nor a moment later
    ├── VersionMismatchError [503] *      a station does not hold the asked weights version
    ├── StoreUnavailableError [503] *     user log or speculative store out of reach
    │   └── DamagedLogError [500]         what the store holds of a user is no log; waiting does not help
    ├── WeightsError [500]                weights are missing, corrupt, or half-written
    ├── DataUnavailableError [500]        training data cannot be had
    └── ConfigError [500]                 configuration cannot be used

All survive pickling (Ray moves exceptions between processes).
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

ContextValue: TypeAlias = str | int | float | bool | None


class RankMeshError(Exception):
    """Base of all rankmesh errors.

    Args:
        message: One sentence for a person, with the limit and the value where there is one.
        context: Plain values that go into logs and the HTTP error body.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **context: ContextValue) -> None:
        super().__init__(message)
        self.message = message
        self.context: dict[str, ContextValue] = context

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild with keyword context, which the default reduction would lose."""
        return (_rebuild, (type(self), self.message, self.context))

    def body(self) -> dict[str, ContextValue | dict[str, ContextValue]]:
        """Return the JSON error body: code, message and context."""
        return {"code": self.code, "message": self.message, "context": dict(self.context)}


def _rebuild(cls: type[RankMeshError], message: str, context: dict[str, ContextValue]) -> RankMeshError:
    return cls(message, **context)


class InvalidRequestError(RankMeshError):
    """A request field breaks a rule; context has ``field``, ``limit`` and ``value``."""

    code = "invalid_request"
    http_status = 422


class MalformedBodyError(InvalidRequestError):
    """The request body is not valid JSON or msgpack."""

    code = "malformed_body"
    http_status = 400


class PayloadTooLargeError(InvalidRequestError):
    """The request body is larger than the configured limit."""

    code = "payload_too_large"
    http_status = 413


class UnsupportedMediaTypeError(InvalidRequestError):
    """The content type is none of those that the API speaks."""

    code = "unsupported_media_type"
    http_status = 415


class NotAcceptableError(InvalidRequestError):
    """The Accept header names none of the media types that the API speaks."""

    code = "not_acceptable"
    http_status = 406


class SlowBodyError(InvalidRequestError):
    """The client took longer than ``body_timeout_s`` to send its body."""

    code = "slow_body"
    http_status = 408


class UnauthenticatedError(RankMeshError):
    """The request carries no bearer token, or one that nobody has; the token is never part of the message."""

    code = "unauthenticated"
    http_status = 401


class ForbiddenError(RankMeshError):
    """The token is known and does not allow this; context has ``field``."""

    code = "forbidden"
    http_status = 403


class OverloadedError(RankMeshError):
    """Shed before any work, at admission or by a full replica; context has ``retry_after_s``."""

    code = "overloaded"
    http_status = 429
    retryable = True


class DeadlineExceededError(RankMeshError):
    """The time budget is gone; context has ``deadline_ms`` and ``stage``."""

    code = "deadline_exceeded"
    http_status = 504


class StageUnavailableError(RankMeshError):
    """A station has no live replica or one died mid-call; context has ``stage``."""

    code = "stage_unavailable"
    http_status = 503
    retryable = True


class StageSilentError(StageUnavailableError):
    """No replica of a station has answered for a while, so the call is not made; context has ``stage``."""

    code = "stage_silent"
    retryable = False


class VersionMismatchError(RankMeshError):
    """A station was asked for a weights version that it does not hold; context has ``asked`` and ``held``."""

    code = "version_mismatch"
    http_status = 503
    retryable = True


class StoreUnavailableError(RankMeshError):
    """The Redis-protocol store cannot be reached or refuses writes."""

    code = "store_unavailable"
    http_status = 503
    retryable = True


class DamagedLogError(StoreUnavailableError):
    """The store answers, and what it holds of some users is no user log of this release.

    Context has, where they are known, ``users``, how many they are (``value``), and of an append the events that were
    not written (``num_events``).
    """

    code = "damaged_log"
    http_status = 500
    retryable = False


class WeightsError(RankMeshError):
    """A weights version is missing, corrupt or incomplete; context has ``version`` and ``file``."""

    code = "weights"


class DataUnavailableError(RankMeshError):
    """Training data cannot be fetched or does not match its checksum."""

    code = "data_unavailable"


class ConfigError(RankMeshError):
    """A configuration file or value cannot be used; context has ``field`` and ``value``."""

    code = "config"
