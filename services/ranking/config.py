"""Configuration of one ranking tier."""

from __future__ import annotations

from pydantic import Field

from shared.config import Config


class RankingConfig(Config):
    """One ranking tier.

    Args:
        tier: Tier of the model that this deployment runs.
        queue_max: Requests that may wait or run in one replica; the mesh sends more to another replica.
        plans: Folder of the plans that ``rankmesh quantize`` wrote; the one for the weights version and device of a
            replica is obeyed, others are ignored and logged. None: in a mesh, the folder `plans` of its run-time files.
        micro_batch: Candidates that a full pass takes at a time; between two of them a request that nobody waits for
            ends. The scores are the same bits. Larger is faster where the network is small.
        batch_max: Requests that are ranked as one; 1: each alone. ``rankmesh bench batching`` says whether it pays:
            on CPUs it does not where it would count (500 candidates take 1.7 times as long), on devices that one
            request does not fill it may.
        batch_wait_ms: Longest wait for company, milliseconds; 0: what came while the replica was busy.
    """

    tier: str = Field("full", pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    queue_max: int = Field(32, ge=1)
    plans: str | None = None
    micro_batch: int = Field(512, ge=8, multiple_of=8)
    batch_max: int = Field(1, ge=1, le=256)
    batch_wait_ms: float = Field(0.0, ge=0, le=1_000)
