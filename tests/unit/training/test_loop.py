"""Training learns, repeats itself, and sees nothing of the time at or after a row."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from models.random_weights import TINY
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import OptimizerConfig, SpeculativeTrainingConfig, TrainConfig
from training.data import Dataset, EventLog
from training.evaluate import evaluate, predict
from training.loop import train
from training.model import TrainedModel
from training.progress import StepReport

_CONFIG = TrainConfig(
    name="tiny",
    dataset="synthetic",
    threads=1,
    batch_rows=256,
    train_share=0.5,
    model=TINY,
    optimizer=OptimizerConfig(network_rate=0.01, table_rate=0.02, warmup_steps=2),
    speculative=SpeculativeTrainingConfig(batch_share=0.3),
)


class _Reports(list[StepReport]):
    def step(self, report: StepReport) -> None:
        self.append(report)


@pytest.fixture(scope="module")
def trained() -> tuple[TrainedModel, _Reports]:
    reports = _Reports()
    return train(_CONFIG, tiny_dataset(), reports), reports


def test_training_beats_the_base_rate_on_rows_it_has_not_seen(trained: tuple[TrainedModel, _Reports]) -> None:
    model, reports = trained
    assert reports[-1].rows_done == reports[-1].rows_total == round(len(tiny_dataset().split.train) * 0.5)
    full, standard, light = (
        evaluate(model, tiny_dataset(), "test", "strict", tier).objectives["click"]
        for tier in ("full", "standard", "light")
    )
    for deep in (full, standard):
        assert deep.ne < 0.99
        assert deep.auc > 0.55
        assert 0.7 < deep.calibration < 1.4
    # Some thousand rows are few for the first pass; it must do no harm.
    assert light.ne < 1.02


def test_the_same_seed_gives_the_same_weights() -> None:
    config = _CONFIG.model_copy(update={"train_share": 0.05})
    first, second = (train(config, tiny_dataset()).ranker.state_dict() for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    other = train(config.model_copy(update={"seed": 1}), tiny_dataset()).ranker.state_dict()
    assert not torch.equal(other["network.presence"], first["network.presence"])


def test_every_weight_learns() -> None:
    config = _CONFIG.model_copy(
        update={"speculative": SpeculativeTrainingConfig(batch_share=1.0), "train_share": 0.1, "seed": 3}
    )
    dataset = tiny_dataset()
    model = train(config, dataset)
    torch.manual_seed(config.seed)
    before = type(model.ranker)(TINY, model.index.num_rows, model.index.genres_by_row()).state_dict()
    still = {name for name, value in model.ranker.state_dict().items() if torch.equal(value, before[name])}
    assert still == set()


def test_the_candidate_side_learns_at_its_own_rate() -> None:
    optimizer = _CONFIG.optimizer.model_copy(update={"candidate_share": 1e-9})
    config = _CONFIG.model_copy(update={"train_share": 0.05, "optimizer": optimizer})
    model = train(config, tiny_dataset())
    torch.manual_seed(config.seed)
    before = type(model.ranker)(TINY, model.index.num_rows, model.index.genres_by_row())
    moved = [
        float((now - then).detach().abs().max())
        for now, then in zip(
            model.ranker.network.candidate_parameters(), before.network.candidate_parameters(), strict=True
        )
    ]
    assert max(moved) < 1e-6
    assert not torch.equal(model.ranker.network.first.user.weight, before.network.first.user.weight)
    assert not torch.equal(model.ranker.network.presence, before.network.presence)


def _with_changed_future(dataset: Dataset, from_s: int) -> Dataset:
    """Return the data set with every event from a time on given another item and rating."""
    log = dataset.log
    later = log.timestamp_s >= from_s
    changed = EventLog.from_sorted(
        user_index=log.user_index,
        item_id=np.where(later, dataset.catalog.item_id[0], log.item_id),
        rating=np.where(later, 6 - log.rating, log.rating).astype(np.uint8),
        timestamp_s=log.timestamp_s,
        surface=log.surface,
        slot=log.slot,
        num_users=log.num_users,
    )
    return dataclasses.replace(dataset, log=changed)


def test_predictions_see_nothing_at_or_after_their_time(trained: tuple[TrainedModel, _Reports]) -> None:
    model, _ = trained
    dataset = tiny_dataset()
    rows = dataset.split.test
    for at in (len(rows) // 3, len(rows) - 1):
        now_s = int(rows.timestamp_s[at])
        row = rows.select(np.flatnonzero(rows.timestamp_s <= now_s)[-50:])
        expected = predict(model, dataset, row, "strict")
        found = predict(model, _with_changed_future(dataset, now_s), row, "strict")
        same_second = row.timestamp_s == now_s
        past = predict(model, _with_changed_future(dataset, 0), row, "strict")
        assert set(expected) == {0, 1, 2}
        for depth, values in expected.items():
            np.testing.assert_array_equal(found[depth][same_second], values[same_second])
            assert not np.array_equal(past[depth], values)
