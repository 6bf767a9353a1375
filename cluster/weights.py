"""Finds the weights that a run may use again, or has them trained."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.config import MeshConfig
from models.config import WEIGHTS_FORMAT
from shared.errors import WeightsError
from shared.weights import WeightStore
from training.config import TrainConfig

QUICK_CONFIG = Path("configs/train/quick.yaml")
"""The model that two cores train in minutes."""

FULL_CONFIG = Path("configs/train/full.yaml")
"""The larger model, trained in about ten minutes."""

LOOKED_AT_MAX = 50
"""Newest versions that are looked through."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The weights of a run.

    Args:
        version: Name of the version.
        metrics: Its ``metrics`` document.
        is_new: It was trained for this run.
    """

    version: str
    metrics: dict[str, Any]
    is_new: bool

    @property
    def stands_in(self) -> bool:
        """Whether another data set than the configured one had to do."""
        return bool(self.metrics["dataset"] != self.metrics["train"]["dataset"])

    def quality(self, objective: str = "click") -> dict[str, float]:
        """Return test metrics of one objective on the best tier, with the history that a server knows; may be empty."""
        for evaluation in self.metrics.get("evaluations", ()):
            if evaluation["split"] == "test" and evaluation["history_mode"] == "strict":
                found: dict[str, float] = evaluation["objectives"].get(objective, {})
                return found
        return {}


def weights_url(config: MeshConfig, var_dir: Path) -> str:
    """Return where the weights of a mesh are: what its configuration says, else a folder among the run-time files."""
    return config.weights.url or str(var_dir.absolute() / "weights")


def find_trained(store: WeightStore, config: TrainConfig) -> Choice | None:
    """Return the newest version that this code can serve and that was trained with exactly this configuration, or None.

    A version that was made of another one (``rankmesh simplify``) keeps that one's training configuration and is not
    taken for it: who wants it names it.

    Args:
        store: Where to look.
        config: The training run.
    """
    for version in reversed(store.versions()[-LOOKED_AT_MAX:]):
        try:
            reader = store.open(version)
            metrics = reader.json("metrics")
        except WeightsError:  # damaged, or published by something else: no reason not to look further
            continue
        if (
            reader.manifest.derived is None
            and _trained_by(metrics) == config
            and metrics.get("format") == WEIGHTS_FORMAT
        ):
            return Choice(version, metrics, is_new=False)
    return None


@contextmanager
def one_trainer(var_dir: Path, config: TrainConfig, on_wait: Callable[[], object]) -> Iterator[bool]:
    """Run the body while nobody else on this machine trains with this configuration; yield whether that took waiting.

    The kernel lets go of the lock with the process, however it ends.

    Args:
        var_dir: Folder of run-time files.
        config: The training run.
        on_wait: Called once when somebody else is at it, before waiting.
    """
    folder = var_dir / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"train-{config.digest()}").open("a") as file:
        waited = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield waited


def _trained_by(metrics: dict[str, Any]) -> TrainConfig | None:
    """Return the configuration that a version was trained with; fields that are newer than it have their defaults."""
    try:
        return TrainConfig.model_validate(metrics.get("train"))
    except ValidationError:
        return None
