"""No score of a training row depends on anything at or after the row's own second.

The rows' histories, streaming counters and dense features are made anew from logs whose futures differ; whatever the
model, its logits must then be equal to the bit.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.calibration import Calibration
from models.config import EncoderConfig, RankerConfig
from models.layers.layout import CandidateLayout
from models.ranker import Ranker, RequestTensors
from tests.helpers.tiny_dataset import tiny_dataset
from training.data import Dataset, EventColumns, EventLog, HistoryMode, HistoryReader, Rows, request_batches
from training.indexing import DatasetIndex
from training.model import TrainedModel

CONFIG = RankerConfig(width=8, history_length=30, num_layers=1, encoder=EncoderConfig(num_events=16))


@cache
def model() -> TrainedModel:
    """Return a ranker of random weights."""
    index = DatasetIndex.build(CONFIG, tiny_dataset())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        ranker = Ranker(CONFIG, index.num_rows, index.genres_by_row())
    return TrainedModel(ranker.eval(), index, Calibration.identity(CONFIG.depths))


@torch.inference_mode()
def scores(dataset: Dataset, rows: Rows, mode: HistoryMode) -> list[bytes]:
    """Return the logits of each row at every depth, as bits, with the counters that training has."""
    found, ranker = model(), model().ranker
    index = DatasetIndex.build(CONFIG, dataset, found.index.vocabularies)
    reader = HistoryReader(dataset.log, CONFIG.history_length, mode, align="right")
    parts: list[npt.NDArray[np.float32]] = []
    for batch in request_batches(rows, reader, 10_000):
        state = ranker.encode(RequestTensors.of(index.requests(batch)))
        candidates = index.candidates(batch.candidates, streaming=True)
        pooled = ranker.pool(candidates)
        layout = CandidateLayout.of(torch.from_numpy(batch.request_index), batch.num_requests)
        first = ranker.network.first_pass(state, pooled, candidates.counters, layout)
        full = ranker.network.full_pass(state, pooled, candidates.counters, None, None, layout)
        parts.append(torch.cat([first, full], dim=1).numpy())
    return [row.tobytes() for row in np.concatenate(parts)]


def with_other_future(dataset: Dataset, now_s: int, seed: int) -> Dataset:
    """Return the data set with everything from a second on altered: items, ratings, times, events less and more.

    The events of the second itself keep user, item and time, so that they are rows of both; all else of them changes.
    """
    log, random = dataset.log, np.random.default_rng(seed)
    past, present = log.timestamp_s < now_s, log.timestamp_s == now_s
    future = np.flatnonzero((log.timestamp_s > now_s) & (random.random(len(log)) < 0.7))
    extra = random.integers(0, len(log), 200)
    chosen = np.concatenate([np.flatnonzero(past), np.flatnonzero(present), future, extra])
    kept = int(past.sum())
    num_here = int(present.sum())
    columns = {
        name: getattr(log, name)[chosen].copy()
        for name in ("user_index", "item_id", "rating", "timestamp_s", "surface", "slot")
    }
    columns["rating"][kept:] = random.integers(1, 6, len(chosen) - kept)
    later = slice(kept + num_here, None)
    columns["item_id"][later] = random.permutation(columns["item_id"][later])
    columns["user_index"][later] = random.permutation(columns["user_index"][later])
    columns["timestamp_s"][later] = now_s + random.integers(0, 10_000, len(chosen) - kept - num_here)
    other = EventLog.build(EventColumns(**columns), log.num_users)
    return dataclasses.replace(dataset, log=other)


def rows_at(dataset: Dataset, now_s: int, like: Rows) -> Rows:
    """Return the rows of a log at a second which are those of ``like``, in the same order."""
    positions = np.flatnonzero(dataset.log.timestamp_s == now_s)
    found = dataset.log.rows(positions)
    keys = {(user, item): at for user, item, at in zip(found.user_index, found.item_id, positions, strict=True)}
    return dataset.log.rows(
        np.array([keys[pair] for pair in zip(like.user_index, like.item_id, strict=True)], np.int64)
    )


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_another_future_changes_no_score(data: st.DataObject) -> None:
    dataset = tiny_dataset()
    test = dataset.split.test
    now_s = int(test.timestamp_s[data.draw(st.integers(0, len(test) - 1))])
    rows = test.select(test.timestamp_s == now_s)
    other = with_other_future(dataset, now_s, data.draw(st.integers(0, 1_000)))
    assert scores(dataset, rows, "strict") == scores(other, rows_at(other, now_s, rows), "strict")


@pytest.mark.parametrize("mode", ["strict", "pub"])
def test_the_past_does_change_scores(mode: HistoryMode) -> None:
    """The other side: a score that depended on nothing would pass every leak test."""
    dataset = tiny_dataset()
    test = dataset.split.test
    now_s = int(test.timestamp_s[-1])
    rows = test.select(test.timestamp_s == now_s)
    other = with_other_future(dataset, now_s - 40_000, seed=1)
    kept = np.isin(rows.user_index.astype(np.int64), other.log.user_index)
    assert kept.any()
    log = other.log
    columns = {
        name: np.concatenate([getattr(log, name), getattr(rows, name)])
        for name in ("user_index", "item_id", "timestamp_s", "surface", "slot")
    }
    rating = np.concatenate([log.rating, np.full(len(rows), 3, np.uint8)])
    changed = dataclasses.replace(other, log=EventLog.build(EventColumns(rating=rating, **columns), log.num_users))
    assert scores(dataset, rows, mode) != scores(changed, rows_at(changed, now_s, rows), mode)
