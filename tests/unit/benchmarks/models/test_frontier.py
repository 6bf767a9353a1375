"""The frontier's rows come from logits that are kept, and the estimates from logs agree with what all tiers say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.models import frontier
from models.random_weights import TINY
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import TrainConfig

_CONFIG = TrainConfig(name="tiny", dataset="synthetic", threads=1, batch_rows=256, train_share=0.2, model=TINY)


def test_a_second_run_trains_nothing_and_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = frontier._seed(_CONFIG, tiny_dataset(), tmp_path)
    monkeypatch.setattr(frontier, "train", None)
    second = frontier._seed(_CONFIG, tiny_dataset(), tmp_path)
    assert first.frontier == second.frontier
    other = _CONFIG.model_copy(update={"seed": 1})
    with pytest.raises(TypeError):
        frontier.scores(other, tiny_dataset(), tmp_path)

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
