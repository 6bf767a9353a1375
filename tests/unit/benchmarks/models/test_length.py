"""The length benchmark trains and measures at every length, none among them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.models import length as benchmark
from benchmarks.models.length import quality_at, train_on_drawn_lengths
from models.random_weights import TINY
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import TrainConfig

_CONFIG = TrainConfig(name="tiny", dataset="synthetic", threads=1, batch_rows=64, train_share=0.1, model=TINY)


@pytest.mark.parametrize("length", [0, 5])
def test_a_ranker_without_history_is_trained_and_measured(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "DRAWS", (1.0, 0.0))
    dataset = tiny_dataset()
    unspeculative = _CONFIG.speculative.model_copy(update={"batch_share": 0.0})
    config = _CONFIG.model_copy(update={"speculative": unspeculative})
    model = train_on_drawn_lengths(config, dataset, [length, 10])
    metrics = quality_at(model, dataset, dataset.split.valid, dataset.split.test, length)
    assert np.isfinite(metrics.ne)
    assert metrics.num_rows == len(dataset.split.test)
