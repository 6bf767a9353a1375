"""Configuration of preprocess."""

from __future__ import annotations

from pydantic import Field

from shared.config import Config
from shared.schema.api import CANDIDATES_CEILING
from shared.wire import BatchLimits


class PreprocessConfig(Config):
    """Preprocess.

    Args:
        candidates_max: Candidates of one request; like the others a second fence behind the ingress's own limits.
        features_max: Features that candidates carry.
        feature_ids_max: Ids in all of them together.
    """

    candidates_max: int = Field(2_000, ge=1, le=CANDIDATES_CEILING)
    features_max: int = Field(64, ge=0, le=1_024)
    feature_ids_max: int = Field(200_000, ge=0, le=10_000_000)

    @property
    def batch_limits(self) -> BatchLimits:
        """Limits on what is decoded."""
        return BatchLimits(self.candidates_max, self.features_max, self.feature_ids_max)
