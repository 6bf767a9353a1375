"""The synthetic log: reproducible whatever the chunks, bounded, and true to its stated probabilities."""

from __future__ import annotations

import tracemalloc
from dataclasses import fields

import numpy as np
import numpy.typing as npt
import pytest
from pydantic import ValidationError

from training.data import (
    Dataset,
    HistoryReader,
    SyntheticChunk,
    SyntheticConfig,
    load_synthetic,
    request_batches,
    stream_events,
)

SMALL = SyntheticConfig(num_events=1_001, num_users=60, num_ads=40, num_groups=8)
WIDE = SyntheticConfig(num_events=40_000, num_users=500, num_ads=120, num_groups=20)

Columns = dict[str, npt.NDArray[np.generic]]


def _collect(config: SyntheticConfig, seed: int, chunk_events: int) -> Columns:
    chunks = list(stream_events(config, seed, chunk_events))
    assert all(len(chunk) == chunk_events for chunk in chunks[:-1])
    assert 1 <= len(chunks[-1]) <= chunk_events
    names = [field.name for field in fields(SyntheticChunk)]
    return {name: np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in names}


def _ne(probability: npt.NDArray[np.floating], label: npt.NDArray[np.bool_]) -> float:
    chance = probability.astype(np.float64)
    base = label.mean()
    loss = -np.where(label, np.log(chance), np.log1p(-chance)).mean()
    return float(loss / -(base * np.log(base) + (1 - base) * np.log1p(-base)))


@pytest.fixture(scope="module")
def wide() -> Dataset:
    """Return a log that is large enough to compare frequencies with probabilities."""
    return load_synthetic(WIDE, seed=3)


@pytest.mark.parametrize("chunk_events", [1, 7, 1_000, 1_001, 1_002, 10**6])
def test_chunk_size_does_not_change_the_stream(chunk_events: int) -> None:
    expected, found = _collect(SMALL, 5, 64), _collect(SMALL, 5, chunk_events)
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert len(found["item_id"]) == 1_001


def test_a_longer_log_begins_with_the_shorter_one() -> None:
    short, long = _collect(SMALL, 5, 64), _collect(SMALL.model_copy(update={"num_events": 1_500}), 5, 64)
    assert all(np.array_equal(short[name], long[name][:1_001]) for name in short)


def test_seeds_differ() -> None:
    assert not np.array_equal(_collect(SMALL, 5, 64)["item_id"], _collect(SMALL, 6, 64)["item_id"])


def test_a_chunk_needs_an_event() -> None:
    with pytest.raises(ValueError, match="at least 1, is 0"):
        next(stream_events(SMALL, 0, 0))


def test_impressions_come_in_time_user_item_order_as_whole_slates() -> None:
    stream = _collect(SMALL.model_copy(update={"num_events": 1_000}), 1, 100)
    keys = list(zip(*(stream[name].tolist() for name in ("timestamp_s", "user_index", "item_id")), strict=True))
    assert keys == sorted(set(keys))
    slates: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (at, user, _), slot, surface in zip(keys, stream["slot"].tolist(), stream["surface"].tolist(), strict=True):
        slates.setdefault((at, user), []).append((slot, surface))
    whole = list(slates.values())[:-1]  # the last one may be cut by the number of events
    assert all(sorted(slot for slot, _ in slate) == [0, 1, 2, 3] for slate in whole)
    assert all(len({surface for _, surface in slate}) == 1 for slate in whole)


def test_ids_are_those_of_catalog_and_users() -> None:
    dataset = load_synthetic(SMALL, seed=1)
    assert dataset.catalog.positions(dataset.log.item_id).max() < 40
    assert len(dataset.users) == dataset.log.num_users == 60
    assert set(dataset.catalog.group_id.tolist()) <= set(range(1, 9))
    assert dataset.catalog.genres(0)[0].capitalize() in dataset.catalog.title[0]
    assert set(np.unique(dataset.log.surface).tolist()) == {0, 1}
    assert set(dataset.users.profile(0)) == {"gender", "age", "occupation", "zip_code"}


def test_truth_goes_with_its_event() -> None:
    stream, dataset = _collect(SMALL, 2, 100), load_synthetic(SMALL, seed=2)
    assert dataset.truth is not None
    order = dataset.log.time_order
    for name in ("user_index", "item_id", "rating", "timestamp_s", "surface", "slot"):
        assert np.array_equal(getattr(dataset.log, name)[order], stream[name])
    assert np.array_equal(dataset.truth.click[order], stream["click_probability"])
    assert np.array_equal(dataset.truth.conversion[order], stream["conversion_probability"])


