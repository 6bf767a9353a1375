"""The replay: every copy scores what it had at the time, and no copy knows the future."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.weights import freshness
from benchmarks.weights.freshness import INTERVALS_S, Counts, Replay, minutes, up_to_date
from models.heads import CLICK, probabilities
from models.random_weights import TINY
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import TrainConfig
from training.data import Dataset
from training.evaluate import predict
from training.indexing import item_catalog
from training.loop import train
from training.model import TrainedModel

CONFIG = TrainConfig(name="tiny", dataset="synthetic", threads=1, batch_rows=256, train_share=0.05, model=TINY)

LEARNING = ("item", "genre", "year", "user")
"""More than the benchmark lets learn, so that a few rows of the synthetic log show."""


@pytest.fixture(scope="module")
def fresh() -> Dataset:
    return up_to_date(tiny_dataset())


@pytest.fixture(scope="module")
def model(fresh: Dataset) -> TrainedModel:
    return train(CONFIG, fresh)


def test_training_comes_close_to_the_test_rows(fresh: Dataset) -> None:
    old = tiny_dataset().split
    assert len(fresh.split.train) == len(old.train) + len(old.valid) * 3 // 4
    assert len(fresh.split.train) + len(fresh.split.valid) == len(old.train) + len(old.valid)
    runs = (fresh.split.train, fresh.split.valid, fresh.split.test)
    assert all(left.timestamp_s[-1] <= right.timestamp_s[0] for left, right in pairwise(runs))


def test_counters_at_the_end_of_training_are_those_that_training_publishes(fresh: Dataset, model: TrainedModel) -> None:
    published = item_catalog(fresh, model.index.vocabularies).counters
    counts = Counts(fresh)
    start_s = int(fresh.split.valid.timestamp_s[0])
    counts.before(start_s // 2)  # in steps or at once: the same
    np.testing.assert_array_equal(counts.before(start_s), published)


def test_runs_of_minutes_cover_all_rows() -> None:
    found = list(minutes(np.array([0, 59, 60, 61, 200, 200])))
    assert [(minute.rows.start, minute.rows.stop, minute.end_s) for minute in found] == [
        (0, 2, 60),
        (2, 4, 120),
        (4, 6, 240),
    ]


def test_a_replay(fresh: Dataset, model: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = fresh.split.test.select(slice(0, 60))
    span_s = int(rows.timestamp_s[-1] - rows.timestamp_s[0])
    often_s = span_s // 20
    monkeypatch.setattr(freshness, "ONLINE_TABLES", LEARNING)
    monkeypatch.setattr(freshness, "INTERVALS_S", {"often": often_s, "seldom": span_s // 3, "never": None})
    replay = Replay(model, CONFIG, fresh)
    at_start = replay.copies["never"].model
    assert at_start.ranker.tables.weights["item"].equal(replay._ranker.tables.weights["item"])
    depth = max(model.ranker.config.depths)
    logits = predict(at_start, fresh, rows, "strict")[depth]
    frozen = probabilities(at_start.calibration.apply(logits, depth))[:, CLICK]
    chances = replay.run(rows)
    copies = replay.copies
    assert copies["often"].num_syncs > copies["seldom"].num_syncs > copies["never"].num_syncs == 0
    np.testing.assert_array_equal(chances["never"], frozen)
    first = int(np.flatnonzero(rows.timestamp_s // often_s != rows.timestamp_s[0] // often_s)[0])
    np.testing.assert_allclose(chances["often"][:first], chances["never"][:first], rtol=1e-5)  # other batches
    assert not np.allclose(chances["often"][first:], chances["never"][first:], rtol=1e-5)
    assert np.isfinite(np.stack(list(chances.values()))).all()
    assert len(replay.run(rows, seconds_max=-1.0)["never"]) in range(1, 60), "stops after a minute of rows"
    trained = replay._ranker.tables.weights["item"]
    for name in ("never", "seldom"):
        assert not copies[name].model.ranker.tables.weights["item"].equal(trained), "the trainer is ahead"


def test_no_copy_knows_what_comes_later(fresh: Dataset, model: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of the first rows are the same whatever the labels after them are."""
    monkeypatch.setattr(freshness, "ONLINE_TABLES", LEARNING)
    monkeypatch.setattr(freshness, "INTERVALS_S", {"often": 600})
    rows = fresh.split.test.select(slice(0, 30))
    turned = replace(rows, click=rows.click.copy())
    turned.click[15:] ^= True
    first, second = (Replay(model, CONFIG, fresh).run(given)["often"] for given in (rows, turned))
    same = int(np.flatnonzero(rows.timestamp_s == rows.timestamp_s[15])[0])
    np.testing.assert_array_equal(first[: same + 1], second[: same + 1])
    assert not np.array_equal(first, second)


def test_only_the_tables_of_users_go_on_learning(fresh: Dataset, model: TrainedModel) -> None:
    trained = Replay(model, CONFIG, fresh)._ranker
    assert {name for name, parameter in trained.named_parameters() if parameter.requires_grad} == {
        "tables.weights.user"
    }
    assert trained.tables.weights["item"].equal(model.ranker.tables.weights["item"])
    assert all(parameter.requires_grad for parameter in model.ranker.parameters()), "the model itself is not touched"


def test_the_intervals_are_those_of_the_table() -> None:
    assert INTERVALS_S == {"minute": 60, "hour": 3_600, "day": 86_400, "never": None}
