"""CompSkip's figures: changes are paired by seed, cuts are those of the counted operations."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.models.compskip import FORMS, TRAIN_CONFIG, _with, figures
from models.flops import request_flops
from training.config import load_train_config
from training.metrics import Metrics


def _metrics(error: float) -> Metrics:
    clicks = np.array([True, False, True, False, False])
    chance = np.clip(np.where(clicks, 1 - error, error), 0.01, 0.99)
    return Metrics.of(chance, clicks, np.zeros(5, np.int64))


def test_changes_are_paired_by_seed_and_cuts_are_counted() -> None:
    config = load_train_config(TRAIN_CONFIG)
    models = {name: _with(config, 0, comp_skip).model for name, comp_skip in FORMS.items()}
    assert models["turns"].encoder.comp_skip
    assert not models["everything"].encoder.comp_skip
    found = {"turns": [_metrics(0.2), _metrics(0.3)], "everything": [_metrics(0.3), _metrics(0.2)]}
    rows = {each.metric: each for each in figures(found, models, {})}
    changes = [a.ne / b.ne - 1 for a, b in zip(found["turns"], found["everything"], strict=True)]
    assert rows["ne_change_relative"].value == pytest.approx(float(np.mean(changes)), abs=1e-6)
    assert rows["click_ne_turns"].value == pytest.approx(rows["click_ne_everything"].value, abs=1e-6)
    counted = {name: request_flops(each, each.encoder.num_tokens)["encoder"] for name, each in models.items()}
    expected = 1 - counted["turns"] / counted["everything"]
    assert rows["encoder_flops_cut"].value == pytest.approx(expected, abs=1e-4)
    assert expected > 0.2
