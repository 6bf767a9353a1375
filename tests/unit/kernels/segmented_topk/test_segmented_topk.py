"""The O(N) path against the plain sort: odd sizes, empty segments, NaN, ties, k beyond the segment."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.backends import BackendUnavailableError
from kernels.segmented_topk import segmented_topk
from tests.unit.kernels.native.support import require_native

# Few distinct values, so that ties are the rule; both zeros, infinities and NaN among them.
_VALUES = st.sampled_from([0.0, -0.0, 1.0, 2.0, 2.5, -3.0, float("inf"), -float("inf"), float("nan")])
_SEGMENTS = st.lists(st.lists(_VALUES, max_size=17), max_size=6)


def _jagged(segments: list[list[float]]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    values = np.array([value for segment in segments for value in segment], np.float32)
    offsets = np.cumsum([0, *(len(segment) for segment in segments)], dtype=np.int64)
    return values, offsets


@settings(max_examples=200, deadline=None)
@given(_SEGMENTS, st.integers(0, 20), st.booleans(), st.randoms(use_true_random=False))
def test_cpu_equals_reference(segments: list[list[float]], k: int, with_keys: bool, random: Any) -> None:
    values, offsets = _jagged(segments)
    keys = np.array([random.randrange(-3, 4) for _ in values], np.int64) if with_keys else None
    expected = segmented_topk(values, offsets, k, tie_keys=keys, backend="reference")
    found = segmented_topk(values, offsets, k, tie_keys=keys)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(_VALUES, max_size=17), min_size=9, max_size=40), st.integers(0, 20))
def test_cpu_equals_reference_for_many_segments_at_once(segments: list[list[float]], k: int) -> None:
    values, offsets = _jagged(segments)
    expected = segmented_topk(values, offsets, k, backend="reference")
    found = segmented_topk(values, offsets, k)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("size", [1, 2, 31, 255, 1000])
@pytest.mark.parametrize("k", [1, 7, 255, 5000])
def test_cpu_equals_reference_on_larger_segments(size: int, k: int) -> None:
    random = np.random.default_rng(size * 31 + k)
    values = np.round(random.normal(size=3 * size), 1).astype(np.float32)
    values[random.random(len(values)) < 0.05] = np.nan
    offsets = np.array([0, size, size, 3 * size], np.int64)
    keys = random.integers(-5, 5, len(values))
    for given_keys in (None, keys):
        expected = segmented_topk(values, offsets, k, tie_keys=given_keys, backend="reference")
        found = segmented_topk(values, offsets, k, tie_keys=given_keys)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("lengths", "k"), [([1], 1), ([0, 7, 3, 0], 2), ([300, 20], 9), ([5000, 1, 4097], 4100), ([9], 0), ([], 3)]
)
@pytest.mark.parametrize("with_keys", [False, True])
def test_triton_equals_reference(lengths: list[int], k: int, with_keys: bool) -> None:
    random = np.random.default_rng(sum(lengths) + k)
    size = sum(lengths)
    # Few distinct values: the threshold is a tie, over several blocks of the long segments.
    values = random.choice(np.array([0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan], np.float32), size)
    values[: size // 3] = random.normal(size=size // 3).astype(np.float32)
    limits = np.iinfo(np.int64)
    keys = random.choice(np.array([limits.min, -(2**40), -1, 0, 1, 255, 256, 2**33, limits.max]), size)
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    given = keys if with_keys else None
    expected = segmented_topk(values, offsets, k, tie_keys=given, backend="reference")
    found = segmented_topk(values, offsets, k, tie_keys=given, backend="triton")
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.interpret
def test_triton_key_orders_neighbouring_numbers() -> None:
    edges = np.array([0.0, 1e-45, 1.0, 2.0, 3.4e38], np.float32)
    values = np.concatenate([edges, np.nextafter(edges, np.float32(np.inf)), -edges])
    found = segmented_topk(values, np.array([0, len(values)]), len(values), backend="triton")
    expected = segmented_topk(values, np.array([0, len(values)]), len(values), backend="reference")
    np.testing.assert_array_equal(found[0], expected[0])
    for k in range(1, len(values)):
        best = segmented_topk(values, np.array([0, len(values)]), k, backend="triton")[0]
        np.testing.assert_array_equal(best, expected[0][:k])


def test_triton_is_not_replaced_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match="needs tensors on a GPU"):
        segmented_topk(np.zeros(1, np.float32), np.array([0, 1]), 1, backend="triton")


def test_order_is_value_then_key_then_index_with_nan_last() -> None:
    values = np.array([np.nan, 2.0, -np.inf, 2.0, 5.0, 2.0], np.float32)
    keys = np.array([0, 9, 0, 3, 0, 9], np.int64)
    indices, offsets = segmented_topk(values, np.array([0, 6]), 6, tie_keys=keys)
    assert indices.tolist() == [4, 3, 1, 5, 2, 0]
    assert offsets.tolist() == [0, 6]


def test_ties_at_the_threshold_go_to_the_smaller_key() -> None:
    values = np.ones(5, np.float32)
    keys = np.array([5, 4, 3, 2, 1], np.int64)
    assert segmented_topk(values, np.array([0, 5]), 2, tie_keys=keys)[0].tolist() == [4, 3]
    assert segmented_topk(values, np.array([0, 5]), 2)[0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("values", "offsets", "k", "keys", "message"),
    [
        (np.zeros(2), [0, 2], 1, None, "values must be float32"),
        (np.zeros((2, 1), np.float32), [0, 2], 1, None, "values must be float32"),
        (np.zeros(2, np.float32), [0, 3], 1, None, "offsets must be"),
        (np.zeros(2, np.float32), [1, 2], 1, None, "offsets must be"),
        (np.zeros(2, np.float32), [0, 2, 1, 2], 1, None, "offsets must not decrease"),
        (np.zeros(2, np.float32), [0, 2], -1, None, "k must be at least 0"),
        (np.zeros(2, np.float32), [0, 2], 1.5, None, "k must be at least 0 and whole, is 1.5"),
        (np.zeros(2, np.float32), [0, 2], float("nan"), None, "k must be at least 0 and whole, is nan"),
        (np.zeros(2, np.float32), [0.0, 2.0], 1, None, "offsets must be integers"),
        (np.zeros(2, np.float32), [0, 2], 1, np.zeros(3, np.int64), "tie_keys must be"),
    ],
)
def test_bad_input_is_refused(values: Any, offsets: list[int], k: int, keys: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        segmented_topk(values, np.array(offsets), k, tie_keys=keys)


@pytest.mark.parametrize("backend", ["reference", "cpu", "native"])
def test_more_than_there_are_is_all_of_them_however_many(backend: Any) -> None:
    if backend == "native":
        require_native()
    found, ends = segmented_topk(np.array([1, 3], np.float32), np.array([0, 2]), 10**30, backend=backend)
    assert (found.tolist(), ends.tolist()) == ([1, 0], [0, 2])


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend must be one of"):
        segmented_topk(np.zeros(1, np.float32), np.array([0, 1]), 1, backend="cuda")  # type: ignore[arg-type]
