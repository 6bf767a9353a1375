"""Rows of users that go on learning: the line is the network's, and what is learned is what is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from models.embedding.vocabulary import OOV_ROW
from models.heads import CLICK
from models.random_weights import TINY
from models.source import MemorySource
from shared.weights.state import TensorState
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import TrainConfig
from training.data import HistoryReader, Rows
from training.deltas import DeltaPublisher
from training.evaluate import predict
from training.loop import train
from training.model import TrainedModel
from training.online import (
    OnlineConfig,
    Tangents,
    UserRowLearner,
    cached_tangents,
    next_state,
    score,
    tangents,
    touched_rows,
    user_table,
)

CONFIG = TrainConfig(name="tiny", dataset="synthetic", threads=1, batch_rows=256, train_share=0.05, model=TINY)


@pytest.fixture(scope="module")
def model() -> TrainedModel:
    return train(CONFIG, tiny_dataset())


@pytest.fixture(scope="module")
def rows() -> Rows:
    return tiny_dataset().split.test.select(slice(0, 200))


@pytest.fixture(scope="module")
def reader() -> HistoryReader:
    return HistoryReader(tiny_dataset().log, TINY.history_length, "strict", align="right")


@pytest.fixture(scope="module")
def seen(model: TrainedModel, reader: HistoryReader, rows: Rows) -> Tangents:
    return tangents(model, reader, rows)


def test_the_line_touches_the_network(model: TrainedModel, reader: HistoryReader, rows: Rows, seen: Tangents) -> None:
    depth = max(TINY.depths)
    logits = predict(model, tiny_dataset(), rows, "strict")[depth][:, CLICK]
    np.testing.assert_allclose(seen.logits, logits, atol=1e-5)
    counters = model.index.candidates(rows, streaming=False).counters.numpy()
    published = user_table(model)[seen.user_rows]
    small = np.full(published.shape, 1e-3, np.float32)
    moved = score(model, reader, rows, published + small, counters)[:, CLICK]
    by_line = np.einsum("nd,nd->n", seen.jacobians, small)
    # Some rows cross a kink of a rectifier on the way, where the line turns.
    assert float(np.median(np.abs(moved - logits - by_line) / np.abs(by_line))) < 0.02
    assert np.corrcoef(moved - logits, by_line)[0, 1] > 0.99


def test_labels_are_learned_and_nobody_else_moves(model: TrainedModel, seen: Tangents) -> None:
    learner = UserRowLearner(user_table(model), OnlineConfig(rate=0.3))
    user = int(np.bincount(seen.user_rows[seen.user_rows != OOV_ROW]).argmax())
    own = Tangents(*(each[seen.user_rows == user] for each in (seen.user_rows, seen.logits, seen.jacobians)))
    clicks = np.arange(len(own.logits)) % 2 == 0

    def loss(logits: np.ndarray) -> float:
        return float((np.logaddexp(0.0, logits) - clicks * logits).mean())

    losses = [loss(learner.learn(own, clicks)) for _ in range(10)]
    assert losses[0] == pytest.approx(loss(own.logits))
    assert losses[-1] < losses[0]
    assert learner.take().tolist() == [user]
    assert learner.take().tolist() == []
    changed = np.flatnonzero((learner.table() != user_table(model)).any(axis=1))
    assert changed.tolist() == [user]


def test_the_row_of_the_unknown_does_not_learn(model: TrainedModel, seen: Tangents) -> None:
    unknown = replace(seen, user_rows=np.full_like(seen.user_rows, OOV_ROW))
    learner = UserRowLearner(user_table(model), OnlineConfig())
    learner.learn(unknown, np.ones(len(seen.logits), np.bool_))
    assert not len(learner.take())
    np.testing.assert_array_equal(learner.table(), user_table(model))


def test_what_is_learned_is_what_a_delta_serves(
    model: TrainedModel, reader: HistoryReader, rows: Rows, seen: Tangents
) -> None:
    """Rows published as a delta, applied and read back as a model, score as the replay scores."""
    base = model.source()
    learner = UserRowLearner(user_table(model), OnlineConfig(rate=0.3))
    learner.learn(seen, rows.click)
    moved = learner.take()
    assert len(moved) > 1
    groups = next_state(base, TINY, learner.table())
    state = TensorState(base.version, base.groups, {})
    delta = DeltaPublisher(TensorState(base.version, base.groups, {})).publish(groups, None, touched_rows(TINY, moved))
    assert set(delta.rows) == {"tables/user/weight"}
    np.testing.assert_array_equal(delta.rows["tables/user/weight"].ids, moved)
    state.apply(delta)
    served = TrainedModel.from_weights(MemorySource("next", state.groups(), base.documents), tiny_dataset())
    expected = predict(served, tiny_dataset(), rows, "strict")[max(TINY.depths)]
    counters = model.index.candidates(rows, streaming=False).counters.numpy()
    found = score(model, reader, rows, learner.rows(seen.user_rows), counters)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not np.allclose(found[:, CLICK], seen.logits, atol=1e-3)


def test_tangents_are_computed_once(
    model: TrainedModel, reader: HistoryReader, rows: Rows, seen: Tangents, tmp_path: Path
) -> None:
    path = tmp_path / "folder" / "rows.npz"
    made = cached_tangents(model, reader, rows, path)
    with torch.no_grad():
        again = cached_tangents(model, reader, rows.select(slice(0, 1)), path)
    for found in (made, again):
        np.testing.assert_array_equal(found.jacobians, seen.jacobians)
        np.testing.assert_array_equal(found.user_rows, seen.user_rows)
    assert [each.name for each in path.parent.iterdir()] == ["rows.npz"]