def test_labels_follow_the_truth(wide: Dataset) -> None:
    assert wide.truth is not None
    rows = wide.log.rows(np.arange(len(wide.log)))
    assert not (rows.conversion & ~rows.click).any()
    assert (wide.truth.conversion <= wide.truth.click).all()
    for probability, label in ((wide.truth.click, rows.click), (wide.truth.conversion, rows.conversion)):
        for part in np.array_split(np.argsort(probability), 8):
            expected = probability[part].astype(np.float64)
            deviation = np.sqrt((expected * (1 - expected)).sum())
            assert abs(label[part].sum() - expected.sum()) < 5 * deviation


def test_the_truth_is_the_best_prediction(wide: Dataset) -> None:
    assert wide.truth is not None
    rows = wide.split.test
    truth = wide.truth.click[rows.event_position].astype(np.float64)
    best = _ne(truth, rows.click)
    logits = np.log(truth) - np.log1p(-truth)
    worse = [1 / (1 + np.exp(-(logits + shift))) for shift in (-0.3, 0.3)]
    worse += [1 / (1 + np.exp(-scale * logits)) for scale in (0.7, 1.4)]
    assert 0.4 < best < 0.8
    assert all(_ne(prediction, rows.click) > best for prediction in worse)


def _spread_of_equal_impressions(dataset: Dataset) -> float:
    """Return the mean range of the true click probability among impressions equal but for the history."""
    log, truth = dataset.log, dataset.truth
    assert truth is not None
    order = np.lexsort((log.slot, log.surface, log.item_id, log.user_index))
    keys = np.stack([log.user_index, log.item_id, log.surface, log.slot])[:, order]
    starts = np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)))
    chance = truth.click[order]
    return float((np.maximum.reduceat(chance, starts) - np.minimum.reduceat(chance, starts)).max())


def test_only_the_history_weight_makes_the_history_matter(wide: Dataset) -> None:
    without = load_synthetic(WIDE.model_copy(update={"history_weight": 0.0}), seed=3)
    assert _spread_of_equal_impressions(without) == pytest.approx(0.0, abs=1e-6)
    assert _spread_of_equal_impressions(wide) > 0.3


def test_a_recent_click_on_the_topic_attracts(wide: Dataset) -> None:
    assert wide.truth is not None
    log, catalog = wide.log, wide.catalog
    topic = catalog.padded_genres()[:, 0]
    reader = HistoryReader(log, 4, "strict")  # the last request
    rows = log.rows(np.arange(len(log)))
    history = reader.read(rows)
    same = np.where(history.mask, topic[history.item_ids - 1], -1) == topic[rows.item_id - 1][:, None]
    clicked = (same & (history.ratings >= 4)).any(axis=1)
    passed = same.any(axis=1) & ~clicked
    # Compared within a user and topic, so that the taste is the same on both sides.
    pair = rows.user_index.astype(np.int64) * 100 + topic[rows.item_id - 1]
    means = [np.bincount(pair[part], wide.truth.click[part], minlength=50_000) for part in (clicked, passed)]
    counts = [np.bincount(pair[part], minlength=50_000) for part in (clicked, passed)]
    both = (counts[0] > 0) & (counts[1] > 0)
    gain = means[0][both] / counts[0][both] - means[1][both] / counts[1][both]
    assert gain.mean() > 0.1


def test_the_first_slot_and_search_are_worth_more(wide: Dataset) -> None:
    assert wide.truth is not None
    chance = wide.truth.click
    by_slot = [float(chance[wide.log.slot == slot].mean()) for slot in range(4)]
    assert by_slot == sorted(by_slot, reverse=True)
    assert by_slot[0] - by_slot[3] > 0.05
    assert chance[wide.log.surface == 1].mean() > chance[wide.log.surface == 0].mean() + 0.03


def test_requests_of_one_second_share_their_history(wide: Dataset) -> None:
    reader = HistoryReader(wide.log, 10, "strict")
    batches = list(request_batches(wide.split.valid, reader, 400))
    assert sum(batch.num_candidates for batch in batches) == len(wide.split.valid)
    requests = sum(batch.num_requests for batch in batches)
    assert len(wide.split.valid) / requests > 3.5


def test_memory_does_not_grow_with_the_number_of_events() -> None:
    def peak(num_events: int) -> int:
        config = WIDE.model_copy(update={"num_events": num_events})
        tracemalloc.start()
        for _ in stream_events(config, 0, 500):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(4_000)  # what a first pass allocates once and keeps is not the stream's
    assert peak(40_000) < 1.5 * peak(4_000)  # kept events alone would be ten times as many


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_ads": 3}, "num_ads must be at least slate_size 4, is 3"),
        ({"num_topics": 17}, "num_topics"),
        ({"num_events": 0}, "num_events"),
        ({"activity": 0.0}, "activity"),
        ({"history_decay": 1.0}, "history_decay"),
        ({"num_stars": 5}, "num_stars"),
    ],
)
def test_a_config_out_of_range_names_the_field(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SyntheticConfig.model_validate(change)
