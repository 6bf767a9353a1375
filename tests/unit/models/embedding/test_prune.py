"""Pruning: rows that stay read the same, rows that go read row 0, here and in FBGEMM."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.embedding.prune import Pruning, TouchCounts
from models.embedding.vocabulary import OOV_ROW, Vocabulary


def _touched(seed: int = 0, num_rows: int = 50) -> TouchCounts:
    touches = TouchCounts(num_rows)
    rng = np.random.default_rng(seed)
    for now_s in range(100, 110):
        touches.touch(rng.integers(0, num_rows, 12), now_s)
    return touches


def test_touches_count_repeats_and_keep_the_newest_time() -> None:
    touches = TouchCounts(4)
    touches.touch(np.array([[1, 1], [3, 1]]), 10)
    touches.touch(np.array([3]), 7)
    touches.touch(np.array([], np.int64), 99)
    assert touches.counts.tolist() == [0, 3, 0, 2]
    assert touches.last_s[[1, 3]].tolist() == [10, 10]


@given(st.integers(0, 100), st.integers(0, 6), st.one_of(st.none(), st.integers(0, 12)))
def test_kept_rows_read_the_same_and_dropped_ones_row_0(seed: int, count_min: int, age_s_max: int | None) -> None:
    touches = _touched(seed)
    pruning = Pruning.of(touches, count_min=count_min, age_s_max=age_s_max, now_s=110)
    weight = np.random.default_rng(seed).standard_normal((50, 4)).astype(np.float32)
    small = pruning.table(weight)
    for row in range(50):
        stays = touches.counts[row] >= count_min and (age_s_max is None or touches.last_s[row] >= 110 - age_s_max)
        expected = row if stays or row == OOV_ROW else OOV_ROW
        np.testing.assert_array_equal(small[pruning.new_rows[row]], weight[expected])
    assert len(small) == len(pruning.kept) == pruning.new_rows.max() + 1


def test_limits_are_inclusive() -> None:
    touches = TouchCounts(4)
    touches.touch(np.array([1, 1, 2]), 100)
    assert Pruning.of(touches, count_min=2).kept.tolist() == [0, 1]
    assert Pruning.of(touches, count_min=1, age_s_max=5, now_s=105).kept.tolist() == [0, 1, 2]
    assert Pruning.of(touches, count_min=1, age_s_max=5, now_s=106).kept.tolist() == [0]
    assert Pruning.of(touches, count_min=0).kept.tolist() == [0, 1, 2, 3]


def test_fbgemm_takes_the_map_and_reads_the_same() -> None:
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

    pruning = Pruning.of(_touched(), count_min=3)
    assert 1 < len(pruning.kept) < 40
    weight = np.random.default_rng(1).standard_normal((50, 8)).astype(np.float32)
    small = pruning.table(weight)
    tables = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("t", len(small), 8, SparseType.FP32, EmbeddingLocation.HOST)],
        index_remapping=[torch.from_numpy(pruning.new_rows.astype(np.int32))],
        pooling_mode=PoolingMode.SUM,
        output_dtype=SparseType.FP32,
        device="cpu",
        row_alignment=1,
    )
    tables.initialize_weights()
    tables.assign_embedding_weights([(torch.from_numpy(small).view(torch.uint8), None)])
    rows = torch.arange(50, dtype=torch.int32)
    found = tables(rows, torch.arange(51, dtype=torch.int32)).numpy()
    np.testing.assert_array_equal(found, small[pruning.new_rows])


def test_the_vocabulary_forgets_dropped_keys() -> None:
    keys = np.array([-9, 4, 70, 80], np.int64)
    rows = np.array([3, 1, 2, 4], np.int64)
    touches = TouchCounts(5)
    touches.touch(np.array([3, 2]), 0)
    pruning = Pruning.of(touches)
    found = pruning.vocabulary(keys, rows)
    assert isinstance(found, Vocabulary)
    assert found.rows(np.array([-9, 4, 70, 80])).tolist() == [2, OOV_ROW, 1, OOV_ROW]


def test_what_does_not_fit_is_refused() -> None:
    touches = TouchCounts(4)
    for rows in ([4], [-1]):
        with pytest.raises(ValueError, match=r"rows must be in \[0, 4\)"):
            touches.touch(np.array(rows), 0)
    with pytest.raises(ValueError, match="count_min must be at least 0, is -1"):
        Pruning.of(touches, count_min=-1)
    with pytest.raises(ValueError, match="now_s must be given"):
        Pruning.of(touches, age_s_max=1)
    with pytest.raises(ValueError, match="must have 4 rows, has 3"):
        Pruning.of(touches).table(np.zeros((3, 2), np.float32))
