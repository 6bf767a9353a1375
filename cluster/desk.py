"""What the owner of a mesh is asked to roll out, and what there is to be rolled out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from shared.weights import WeightStore
from shared.weights.delta_log import DeltaLog

REQUEST_FILE = "rollout.json"
"""In the folder of a mesh: what its owner is asked to roll out."""

LATEST = "latest"
"""Stands for the newest version of the store."""


class RolloutRequest(BaseModel):
    """What ``rankmesh rollout`` and ``rankmesh rollback`` ask for.

    Args:
        id: Random, found again in status.
        action: Roll a version out, or back.
        version: The version, or ``latest``.
        share: Share of the users that get it first; 0: all at once.
        watch_s: How long it is watched before all get it, seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    action: Literal["rollout", "rollback"]
    version: str = ""
    share: float = Field(0.0, ge=0, lt=1)
    watch_s: float = Field(60.0, ge=0)

    def write(self, folder: Path) -> None:
        """Put it where the owner of the mesh looks."""
        staged = folder / f"{REQUEST_FILE}.{self.id}"
        staged.write_text(self.model_dump_json(), encoding="utf-8")
        staged.replace(folder / REQUEST_FILE)


class Desk(Protocol):
    """What the loop looks at in each round: what there is to roll out, and what is asked for."""

    def latest(self) -> str:
        """Return the newest version.

        Raises:
            RankMeshError: there is none.
        """
        ...

    def check(self, version: str) -> None:
        """Check that a version is there and whole.

        Raises:
            RankMeshError: it is not.
        """
        ...

    def newest_delta(self, version: str) -> int:
        """Return the number of the newest delta of a version, 0 where there is none."""
        ...

    def is_asked(self) -> bool:
        """Return whether a request waits."""
        ...

    def take(self) -> bytes | None:
        """Return the request that waits, which does so no longer; None: there is none."""
        ...


class FolderDesk:
    """A weight store, and the folder of a mesh into which requests are written.

    Args:
        store: The store.
        folder: The folder.
    """

    def __init__(self, store: WeightStore, folder: Path) -> None:
        self._store = store
        self._path = folder / REQUEST_FILE

    def latest(self) -> str:
        """Return the newest version of the store."""
        return self._store.latest()

    def check(self, version: str) -> None:
        """Open a version."""
        self._store.open(version)

    def newest_delta(self, version: str) -> int:
        """Return the number of the last delta in the version's log."""
        numbers = DeltaLog(self._store, version).sequences()
        return numbers[-1] if numbers else 0

    def is_asked(self) -> bool:
        """Return whether the file is there."""
        return self._path.exists()

    def take(self) -> bytes | None:
        """Read the file and remove it."""
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return None
        self._path.unlink(missing_ok=True)
        return text
