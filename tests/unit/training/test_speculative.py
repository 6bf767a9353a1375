"""Stale embeddings know nothing of their own time; means over earlier requests never see their own or a later one."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.schema.speculative import HitLevel
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import SpeculativeTrainingConfig
from training.data import HistoryReader, RequestBatch, request_batches
from training.speculative import cache_answer, earlier_means, stale_batch


def _batch(mode: str = "strict") -> RequestBatch:
    dataset = tiny_dataset()
    reader = HistoryReader(dataset.log, 8, mode)  # type: ignore[arg-type]
    return list(request_batches(dataset.split.train, reader, 200))[5]


@given(st.integers(1, 12), st.integers(0, 2**31))
def test_stale_batch_is_the_past_of_the_batch(events_max: int, seed: int) -> None:
    batch = _batch()
    stale = stale_batch(batch, events_max, np.random.default_rng(seed))
    before, after = batch.history, stale.history
    assert (stale.timestamp_s <= batch.timestamp_s).all()
    for request in range(len(before)):
        length, left = int(before.lengths[request]), int(after.lengths[request])
        assert left < length or length == 0
        assert (after.timestamps_s[request, :left] < stale.timestamp_s[request]).all()
        # What is left is a prefix, and what is gone is not earlier than the new time.
        assert after.mask[request].tolist() == [column < left for column in range(8)]
        assert (before.timestamps_s[request, left:length] >= stale.timestamp_s[request]).all()
        assert after.num_total[request] == before.num_total[request] - (length - left)


_ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 9)), min_size=1, max_size=30)


@given(_ROWS)
def test_earlier_means_equal_a_loop(rows: list[tuple[int, int, int]]) -> None:
    rows = sorted(rows, key=lambda row: row[2])
    users, groups, requests = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    vectors = np.random.default_rng(0).normal(size=(len(rows), 3)).astype(np.float32)
    means, has = earlier_means(vectors, users, groups, requests)
    for row in range(len(rows)):
        earlier = (users == users[row]) & (groups == groups[row]) & (requests < requests[row])
        assert has[row] == earlier.any()
        expected = vectors[earlier].mean(axis=0) if earlier.any() else np.zeros(3)
        np.testing.assert_allclose(means[row], expected, atol=1e-6)


def test_levels_follow_the_shares_and_vectors_follow_the_levels() -> None:
    batch = _batch()
    embeddings = np.random.default_rng(1).normal(size=(batch.num_candidates, 4)).astype(np.float32)
    groups = batch.candidates.item_id % 3
    config = SpeculativeTrainingConfig(exact_share=0.5, user_share=0.5)
    answer = cache_answer(embeddings, batch, groups, config, np.random.default_rng(2))
    means, has = earlier_means(embeddings, batch.user_index[batch.request_index], groups, batch.request_index)
    exact, user, none = (answer.levels == level for level in (HitLevel.EXACT, HitLevel.USER_AGGREGATE, HitLevel.NONE))
    assert 0.3 < exact.mean() < 0.7
    assert user.any()
    np.testing.assert_array_equal(answer.vectors[exact], embeddings[exact])
    np.testing.assert_array_equal(answer.vectors[user], means[user])
    assert not answer.vectors[none].any()
    assert (none <= (~has | exact | none)).all()
    assert not (user & ~has).any()


def test_no_share_means_no_embedding() -> None:
    batch = _batch()
    config = SpeculativeTrainingConfig(exact_share=0.0, user_share=0.0)
    vectors = np.ones((batch.num_candidates, 4), np.float32)
    answer = cache_answer(vectors, batch, batch.candidates.item_id, config, np.random.default_rng(3))
    assert not answer.vectors.any()
    assert not answer.levels.any()


def test_a_batch_without_history_stays_as_it_is() -> None:
    batch = _batch()
    history = dataclasses.replace(
        batch.history, mask=np.zeros_like(batch.history.mask), lengths=np.zeros_like(batch.history.lengths)
    )
    empty = dataclasses.replace(batch, history=history)
    stale = stale_batch(empty, 4, np.random.default_rng(0))
    np.testing.assert_array_equal(stale.timestamp_s, batch.timestamp_s)
    assert not stale.history.mask.any()
