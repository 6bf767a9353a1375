"""The length benchmark trains and measures at every length, none among them; its batches lose and mix up nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.models.length import (
    by_length,
    chances_at,
    drawn_batches,
    figures,
    ne,
    ne_change,
    num_earlier,
    train_on_drawn_lengths,
)
from models.random_weights import TINY
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import TrainConfig
from training.data import request_starts

_CONFIG = TrainConfig(name="tiny", dataset="synthetic", threads=1, batch_rows=64, train_share=0.1, model=TINY)


@pytest.mark.parametrize("lengths", [(0,), (0, 5, 10)])
def test_a_ranker_without_history_is_trained_and_measured(lengths: tuple[int, ...]) -> None:
    dataset = tiny_dataset()
    unspeculative = _CONFIG.speculative.model_copy(update={"batch_share": 0.0})
    config = _CONFIG.model_copy(update={"speculative": unspeculative})
    model = train_on_drawn_lengths(config, dataset, lengths)
    test = dataset.split.test
    chances = chances_at(model, dataset, dataset.split.valid, test, lengths[-1])
    assert len(chances) == len(test)
    assert np.isfinite(ne(chances, test))


def test_batches_are_all_rows_once_in_whole_requests_of_similar_length() -> None:
    dataset = tiny_dataset()
    rows = dataset.split.train.select(slice(0, 2_000))
    batches = list(drawn_batches(dataset, rows, (3, 100), 64, np.random.default_rng(0)))
    assert sorted(np.concatenate([part.event_position for part, _ in batches])) == sorted(rows.event_position)
    spread = []
    for part, drawn in batches:
        starts = request_starts(part)
        assert len(starts) == len(drawn)
        assert set(drawn.tolist()) <= {3, 100}
        found = np.minimum(num_earlier(dataset, part)[starts], drawn)
        spread.append(float(found.max() - found.min()))
    earlier = num_earlier(dataset, rows)
    assert np.mean(spread) < 0.3 * min(float(earlier.max()), 100.0)


def test_requests_sorted_by_length_are_put_back() -> None:
    dataset = tiny_dataset()
    rows = dataset.split.test.select(slice(0, 500))
    ordered, places = by_length(dataset, rows)
    lengths = num_earlier(dataset, ordered)
    assert all(a <= b for a, b in itertools.pairwise(lengths.tolist()))
    assert rows.event_position[places].tolist() == ordered.event_position.tolist()
    assert sorted(places.tolist()) == list(range(500))


def test_a_change_is_the_difference_of_the_ne_and_its_error_counts_users_not_rows() -> None:
    rows = tiny_dataset().split.test.select(slice(0, 400))
    random = np.random.default_rng(0)
    before, after = random.uniform(0.2, 0.8, (2, len(rows)))
    change, error = ne_change(before, after, rows)
    assert change == pytest.approx(ne(after, rows) - ne(before, rows))
    twice = rows.select(np.repeat(np.arange(len(rows)), 2))
    again, same = ne_change(np.repeat(before, 2), np.repeat(after, 2), twice)
    assert again == pytest.approx(change)
    assert same == pytest.approx(error)


def test_users_are_measured_apart_by_how_many_events_they_have() -> None:
    rows = tiny_dataset().split.test.select(slice(0, 300))
    events = np.repeat(np.array([50, 200, 400], np.int64), 100)
    good = np.where(rows.click, 0.9, 0.1)
    flat = np.full(300, 0.5)
    chances = {10: flat, 30: np.where(events == 400, good, flat)}
    found = {each.metric: each for each in figures("alike", chances, rows, events, {})}
    assert found["ne_30_users_300_on"].value < found["ne_10_users_300_on"].value
    assert found["ne_30_users_0_100"].value == found["ne_10_users_0_100"].value
    assert found["ne_30"].params["share_of_rows_with_as_many"] == 1.0
    assert found["power_law_exponent"].value > 0
    assert figures("aged", chances, rows, events, {})[0].metric == "ne_10_aged"
