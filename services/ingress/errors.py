"""Refusals that only HTTP knows.

::

    InvalidRequestError (shared.errors)
    ├── NotAcceptableError [406]   the client accepts none of the media types that the answer can have
    └── SlowBodyError [408]        the body did not arrive in time
"""

from __future__ import annotations

from shared.errors import InvalidRequestError


class NotAcceptableError(InvalidRequestError):
    """The Accept header names none of the media types that the API speaks."""

    code = "not_acceptable"
    http_status = 406


class SlowBodyError(InvalidRequestError):
    """The client took longer than ``body_timeout_s`` to send its body."""

    code = "slow_body"
    http_status = 408
