"""Configuration of the speculative cache and of its foundation workers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.config import Config


class SpeculativeConfig(Config):
    """The speculative-embedding cache.

    Args:
        namespace: First part of every store key; meshes that share a store have different ones.
        model_namespace: Second part; models that must not read one another's embeddings have different ones.
        width: E, must be the model's.
        vector_dtype: How vectors are stored; float16 halves the store at 3 decimal digits.
        ttl_s: Age from writing at which an embedding is no longer read, seconds.
        pairs_per_user_max: Embeddings kept for one user; the oldest requests' go first.
        forget_margin_s: For how long after a user was forgotten nothing is kept of them, seconds: more than a request
            and the precomputation after it take, which may have read what was deleted, and than clocks differ.
        store_timeout_ms: Longest wait for one look-up, milliseconds; then the answer is that there are none.
        fill_timeout_ms: Longest wait for one fill, milliseconds.
    """

    namespace: str = Field("rankmesh", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    model_namespace: str = Field("main", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    width: int = Field(16, ge=1, le=4096)
    vector_dtype: Literal["float16", "float32"] = "float32"
    ttl_s: int = Field(86_400, ge=1)
    pairs_per_user_max: int = Field(512, ge=1, le=100_000)
    forget_margin_s: int = Field(60, ge=0, le=86_400)
    store_timeout_ms: float = Field(200, gt=0)
    fill_timeout_ms: float = Field(1_000, gt=0)


class FoundationConfig(Config):
    """A foundation worker.

    Args:
        candidates_max: Pairs of one batch.
        queue_max: Batches that may wait or run in one replica; more are refused, nobody waits for them.
    """

    candidates_max: int = Field(512, ge=1, le=10_000)
    queue_max: int = Field(4, ge=1)
