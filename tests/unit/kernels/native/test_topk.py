"""Native radix selection against the plain sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.native import segmented_topk
from kernels.segmented_topk.reference import segmented_topk_reference
from tests.unit.kernels.native.support import require_native

_SPECIAL = [0.0, -0.0, 1.0, 1.0000001, 2.5, -3.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45]


@pytest.fixture(autouse=True)
def _native() -> None:
    require_native()


def _check(values: npt.NDArray[np.float32], offsets: npt.NDArray[np.int64], k: int, keys: Any) -> None:
    expected = segmented_topk_reference(values, offsets, k, keys)
    found = segmented_topk(values, offsets, k, keys)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from(_SPECIAL), max_size=17), max_size=6),
    st.integers(0, 20),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_equals_the_sort(segments: list[list[float]], k: int, with_keys: bool, random: Any) -> None:
    require_native()
    values = np.array([value for segment in segments for value in segment], np.float32)
    offsets = np.cumsum([0, *(len(segment) for segment in segments)], dtype=np.int64)
    keys = np.array([random.randrange(-3, 4) for _ in values], np.int64) if with_keys else None
    _check(values, offsets, k, keys)


# Long enough for the radix passes; each kind of value ends in another pass.
def _spread(random: np.random.Generator, size: int) -> npt.NDArray[np.float32]:
    return random.normal(size=size).astype(np.float32)


def _one_bucket(random: np.random.Generator, size: int) -> npt.NDArray[np.float32]:
    return (1 + random.integers(0, 1 << 20, size) * 2.0**-23).astype(np.float32)


def _last_bits(random: np.random.Generator, size: int) -> npt.NDArray[np.float32]:
    return (1 + random.integers(0, 700, size) * 2.0**-23).astype(np.float32)


def _ties(random: np.random.Generator, size: int) -> npt.NDArray[np.float32]:
    return random.choice(np.array(_SPECIAL, np.float32), size)


def _equal(random: np.random.Generator, size: int) -> npt.NDArray[np.float32]:
    return np.full(size, np.nan if random.integers(2) else -2.0, np.float32)


@pytest.mark.parametrize("make", [_spread, _one_bucket, _last_bits, _ties, _equal])
@pytest.mark.parametrize("k", [1, 100, 1999, 2000, 5000])
@pytest.mark.parametrize("with_keys", [False, True])
def test_equals_the_sort_on_long_segments(make: Any, k: int, with_keys: bool) -> None:
    random = np.random.default_rng(k)
    offsets = np.array([0, 2000, 2000, 2513, 3000], np.int64)
    values = make(random, 3000)
    _check(values, offsets, k, random.integers(-9, 9, 3000) if with_keys else None)


def test_many_segments_on_several_threads() -> None:
    random = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(random.integers(0, 900, 12))]).astype(np.int64)
    _check(random.normal(size=int(offsets[-1])).round(1).astype(np.float32), offsets, 50, None)


@pytest.mark.parametrize(
    ("values", "offsets", "k", "keys", "message"),
    [
        (np.zeros(2), [0, 2], 1, None, "values must be float32"),
        (np.zeros(2, np.float32), [0, 3], 1, None, "offsets must ascend from 0 to 2"),
        (np.zeros(2, np.float32), [0, 2, 1, 2], 1, None, "offsets must ascend"),
        (np.zeros(2, np.float32), [0, 2], -1, None, "k must be at least 0, is -1"),
        (np.zeros(2, np.float32), [0, 2], 1, np.zeros(3, np.int64), "tie_keys must be"),
        (np.zeros(2, np.float32), [0, 2], 1, np.zeros(2, np.int32), "tie_keys must be"),
    ],
)
def test_bad_input_is_refused(values: Any, offsets: list[int], k: int, keys: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        segmented_topk(values, np.array(offsets, np.int64), k, keys)
