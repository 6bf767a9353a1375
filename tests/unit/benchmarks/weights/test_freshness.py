"""The replay: every copy scores what it had at the time, and no copy knows the future."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.weights import freshness
from benchmarks.weights.freshness import INTERVALS_S, RATES, Counts, Replay, choose_rate, minutes, synced
from models.heads import CLICK, probabilities
from models.random_weights import TINY
from models.source import MemorySource
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import TrainConfig
from training.data import HistoryReader, Rows
from training.evaluate import predict
from training.indexing import item_catalog
from training.loop import train
from training.model import TrainedModel
from training.online import OnlineConfig, Tangents, tangents, user_table

CONFIG = TrainConfig(name="tiny", dataset="synthetic", threads=1, batch_rows=256, train_share=0.05, model=TINY)
FAST = OnlineConfig(rate=0.3)
DEPTH = max(TINY.depths)


@pytest.fixture(scope="module")
def model() -> TrainedModel:
    return train(CONFIG, tiny_dataset())


@pytest.fixture(scope="module")
def reader() -> HistoryReader:
    return HistoryReader(tiny_dataset().log, TINY.history_length, "strict", align="right")


@pytest.fixture(scope="module")
def rows() -> Rows:
    return tiny_dataset().split.test.select(slice(0, 120))


@pytest.fixture(scope="module")
def seen(model: TrainedModel, reader: HistoryReader, rows: Rows) -> Tangents:
    return tangents(model, reader, rows)


def intervals(rows: Rows) -> dict[str, int | None]:
    span_s = int(rows.timestamp_s[-1] - rows.timestamp_s[0])
    return {"often": span_s // 20, "seldom": span_s // 3, "never": None}


def test_counters_at_the_end_of_training_are_those_that_training_publishes(model: TrainedModel) -> None:
    published = item_catalog(tiny_dataset(), model.index.vocabularies).counters
    counts = Counts(tiny_dataset())
    start_s = int(tiny_dataset().split.valid.timestamp_s[0])
    for time_s in (start_s // 2, start_s, start_s // 3):  # in steps or at once: the same; never back
        counts.move_to(time_s)
    np.testing.assert_array_equal(counts.features(), published)
    np.testing.assert_array_equal(counts.features(np.array([3, 0])), published[[3, 0]])


def test_runs_of_minutes_cover_all_rows() -> None:
    found = [(part.start, part.stop) for part in minutes(np.array([0, 59, 60, 61, 200, 200]))]
    assert found == [(0, 2), (2, 4), (4, 6)]
    assert list(minutes(np.zeros(0, np.int64))) == []


def test_a_replay(
    model: TrainedModel, reader: HistoryReader, rows: Rows, seen: Tangents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freshness, "INTERVALS_S", intervals(rows))
    replay = Replay(model, tiny_dataset(), FAST)
    chances = replay.run(seen, rows, reader)
    copies = replay.copies
    assert copies["often"].num_syncs > copies["seldom"].num_syncs > copies["never"].num_syncs == 0
    assert copies["often"].bytes_sent > 0
    logits = predict(model, tiny_dataset(), rows, "strict")[DEPTH]
    frozen = probabilities(model.calibration.apply(logits, DEPTH))[:, CLICK]
    np.testing.assert_allclose(chances["never"], frozen, rtol=1e-5)
    assert not np.allclose(chances["often"], chances["never"], rtol=1e-3)
    assert not np.allclose(chances["often"], chances["seldom"], rtol=1e-5)
    assert np.isfinite(np.stack(list(chances.values()))).all()
    np.testing.assert_array_equal(copies["never"].table, user_table(model))


def test_a_copy_serves_what_its_deltas_say(
    model: TrainedModel, reader: HistoryReader, rows: Rows, seen: Tangents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows after the last sync, scored by a model that is made of the copy's groups, as a station would."""
    monkeypatch.setattr(freshness, "INTERVALS_S", {"seldom": intervals(rows)["seldom"]})
    replay = Replay(model, tiny_dataset(), FAST)
    chances = replay.run(seen, rows, reader)["seldom"]
    held = replay.copies["seldom"]
    assert held.interval_s is not None
    base = model.source()
    served = TrainedModel.from_weights(MemorySource("s", synced(base, TINY, held), base.documents), tiny_dataset())
    last = np.flatnonzero(rows.timestamp_s // held.interval_s == rows.timestamp_s[-1] // held.interval_s)
    served.index.catalog.counters = synced(base, TINY, held)["catalog"]["counters"]  # an index makes its own
    logits = predict(served, tiny_dataset(), rows.select(slice(int(last[0]), len(rows))), "strict")[DEPTH]
    expected = probabilities(served.calibration.apply(logits, DEPTH))[:, CLICK]
    np.testing.assert_allclose(chances[last], expected, rtol=1e-4)


def test_no_copy_knows_what_comes_later(
    model: TrainedModel, reader: HistoryReader, rows: Rows, seen: Tangents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of the first rows are the same whatever the labels after them are."""
    monkeypatch.setattr(freshness, "INTERVALS_S", {"often": 60})
    turned = replace(rows, click=rows.click.copy())
    turned.click[60:] ^= True
    first, second = (Replay(model, tiny_dataset(), FAST).run(seen, given, reader)["often"] for given in (rows, turned))
    same = int(np.flatnonzero(rows.timestamp_s // 60 == rows.timestamp_s[60] // 60)[-1])
    np.testing.assert_array_equal(first[: same + 1], second[: same + 1])
    assert not np.array_equal(first, second)


def test_what_came_before_is_learned_by_all_that_sync(model: TrainedModel, rows: Rows, seen: Tangents) -> None:
    replay = Replay(model, tiny_dataset(), FAST)
    replay.learn_all(seen, rows)
    for name, held in replay.copies.items():
        assert np.array_equal(held.table, user_table(model)) == (name == "never")


def test_the_rate_is_one_of_those_tried(model: TrainedModel, rows: Rows, seen: Tangents) -> None:
    assert choose_rate(user_table(model), seen, rows) in RATES


def test_the_intervals_are_those_of_the_table() -> None:
    assert INTERVALS_S == {"minute": 60, "hour": 3_600, "day": 86_400, "never": None}
