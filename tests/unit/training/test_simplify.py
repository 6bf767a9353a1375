"""A trained model made smaller: published, read back, and measured before and after."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from models.random_weights import TINY
from models.simplify import num_parameters
from shared.weights import Derivation, WeightStore
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import TrainConfig
from training.evaluate import predict
from training.loop import train
from training.model import TrainedModel
from training.publish import publish
from training.simplify import SimplifyReport, show_report, simplify_model, simplify_version

_CONFIG = TrainConfig(name="tiny", dataset="synthetic", threads=1, batch_rows=256, train_share=0.05, model=TINY)


@pytest.fixture(scope="module")
def model() -> TrainedModel:
    model = train(_CONFIG, tiny_dataset())
    head = model.ranker.network.heads.exit(2)
    for weight in (head.hidden.weight, head.cross.weight):
        weight.data[3] = 0
    return model


def test_a_dead_unit_goes_and_predictions_stay(model: TrainedModel) -> None:
    smaller, removals = simplify_model(model, tiny_dataset(), 0.0, num_rows=10_000)
    assert {"exit 2 heads"} <= {row.place for row in removals if row.before > row.after}
    split = tiny_dataset().split
    measured, later = split.train.select(slice(len(split.train) - 1_000, None)), split.test.select(slice(0, 500))
    for rows, share_max in ((measured, 0.0), (later, 0.01)):
        expected, found = (predict(each, tiny_dataset(), rows, "strict") for each in (model, smaller))
        for depth, logits in expected.items():
            # A unit that no measured row opened is gone, and few later rows would have opened it.
            assert (np.abs(found[depth] - logits) > 1e-4).any(axis=1).mean() <= share_max
            np.testing.assert_allclose(found[depth], logits, rtol=0, atol=3e-3)


def test_the_report_names_what_changed(model: TrainedModel) -> None:
    _, removals = simplify_model(model, tiny_dataset(), 0.0, num_rows=2_000)
    report = SimplifyReport("v1", 0.0, removals, {"parameters": (1200, 1100)}, {"full": (0.8123, 0.8124)})
    text = io.StringIO()
    show_report(report, Console(file=text, width=100))
    for word in ("v1", "exit 2 heads", "hidden units", "1,200", "1,100", "tier full", "0.81240"):
        assert word in text.getvalue()
    assert "exit 2 heads, hidden units" in report.document()["removed"]


def test_a_published_version_becomes_a_smaller_one(
    model: TrainedModel, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.simplify.dataset_of", lambda *_: tiny_dataset())
    store = WeightStore(str(tmp_path_factory.mktemp("weights")))
    version = publish(model, _CONFIG, tiny_dataset(), [], store, 1.0)
    folder, told = tmp_path_factory.getbasetemp(), io.StringIO()
    quiet = Console(file=io.StringIO())
    made, report = simplify_version(store, version, folder, 0.0, quiet, progress_console=Console(file=told, width=80))
    assert "contributes on" in told.getvalue()
    assert "evaluate before and after 100%" in told.getvalue()
    assert store.open(version).manifest.derived is None
    assert store.open(made).manifest.derived == Derivation(parent=version, made_by="simplify")
    metrics = store.open(made).json("metrics")
    assert metrics["simplified"] == report.document()
    assert metrics["train"] == _CONFIG.model_dump(mode="json")
    again = TrainedModel.from_weights(store.open(made), tiny_dataset())
    assert num_parameters(again.ranker.network) == report.sizes["parameters"][1] < report.sizes["parameters"][0]
    assert abs(report.quality["full"][1] - report.quality["full"][0]) < 0.05
