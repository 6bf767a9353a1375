"""Configuration of preprocess."""

from __future__ import annotations

from pydantic import Field

from shared.config import Config
from shared.schema.api import CANDIDATES_CEILING


class PreprocessConfig(Config):
    """Preprocess.

    Args:
        candidates_max: Candidates of one request; a second fence behind the ingress's own limit.
    """

    candidates_max: int = Field(2_000, ge=1, le=CANDIDATES_CEILING)
