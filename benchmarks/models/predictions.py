"""What trained models say of the validation and the test rows, kept so that benchmarks share trainings.

A set of logits is named by its training configuration and by the sources that made it: a change of the model or of the
training makes new ones. What only reads logits, such as the router, is none of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from shared.settings import load_settings
from training.config import TrainConfig
from training.data import Dataset, load_dataset
from training.evaluate import Predictions, predict
from training.loop import available_cores, train

_SOURCES = ("kernels", "models", "training")

AFTER_LOGITS = frozenset(
    {
        "models/calibration.py",
        "models/golden.py",
        "models/logistic.py",
        "models/passes.py",
        "models/routing.py",
        "models/stations.py",
        "training/deltas.py",
        "training/frontier.py",
        "training/outcomes.py",
        "training/policy_value.py",
        "training/publish.py",
        "training/recalibration.py",
        "training/routing.py",
        "training/samples.py",
    }
)
"""Sources that logits, which are kept before calibration, do not depend on."""


def load_or_train(configs: Sequence[TrainConfig], dataset: Dataset) -> list[dict[str, Predictions]]:
    """Return the logits of each configuration: ``valid`` and ``test`` -> depth -> [N, O].

    What no earlier run has left is trained, one thread each and as many at once as there are cores, and left there: a
    run that was ended goes on where it was.

    Args:
        configs: The trainings, all of the same data set.
        dataset: That one; fetched before this, so that each process finds it.

    Raises:
        DataUnavailableError: the data cannot be had.
    """
    folder = load_settings().var_dir.absolute() / "predictions"
    missing = [config for config in configs if not _path(config, folder).exists()]
    if len(missing) == 1:
        keep(missing[0], dataset, folder)
    elif missing:
        jobs = [(config, load_settings().data_dir, folder) for config in missing]
        with ProcessPoolExecutor(available_cores(), mp_context=get_context("spawn")) as pool:
            list(pool.map(_train_job, jobs))
    return [read(config, folder) for config in configs]


def keep(config: TrainConfig, dataset: Dataset, folder: Path) -> None:
    """Train one configuration and keep what it says."""
    model = train(config, dataset)
    parts = {
        "valid": predict(model, dataset, dataset.split.valid, "strict"),
        "test": predict(model, dataset, dataset.split.test, "strict"),
    }
    arrays: dict[str, Any] = {f"{name}.{depth}": x for name, part in parts.items() for depth, x in part.items()}
    path = _path(config, folder)
    folder.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(".tmp.npz")
    np.savez(staged, **arrays)
    staged.rename(path)


def read(config: TrainConfig, folder: Path) -> dict[str, Predictions]:
    """Read what was kept.

    Raises:
        FileNotFoundError: there is nothing of this configuration and these sources.
    """
    found: dict[str, Predictions] = {"valid": {}, "test": {}}
    with np.load(_path(config, folder)) as stored:
        for key in stored.files:
            name, _, depth = key.partition(".")
            found[name][int(depth)] = stored[key]
    return found


def _train_job(job: tuple[TrainConfig, Path, Path]) -> None:
    config, data_dir, folder = job
    dataset = load_dataset(config.dataset, data_dir, synthetic_fallback=config.synthetic_fallback)
    keep(config.model_copy(update={"threads": 1}), dataset, folder)


def _path(config: TrainConfig, folder: Path) -> Path:
    return folder / f"{config.digest()}-{_source_digest()}.npz"


@cache
def _source_digest() -> str:
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for name in _SOURCES:
        for each in sorted((root / name).rglob("*.py")):
            if each.relative_to(root).as_posix() not in AFTER_LOGITS:
                digest.update(each.read_bytes())
    return digest.hexdigest()[:8]
