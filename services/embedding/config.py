"""Configuration of one embedding shard."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from models.config import TableBackend
from shared.config import Config


class EmbeddingConfig(Config):
    """One shard of the candidate-side tables.

    Args:
        shard: This shard, from 0.
        num_shards: Shards S of the mesh.
        backend: ``fbgemm``, or ``reference`` for a plain gather; the mesh never falls back from one to the other.
        map_dir: Folder for rows that do not fit into memory and are read page by page; needs ``reference``. None:
            in memory.
    """

    shard: int = Field(0, ge=0)
    num_shards: int = Field(2, ge=1, le=64)
    backend: TableBackend = "fbgemm"
    map_dir: Path | None = None

    @model_validator(mode="after")
    def _shard_exists(self) -> EmbeddingConfig:
        if self.shard >= self.num_shards:
            raise ValueError(f"shard must be below num_shards {self.num_shards}, is {self.shard}")
        if self.map_dir is not None and self.backend != "reference":
            raise ValueError(f"map_dir needs backend reference, is {self.backend}")
        return self
