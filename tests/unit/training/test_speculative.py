"""Stale embeddings know nothing of their own time; means over earlier requests never see their own or a later one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.schema.speculative import HitLevel
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import SpeculativeTrainingConfig
from training.data import HistoryReader, RequestBatch, request_batches
from training.speculative import cache_answer, earlier_means, stale_batch

_READER = HistoryReader(tiny_dataset().log, 8, "strict", align="right")


def _batch() -> RequestBatch:
    return list(request_batches(tiny_dataset().split.train, _READER, 200))[5]


@given(st.integers(1, 12), st.integers(0, 2**31))
def test_stale_batch_is_the_past_of_the_batch(events_max: int, seed: int) -> None:
    batch = _batch()
    stale = stale_batch(batch, _READER, events_max, np.random.default_rng(seed))
    before, after = batch.history, stale.history
    assert (stale.timestamp_s <= batch.timestamp_s).all()
    for request in range(len(before)):
        now_s = stale.timestamp_s[request]
        assert (after.timestamps_s[request][after.mask[request]] < now_s).all()
        unseen = before.num_total[request] - after.num_total[request]
        assert unseen >= 1 or not before.lengths[request]
        # What is gone is not earlier than the new time.
        gone = before.timestamps_s[request][before.mask[request]] >= now_s
        assert gone.sum() == min(unseen, before.lengths[request])
    np.testing.assert_array_equal(stale.request_index, batch.request_index)


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


def test_a_request_without_history_stays_as_it_is() -> None:
    log = tiny_dataset().log
    firsts = log.rows(log.user_offsets[:-1][np.diff(log.user_offsets) > 0])
    batch = next(request_batches(firsts.select(np.argsort(firsts.timestamp_s, kind="stable")), _READER, 50))
    assert not batch.history.mask.any()
    stale = stale_batch(batch, _READER, 4, np.random.default_rng(0))
    np.testing.assert_array_equal(stale.timestamp_s, batch.timestamp_s)
    assert not stale.history.mask.any()
