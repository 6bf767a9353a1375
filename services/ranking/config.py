"""Configuration of one ranking tier."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from shared.config import Config


class RankingConfig(Config):
    """One ranking tier.

    Args:
        tier: Tier of the model that this deployment runs.
        queue_max: Requests that may wait or run in one replica; the mesh sends more to another replica.
        plans: Folder of the plans that ``rankmesh quantize`` wrote; the one for the weights version and device of a
            replica is obeyed, others are ignored and logged. None: float32 throughout.
        backend: Runs the full pass's layers: ``torch``, or ``native``, the fused C++ stack in bfloat16, which takes no
            plan and refuses to start where it cannot run.
    """

    tier: str = Field("full", pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    queue_max: int = Field(32, ge=1)
    plans: str | None = None
    backend: Literal["torch", "native"] = "torch"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.backend != "torch" and self.plans is not None:
            raise ValueError(f"plans must be null with backend {self.backend}, is {self.plans!r}")
        return self
