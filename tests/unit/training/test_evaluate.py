"""Calibration undoes a known distortion; the table names what it shows."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from models.calibration import Calibration, fit_platt
from models.config import WEIGHTS_FORMAT
from models.source import MemorySource
from shared.errors import WeightsError
from tests.helpers.tiny_dataset import tiny_dataset
from training.evaluate import Evaluation, check_release, dataset_of, fit_calibration, show_evaluations
from training.metrics import Metrics


def test_fit_platt_finds_scale_and_offset() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=20_000)
    labels = random.random(20_000) < 1 / (1 + np.exp(-(1.5 * logits - 0.7)))
    scale, offset = fit_platt(logits, labels)
    assert scale == pytest.approx(1.5, abs=0.06)
    assert offset == pytest.approx(-0.7, abs=0.06)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [([1.0, 2.0], [True, True]), ([1.0, 1.0, 1.0], [True, False, True]), ([0.0, 5.0], [False, False])],
)
def test_fit_platt_changes_nothing_where_rows_cannot_tell(logits: list[float], labels: list[bool]) -> None:
    assert fit_platt(np.array(logits), np.array(labels)) == (1.0, 0.0)


def test_fit_platt_survives_separable_rows() -> None:
    scale, offset = fit_platt(np.array([-2.0, -1.0, 1.0, 2.0]), np.array([False, False, True, True]))
    assert np.isfinite([scale, offset]).all()
    assert scale > 1


def test_calibrated_means_are_the_base_rates() -> None:
    rows = tiny_dataset().split.valid
    random = np.random.default_rng(1)
    logits = random.normal(1.0, 2.0, (len(rows), 2)).astype(np.float32)
    predictions = {0: logits, 2: logits[::-1].copy()}
    calibration = fit_calibration(predictions, rows)
    for depth, values in predictions.items():
        chance = 1 / (1 + np.exp(-calibration.apply(values, depth)))
        assert chance[:, 0].mean() == pytest.approx(rows.click.mean(), abs=1e-3)
        assert chance[rows.click, 1].mean() == pytest.approx(rows.conversion[rows.click].mean(), abs=1e-3)


def test_identity_changes_nothing() -> None:
    logits = np.array([[1.0, -2.0]], np.float32)
    np.testing.assert_array_equal(Calibration.identity([0, 2]).apply(logits, 2), logits)


def test_table_shows_every_objective() -> None:
    metrics = Metrics(num_rows=12, base_rate=0.5, auc=0.75, logloss=0.6, ne=0.866, calibration=1.01, gauc=0.7)
    evaluation = Evaluation(
        split="test", history_mode="strict", tier="full", objectives={"click": metrics, "conversion": metrics}
    )
    text = io.StringIO()
    show_evaluations([evaluation], Console(file=text, width=120), "a title")
    assert "a title" in text.getvalue()
    for word in ("test", "12", "strict", "full", "click", "conversion", "0.7500", "0.866", "1.010"):
        assert word in text.getvalue()


@pytest.mark.parametrize("found", [None, WEIGHTS_FORMAT - 1, WEIGHTS_FORMAT + 1, "6"])
def test_weights_of_another_release_are_told_by_name(found: object) -> None:
    source = MemorySource("old")
    source.documents["metrics"] = {"format": found, "train": {"model": {"a_field_of_then": 1}}}
    words = f"weights {source.version} are of another release: their format is {found}, this one has {WEIGHTS_FORMAT}"
    with pytest.raises(WeightsError, match=words):
        dataset_of(source, Path("nowhere"))
    check_release(MemorySource("own", {}, {"metrics": {"format": WEIGHTS_FORMAT}}))
