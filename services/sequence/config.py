"""Configuration of sequence."""

from __future__ import annotations

from pydantic import Field

from shared.config import Config
from shared.userlog import BufferConfig


class SequenceConfig(Config):
    """Sequence: user log and request-only path.

    Args:
        queue_max: Encodes that may wait or run in one replica.
        store_timeout_ms: Longest wait for one read of the user log, milliseconds; then the cached history stands in.
        cached_users_max: Users whose last history is kept for when the store is out of reach.
        cached_state_bytes: Encoded histories that are kept between requests, so that a user who comes again costs the
            new events alone; 0 keeps none.
        buffer: Events kept while the store is out of reach.
    """

    queue_max: int = Field(64, ge=1)
    store_timeout_ms: float = Field(200, gt=0)
    cached_users_max: int = Field(10_000, ge=0)
    cached_state_bytes: int = Field(268_435_456, ge=0)
    buffer: BufferConfig = BufferConfig()
