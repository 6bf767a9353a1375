"""Kept logits: trained once a configuration and source, and read as they were written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.models import predictions
from models.random_weights import TINY
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import TrainConfig
from training.evaluate import predict
from training.loop import train

_CONFIG = TrainConfig(name="tiny", dataset="synthetic", threads=1, batch_rows=256, train_share=0.2, model=TINY)


def test_kept_logits_are_those_of_the_training(tmp_path: Path) -> None:
    dataset = tiny_dataset()
    predictions.keep(_CONFIG, dataset, tmp_path)
    said = predictions.read(_CONFIG, tmp_path)
    expected = predict(train(_CONFIG, dataset), dataset, dataset.split.test, "strict")
    assert said["test"].keys() == expected.keys()
    for depth, logits in expected.items():
        np.testing.assert_array_equal(said["test"][depth], logits)
    assert len(said["valid"][max(expected)]) == len(dataset.split.valid)


def test_a_second_run_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKMESH_VAR_DIR", str(tmp_path))
    first = predictions.load_or_train([_CONFIG], tiny_dataset())
    monkeypatch.setattr(predictions, "train", None)
    second = predictions.load_or_train([_CONFIG], tiny_dataset())
    for part, by_depth in first[0].items():
        for depth, logits in by_depth.items():
            np.testing.assert_array_equal(second[0][part][depth], logits)
    with pytest.raises(TypeError):
        predictions.load_or_train([_CONFIG.model_copy(update={"seed": 1})], tiny_dataset())


def test_what_only_reads_logits_is_no_source_of_them() -> None:
    root = Path(predictions.__file__).parents[2]
    assert "training/routing.py" in predictions.AFTER_LOGITS
    assert "training/loop.py" not in predictions.AFTER_LOGITS
    gone = [name for name in predictions.AFTER_LOGITS if not (root / name).is_file()]
    assert not gone, "a file that is named here and is not there names nothing"


def test_other_sources_or_another_seed_are_another_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = predictions._path(_CONFIG, tmp_path)
    assert predictions._path(_CONFIG.model_copy(update={"seed": 1}), tmp_path) != here
    monkeypatch.setattr(predictions, "_source_digest", lambda: "other")
    assert predictions._path(_CONFIG, tmp_path) != here
    with pytest.raises(FileNotFoundError):
        predictions.read(_CONFIG, tmp_path)
