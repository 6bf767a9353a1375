"""Buckets and dense features of a history: batched equals alone, gaps 0 and 1 alike, padding unseen."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.inputs import (
    BEGINNING_BUCKET,
    COUNTER_FEATURES,
    DENSE_FEATURES,
    NUM_GAP_BUCKETS,
    NUM_WEIGHT_BUCKETS,
    RequestInputs,
    counter_features,
    gap_buckets,
    rates,
    request_inputs,
    weight_buckets,
    window_start,
)


@given(st.integers(0, 2**40))
def test_gap_bucket_is_two_an_octave(gap_s: int) -> None:
    bucket = int(gap_buckets(np.array([gap_s]))[0])
    if gap_s <= 1:
        assert bucket == 0
    else:
        # Bucket b starts at 2 ** ((b + 1) / 2) seconds.
        assert bucket <= max(2 * math.log2(gap_s) - 1 + 1e-9, 0) or bucket == 0
        assert bucket == NUM_GAP_BUCKETS - 1 or 2 ** ((bucket + 2) / 2) > gap_s - 1


def test_gap_buckets_never_fall_and_end_at_the_last() -> None:
    buckets = gap_buckets(2 ** np.arange(41, dtype=np.int64))
    assert buckets[0] == 0
    assert (np.diff(buckets) >= 0).all()
    assert buckets[-1] == NUM_GAP_BUCKETS - 1


@given(st.floats(0, 1e6, width=32))
def test_weight_bucket_is_the_nearest_half_point(weight: float) -> None:
    bucket = int(weight_buckets(np.array([weight], np.float32))[0])
    assert 0 <= bucket < NUM_WEIGHT_BUCKETS
    assert abs(min(weight, 5.0) - bucket / 2) <= 0.25


_RATES = np.linspace(0.1, 0.9, 2_000, dtype=np.float32).reshape(1_000, 2)


def _inputs(lengths: list[int], width: int, seed: int) -> RequestInputs:
    random = np.random.default_rng(seed)
    batch = len(lengths)
    mask = np.arange(width) >= width - np.array(lengths)[:, None]
    return request_inputs(
        feature_rows=np.zeros((batch, 2), np.int64),
        item_rows=random.integers(1, 9, (batch, width)),
        weights=random.integers(1, 6, (batch, width)).astype(np.float32),
        timestamps_s=np.sort(random.integers(0, 10_000, (batch, width)), axis=1),
        mask=mask,
        num_total=np.array(lengths, np.int64) + 2,
        as_of_s=np.full(batch, 12_000, np.int64),
        num_events=4,
        window_step=2,
        item_rates=_RATES,
    )


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 2**31))
def test_padding_changes_nothing(lengths: list[int], seed: int) -> None:
    padded = _inputs(lengths, 6, seed)
    random = np.random.default_rng(seed)
    batch = len(lengths)
    items = random.integers(1, 9, (batch, 6))
    weights = random.integers(1, 6, (batch, 6)).astype(np.float32)
    times = np.sort(random.integers(0, 10_000, (batch, 6)), axis=1)
    for index, length in enumerate(lengths):
        own = (slice(index, index + 1), slice(6 - length, 6))
        alone = request_inputs(
            np.zeros((1, 2), np.int64),
            items[own],
            weights[own],
            times[own],
            np.ones((1, length), np.bool_),
            np.array([length + 2], np.int64),
            np.array([12_000], np.int64),
            4,
            2,
            _RATES,
        )
        kept = int(alone.mask.sum())
        np.testing.assert_allclose(alone.dense[0], padded.dense[index], rtol=1e-6)
        for name in ("taste_rows", "taste_weights"):
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(padded, name)[index, 6 - length :])
            assert not getattr(padded, name)[index, : 6 - length].any()
        for name in ("item_rows", "weight_buckets", "pause_buckets", "clock", "log_gaps", "mask"):
            np.testing.assert_array_equal(getattr(alone, name)[0, :kept], getattr(padded, name)[index, :kept])
            assert not getattr(padded, name)[index, kept:].any() or name == "clock"


@given(st.integers(0, 200), st.integers(1, 20), st.integers(1, 30))
def test_a_window_loses_its_oldest_events_in_whole_steps(num_total: int, num_events: int, step: int) -> None:
    starts = window_start(np.arange(num_total, num_total + step + 1), num_events, step)
    assert (starts % step == 0).all()
    left = np.arange(num_total, num_total + step + 1) - starts
    assert (left <= num_events).all()
    assert (left > num_events - step).all() or not starts[0]
    # Of as many histories in a row as a step has, all but one have the window of the one before.
    assert np.count_nonzero(np.diff(starts)) <= 1


def test_events_that_count_are_the_newest_in_order_of_time() -> None:
    inputs = request_inputs(
        np.zeros((1, 1), np.int64),
        np.array([[1, 2, 3, 4, 5, 6, 7]]),
        np.full((1, 7), 3.0, np.float32),
        np.array([[10, 20, 25, 30, 95, 100, 160]]),
        np.ones((1, 7), np.bool_),
        np.array([7]),
        np.array([200]),
        num_events=6,
        window_step=2,
        item_rates=_RATES,
    )
    assert inputs.item_rows.tolist() == [[3, 4, 5, 6, 7, 0]]
    assert inputs.mask.tolist() == [[True] * 5 + [False]]
    np.testing.assert_allclose(inputs.clock[0, :3], [0.0, math.log1p(5 / 60), math.log1p(5 / 60) + math.log1p(65 / 60)])
    np.testing.assert_allclose(inputs.log_gaps[0, :5], np.log1p([175, 170, 105, 100, 40]))
    assert inputs.pause_buckets[0, 0] == BEGINNING_BUCKET
    assert inputs.pause_buckets[0, 1:5].tolist() == gap_buckets(np.array([5, 65, 5, 60])).tolist()


@pytest.mark.parametrize("gap_s", [0, 1])
def test_an_event_of_the_same_second_looks_like_one_a_second_old(gap_s: int) -> None:
    def at(gap: int) -> RequestInputs:
        return request_inputs(
            np.zeros((1, 1), np.int64),
            np.ones((1, 1), np.int64),
            np.ones((1, 1), np.float32),
            np.array([[1_000]]),
            np.ones((1, 1), np.bool_),
            np.ones(1, np.int64),
            np.array([1_000 + gap]),
            1,
            1,
            _RATES,
        )

    for field in dataclasses.fields(RequestInputs):
        if field.name == "log_gaps":
            continue
        np.testing.assert_array_equal(getattr(at(gap_s), field.name), getattr(at(1), field.name))


def test_taste_is_what_an_event_was_worth_beyond_the_usual_of_its_user() -> None:
    def weights(*given: float) -> list[float]:
        inputs = request_inputs(
            np.zeros((1, 1), np.int64),
            np.arange(1, len(given) + 1)[None],
            np.array([given], np.float32),
            np.arange(len(given))[None],
            np.ones((1, len(given)), np.bool_),
            np.array([len(given)]),
            np.array([100]),
            num_events=2,
            window_step=1,
            item_rates=_RATES,
        )
        assert inputs.taste_rows.tolist() == [list(range(1, len(given) + 1))]
        found: list[float] = inputs.taste_weights[0].tolist()
        return found

    # Five events of 3.6 are the prior: (15 + 18) / 10 = 3.3 is usual.
    assert weights(5.0, 1.0, 3.0, 3.0, 3.0) == pytest.approx([w / math.sqrt(10) for w in (1.7, -2.3, -0.3, -0.3, -0.3)])
    assert weights(5.0)[0] > 0 > weights(1.0)[0]
    many = weights(*[1.0, 5.0] * 499)
    assert sum(w * w for w in many) == pytest.approx(4.0, rel=0.02)


def test_surprise_is_zero_for_a_user_who_clicks_as_all_do_and_has_the_sign_of_the_difference() -> None:
    def surprises(*given: float) -> list[float]:
        inputs = request_inputs(
            np.zeros((1, 1), np.int64),
            np.ones((1, len(given)), np.int64),
            np.array([given], np.float32),
            np.arange(len(given))[None],
            np.ones((1, len(given)), np.bool_),
            np.array([len(given)]),
            np.array([100]),
            num_events=2,
            window_step=1,
            item_rates=np.array([[0.0, 0.0], [0.5, 0.25]], np.float32),
        )
        found: list[float] = inputs.dense[0, -2:].tolist()
        return found

    assert surprises(5.0, 4.0, 1.0, 2.0) == pytest.approx([0.0, 0.0])
    assert surprises(5.0) == pytest.approx([4 * 0.5 / 6, 4 * 0.75 / 6])
    assert surprises(4.0, 3.0, 3.0) == pytest.approx([4 * -0.5 / 8, 4 * -0.75 / 8])


def test_an_event_that_is_half_days_old_counts_half_in_the_surprises() -> None:
    day_s = 86_400

    def surprises(ages_days: list[int], given: list[float], half_days: float | None) -> list[float]:
        inputs = request_inputs(
            np.zeros((1, 1), np.int64),
            np.ones((1, len(given)), np.int64),
            np.array([given], np.float32),
            1_000 * day_s - np.array([ages_days]) * day_s,
            np.ones((1, len(given)), np.bool_),
            np.array([len(given)]),
            np.array([1_000 * day_s]),
            num_events=2,
            window_step=1,
            item_rates=np.array([[0.0, 0.0], [0.5, 0.25]], np.float32),
            surprise_half_days=half_days,
        )
        found: list[float] = inputs.dense[0, -2:].tolist()
        return found

    assert surprises([30, 0], [1.0, 5.0], None) == pytest.approx([0.0, 4 * 0.5 / 7])
    assert surprises([30, 0], [1.0, 5.0], 30.0) == pytest.approx([4 * 0.25 / 6.5, 4 * 0.625 / 6.5])
    assert surprises([90, 0], [1.0, 5.0], 30.0) == pytest.approx([4 * 0.375 / 6.25, 4 * 0.6875 / 6.25])
    assert surprises([0, 0], [1.0, 5.0], 30.0) == surprises([0, 0], [1.0, 5.0], None)


def test_an_item_without_events_has_even_odds() -> None:
    unseen, seen = rates(counter_features(*(np.array([0, count]) for count in (8, 6, 2))))
    assert unseen.tolist() == [0.5, 0.5]
    assert seen == pytest.approx([8 / 12, 4 / 12])


def test_empty_history_has_finite_features() -> None:
    inputs = _inputs([0], 3, 0)
    assert not inputs.mask.any()
    dense = dict(zip(DENSE_FEATURES, inputs.dense[0].tolist(), strict=True))
    assert dense.pop("log_num_total") > 0
    assert set(dense.values()) == {0.0}


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=5))
def test_counters_rise_with_the_rate_and_are_zero_for_the_unseen(items: list[tuple[int, float, float]]) -> None:
    events = np.array([0, *(count for count, _, _ in items)])
    clicks = np.array([0, *(round(count * share) for count, share, _ in items)])
    conversions = np.array([0, *(round(round(n * a) * b) for n, a, b in items)])
    features = counter_features(events, clicks, conversions)
    assert features.shape == (len(items) + 1, len(COUNTER_FEATURES))
    assert not features[0].any()
    more = counter_features(events + 1, clicks + 1, conversions + 1)
    assert (more > features).all()
