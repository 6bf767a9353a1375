"""Stored rows: bytes, errors within what each type promises, FBGEMM's bits, files larger than 2**31 elements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from models.config import RowType
from models.embedding.quantized import StoredRows, row_bytes, row_length
from models.embedding.shard_tables import shard_tables
from shared.errors import WeightsError

TYPES: tuple[RowType, ...] = ("fp32", "fp16", "int8", "int4")
WEIGHTS = arrays(
    np.float32, st.tuples(st.integers(0, 6), st.sampled_from([2, 6, 8])), elements=st.floats(-9, 9, width=32)
)


def _weight(num_rows: int = 200, width: int = 32) -> np.ndarray:
    return np.random.default_rng(4).standard_normal((num_rows, width)).astype(np.float32)


@pytest.mark.parametrize(("row_type", "expected"), [("fp32", 256), ("fp16", 128), ("int8", 68), ("int4", 36)])
def test_bytes_of_a_row_of_64(row_type: RowType, expected: int) -> None:
    assert row_bytes(row_type, 64) == expected
    assert StoredRows.of(_weight(7, 64), row_type).num_bytes == 7 * expected


@pytest.mark.parametrize("row_type", TYPES)
@given(weight=WEIGHTS)
def test_errors_are_within_what_the_type_promises(row_type: RowType, weight: np.ndarray) -> None:
    found = StoredRows.of(weight, row_type).read(np.arange(len(weight)))
    assert found.dtype == np.float32
    assert found.shape == weight.shape
    error = np.abs(found.astype(np.float64) - weight)
    largest = np.abs(weight).max(axis=1, keepdims=True, initial=0)
    span = np.ptp(weight, axis=1, keepdims=True) if len(weight) else np.zeros((0, 1), np.float32)
    half, tiny = 2.0**-11, 2.0**-24  # fp16: relative rounding, and the smallest number
    limit = {
        "fp32": 0 * largest,
        "fp16": half * largest + tiny,
        # Half a step; the end that a rounded scale cuts off; the rounded bias; what is lost below fp16's smallest.
        "int8": span / 510 * (1 + 510 * half) + half * largest + 255 * tiny,
        "int4": span / 30 * (1 + 30 * half) + half * largest + 15 * tiny,
    }[row_type]
    assert (error <= limit * (1 + 1e-5)).all()


@pytest.mark.parametrize("row_type", TYPES)
@pytest.mark.parametrize("width", [2, 6, 32])
def test_fbgemm_reads_the_same_bits(row_type: RowType, width: int) -> None:
    stored = {"a": StoredRows.of(_weight(200, width), row_type), "b": StoredRows.of(_weight(3, width), "fp32")}
    ids = {"a": np.array([0, 199, 7, 7, 100]), "b": np.array([2])}
    got, expected = (shard_tables(stored, backend)(ids) for backend in ("fbgemm", "reference"))
    for name in stored:
        np.testing.assert_array_equal(got[name], expected[name])
        np.testing.assert_array_equal(expected[name], stored[name].read(ids[name]))


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")  # inside FBGEMM
@pytest.mark.parametrize("row_type", ["int8", "int4"])
def test_our_quantization_is_as_good_as_fbgemms(row_type: RowType) -> None:
    import torch
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.tbe.utils import quantize_embs

    weight = _weight()
    values, head = quantize_embs(torch.from_numpy(weight), SparseType.INT8 if row_type == "int8" else SparseType.INT4)
    theirs = StoredRows(row_type, 32, np.concatenate([head.numpy(), values.numpy()], axis=1))
    rows = np.arange(len(weight))
    errors = [np.square(stored.read(rows) - weight).mean() for stored in (StoredRows.of(weight, row_type), theirs)]
    assert errors[0] <= errors[1] * 1.001


def test_rows_that_are_constant_or_tiny_are_kept() -> None:
    weight = np.array([[0.5] * 4, [0.0] * 4, [-2.0] * 4, [0, 1e-9, 0, 0]], np.float32)
    for row_type in TYPES:
        np.testing.assert_allclose(StoredRows.of(weight, row_type).read(np.arange(4)), weight, atol=2e-9)


@pytest.mark.parametrize("row_type", TYPES)
@pytest.mark.parametrize(("start", "stop"), [(0, 32), (0, 8), (8, 20), (20, 32), (4, 4)])
def test_columns_and_rows_keep_their_values(row_type: RowType, start: int, stop: int) -> None:
    stored = StoredRows.of(_weight(), row_type)
    whole = stored.read(np.arange(200))
    np.testing.assert_array_equal(stored.columns(start, stop).read(np.arange(200)), whole[:, start:stop])
    np.testing.assert_array_equal(stored.rows(1, 3).read(np.arange(67)), whole[1::3])


def test_a_mapped_table_over_2_31_elements_is_read_right_at_its_end(tmp_path: Path) -> None:
    width, num_rows = 64, 2**25 + 3  # 2**31 + 192 elements of one byte and their heads; the file is sparse
    path = tmp_path / "rows"
    length = row_length("int8", width)
    last = StoredRows.of(_weight(1, width), "int8").data
    with path.open("wb") as file:
        file.truncate(num_rows * length)
        file.seek((num_rows - 1) * length)
        file.write(last.tobytes())
    assert path.stat().st_blocks * 512 < 2**20
    stored = StoredRows.mapped(path, "int8", width, num_rows)
    assert stored.is_mapped
    assert stored.data.size > 2**31
    rows = shard_tables({"t": stored}, "reference")({"t": np.array([num_rows - 1, 0, num_rows - 2])})["t"]
    np.testing.assert_array_equal(rows[0], StoredRows("int8", width, last).read(np.zeros(1, np.int64))[0])
    assert not rows[1:].any()


def test_a_mapped_table_reads_like_one_in_memory(tmp_path: Path) -> None:
    for row_type in TYPES:
        stored = StoredRows.of(_weight(), row_type)
        path = tmp_path / row_type
        path.write_bytes(stored.data.tobytes())
        mapped = StoredRows.mapped(path, row_type, 32, 200)
        rows = np.array([199, 0, 3, 3])
        np.testing.assert_array_equal(mapped.read(rows), stored.read(rows))


@pytest.mark.parametrize("row_type", TYPES)
def test_spilled_rows_read_the_same_and_leave_nothing_half_written(row_type: RowType, tmp_path: Path) -> None:
    stored = StoredRows.of(_weight(), row_type).rows(1, 2)
    path = tmp_path / "new" / "rows"
    for _ in range(2):  # the second time over the first
        mapped = stored.spilled(path)
        assert mapped.is_mapped
        np.testing.assert_array_equal(mapped.read(np.arange(100)), stored.read(np.arange(100)))
    assert [file.name for file in path.parent.iterdir()] == ["rows"]
    with pytest.raises(WeightsError, match="cannot write"):
        stored.spilled(path / "below-a-file")
    with pytest.raises(WeightsError, match="which needs backend reference"):
        shard_tables({"t": mapped}, "fbgemm")
    assert not stored.rows(100, 1).spilled(path).is_mapped  # no rows, no file


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"0" * 99)
    with pytest.raises(WeightsError, match=r"must have 100 bytes .* has 99"):
        StoredRows.mapped(tmp_path / "short", "fp32", 5, 5)
    with pytest.raises(WeightsError, match="cannot map"):
        StoredRows.mapped(tmp_path / "absent", "fp32", 5, 5)
    with pytest.raises(WeightsError, match=r"must be uint8 \[rows, 20\], are float32"):
        StoredRows("int8", 16, _weight(2, 20))
    with pytest.raises(ValueError, match="must be even, is 3"):
        StoredRows.of(_weight(2, 3), "int4")
    with pytest.raises(ValueError, match="even places, are 1 to 4"):
        StoredRows.of(_weight(2, 4), "int4").columns(1, 4)
    for value in (np.nan, np.inf, 7e4):
        with pytest.raises(WeightsError, match="must be finite"):
            StoredRows.of(np.full((1, 2), value, np.float32), "int8")
