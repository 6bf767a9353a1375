"""The frontier's rows come from logits that are kept, and the estimates from logs agree with what all tiers say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.models import frontier, predictions
from models.random_weights import TINY
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import TrainConfig

_CONFIG = TrainConfig(name="tiny", dataset="synthetic", threads=1, batch_rows=256, train_share=0.2, model=TINY)


def test_figures_of_kept_logits(tmp_path: Path) -> None:
    dataset = tiny_dataset()
    predictions.keep(_CONFIG, dataset, tmp_path)
    first, second = (frontier._seed(_CONFIG, dataset, predictions.read(_CONFIG, tmp_path)) for _ in range(2))
    assert first.frontier == second.frontier
    figures = {each.metric: each for each in [*frontier._curve([first, second], {}), *frontier._logs([first], {}, 0)]}
    assert figures["click_ne_depth_2"].value == pytest.approx(first.frontier.uniform[-1].ne, abs=1e-6)
    assert {"flops_saved_at_equal_ne", "ne_gain_at_equal_flops", "ne_gain_at_equal_flops_depth_1"} <= set(figures)
    assert {"click_ne_routed_25", "ne_gain_over_lot_25", "calibration_error_max"} <= set(figures)
    for name in ("replay_error", "ips_error", "dr_error"):
        assert figures[name].value < 4 * float(figures[name].params["standard_error"])
    assert float(figures["dr_error"].params["standard_error"]) < float(figures["ips_error"].params["standard_error"])


def test_the_expected_loss_of_a_chance_is_its_entropy() -> None:
    chance = np.array([[0.3]])
    assert frontier._entropy(chance)[0, 0] == pytest.approx(-(0.3 * np.log(0.3) + 0.7 * np.log(0.7)))
