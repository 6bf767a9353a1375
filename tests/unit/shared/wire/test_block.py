"""The columnar format: what goes in comes out, and whatever else comes in is refused with its own error."""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidRequestError, MalformedBodyError
from shared.hashing import ID_MAX, EntityId, id_key
from shared.wire import BatchLimits, CandidateBatch, IdLists, Numbers, columns_of, decode_batch, encode_batch
from shared.wire.codec import Reader, write_floats, write_integers
from shared.wire.message import FORMAT, MAGIC, encode_request, split_request

LIMITS = BatchLimits(candidates_max=50, features_max=4, feature_ids_max=100)
ResultT = TypeVar("ResultT")

INT64 = st.integers(-(2**63), 2**63 - 1)


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def floats(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, np.float32)


def attempt(decode: Callable[[], ResultT]) -> ResultT | None:
    """Return what is decoded, or None for a refusal that says what is wrong; anything else is a bug."""
    refusal: InvalidRequestError | None = None
    try:
        return decode()
    except InvalidRequestError as error:
        refusal = error
    assert {"field", "limit", "value"} <= refusal.context.keys()
    return None


BATCH = CandidateBatch.of(
    [5, "x", 7],
    {
        "genres": IdLists(ints(0, 2, 2, 3), ints(-9, 4, 2**40)),
        "tags": IdLists(ints(0, 0, 1, 2), ints(1, 2), floats(0.1, -2.5)),
        "price": Numbers(floats(9.25, math.nan, 1e30)),
    },
)


@given(st.lists(INT64, max_size=40))
def test_integers_come_back(values: list[int]) -> None:
    out: list[bytes] = []
    write_integers(out, np.array(values, np.int64))
    reader = Reader(b"".join(out))
    assert reader.integers("x", len(values)).tolist() == values
    assert reader.num_left == 0


_DECIMALS = st.tuples(st.integers(0, 7), st.lists(st.integers(-(10**9), 10**9), max_size=40)).map(
    lambda drawn: [value / 10 ** drawn[0] for value in drawn[1]]
)


@given(st.lists(st.floats(width=32), max_size=40) | st.lists(st.floats(width=16), max_size=40) | _DECIMALS)
def test_floats_come_back_to_the_bit(values: list[float]) -> None:
    given_ = np.array(values, np.float32)
    out: list[bytes] = []
    write_floats(out, given_)
    found = Reader(b"".join(out)).floats("x", len(values))
    np.testing.assert_array_equal(found, given_)
    np.testing.assert_array_equal(np.signbit(found[~np.isnan(found)]), np.signbit(given_[~np.isnan(given_)]))


@pytest.mark.parametrize(("most", "width"), [(0, 0), (1, 1), (255, 1), (256, 2), (2**16, 3), (2**24, 4), (2**63, 8)])
def test_a_column_is_as_wide_as_its_values_need(most: int, width: int) -> None:
    out: list[bytes] = []
    write_integers(out, ints(-5, most - 5, -5))
    assert len(b"".join(out)) == 9 + 3 * width


@pytest.mark.parametrize(
    ("values", "base"),
    [
        (ints(9, 3, 200), 0),
        (ints(300, 299, 301), 299),
        (ints(300, 1, 301), 0),
        (ints(-1, 5), -1),
        (ints(7, 7), 7),
        (ints(2**62, -(2**62)), -(2**62)),
    ],
)
def test_a_base_is_written_where_it_saves_a_byte(values: np.ndarray[tuple[int], np.dtype[np.int64]], base: int) -> None:
    out: list[bytes] = []
    write_integers(out, values)
    assert struct.unpack_from("<Bq", b"".join(out))[1] == base
    assert Reader(b"".join(out)).integers("x", len(values)).tolist() == values.tolist()


def test_features_with_one_array_of_offsets_are_as_those_with_copies_of_it() -> None:
    offsets = ints(0, 2, 2, 3)
    features = {name: IdLists(offsets, ints(1, 2, 3)) for name in "ab"} | {"c": IdLists(ints(0, 0, 0, 1), ints(7))}
    copies = {name: IdLists(column.offsets.copy(), column.ids) for name, column in features.items()}
    block = encode_batch(CandidateBatch.of([1, 2, 3], features))
    assert block == encode_batch(CandidateBatch.of([1, 2, 3], copies))
    np.testing.assert_equal(dataclasses.asdict(decode_batch(block, LIMITS))["features"], {
        name: dataclasses.asdict(column) for name, column in copies.items()
    })  # fmt: skip


@pytest.mark.parametrize(
    ("values", "size"),
    [
        (floats(0.1, 0.1, 0.1), 5),
        (floats(1.0, 2.0, 3.0), 1 + 9 + 3),
        (floats(0.1, 0.25, -0.3), 1 + 9 + 3),
        (floats(0.123, 7.456, 9.0), 1 + 9 + 2 * 3),
        (floats(2.0**-14, 1.0, 2.0), 1 + 2 * 3),
        (floats(math.pi, 1.0, 2.0), 1 + 4 * 3),
        (floats(math.nan, 1.0, 2.0), 1 + 4 * 3),
        (floats(-0.0, 1.0, 2.0), 1 + 2 * 3),
        (floats(-0.0, 0.0), 1 + 2 * 2),
        (floats(-3e6, 3e6, 0.5), 1 + 9 + 4 * 3),
        (floats(-0.5, 2.0**36, 2.0), 1 + 9 + 5 * 3),
        (floats(2.0**41, 2.0, 0.1), 1 + 4 * 3),
    ],
    ids=[
        "constant",
        "whole",
        "2 digits",
        "3 digits",
        "half precision",
        "single precision",
        "NaN",
        "minus zero",
        "zeros of both signs",
        "below zero",
        "beyond 32 bits",
        "beyond what decimals hold",
    ],
)
def test_floats_take_the_smallest_form_that_loses_nothing(
    values: np.ndarray[tuple[int], np.dtype[np.float32]], size: int
) -> None:
    out: list[bytes] = []
    write_floats(out, values)
    assert len(b"".join(out)) == size
    found = Reader(b"".join(out)).floats("x", len(values))
    np.testing.assert_array_equal(found.view(np.uint32), values.view(np.uint32))


def test_a_batch_comes_back() -> None:
    found = decode_batch(encode_batch(BATCH), LIMITS)
    assert found.ids == [5, "x", 7]
    assert found.keys.tolist() == [5, id_key("x"), 7]
    np.testing.assert_equal(dataclasses.asdict(found), dataclasses.asdict(BATCH))


IDS = st.integers(0, ID_MAX) | st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)


@given(st.lists(IDS, min_size=1, max_size=20), st.data())
def test_maps_become_columns_that_come_back(ids: list[EntityId], data: st.DataObject) -> None:
    lists = data.draw(st.lists(st.none() | st.lists(IDS, max_size=3), min_size=len(ids), max_size=len(ids)))
    rows = [{} if value is None else {"tags": value} for value in lists]
    batch = decode_batch(encode_batch(CandidateBatch.of(ids, columns_of(rows))), LIMITS)
    assert batch.keys.tolist() == [id_key(id_) for id_ in ids]
    if any(value is not None for value in lists):
        column = batch.features["tags"]
        assert isinstance(column, IdLists)
        ends = column.offsets.tolist()
        found = [column.ids[begin:end].tolist() for begin, end in itertools.pairwise(ends)]
        assert found == [[id_key(id_) for id_ in value or []] for value in lists]


def test_weights_default_to_one_where_some_candidate_gives_them() -> None:
    column = columns_of([{"t": [1, 2]}, {}, {"t": {"ids": [3], "weights": [0.5]}}, {"t": {"ids": [4]}}])["t"]
    assert isinstance(column, IdLists)
    assert column.offsets.tolist() == [0, 2, 2, 3, 4]
    assert column.weights is not None
    assert column.weights.tolist() == [1.0, 1.0, 0.5, 1.0]


def test_a_feature_of_two_kinds_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"features\.t must be numbers or lists"):
        columns_of([{"t": 1.0}, {"t": [1]}])
    with pytest.raises(InvalidRequestError, match="as many weights as ids"):
        columns_of([{"t": {"ids": [1], "weights": [1.0, 2.0]}}])


@given(st.binary(max_size=400))
@settings(max_examples=300)
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    attempt(lambda: decode_batch(data, LIMITS))


@given(st.data())
@settings(max_examples=300)
def test_damaged_blocks_decode_to_something_within_the_limits_or_are_refused(data: st.DataObject) -> None:
    block = bytearray(encode_batch(BATCH))
    for _ in range(data.draw(st.integers(1, 3))):
        block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(block)))
    found = attempt(lambda: decode_batch(bytes(block[: cut or None]), LIMITS))
    if found is None:
        return
    assert 1 <= len(found) <= LIMITS.candidates_max
    assert int(found.integers.min()) >= -1
    for column in found.features.values():
        if isinstance(column, IdLists):
            assert len(column.offsets) == len(found) + 1
            assert column.offsets[-1] == len(column.ids) <= LIMITS.feature_ids_max
            assert bool((np.diff(column.offsets) >= 0).all())


@pytest.mark.parametrize(("count", "is_accepted"), [(49, True), (50, True), (51, False)])
def test_candidates_are_bounded(count: int, is_accepted: bool) -> None:
    block = encode_batch(CandidateBatch.of(list(range(count))))
    if is_accepted:
        assert len(decode_batch(block, LIMITS)) == count
    else:
        with pytest.raises(InvalidRequestError) as caught:
            decode_batch(block, LIMITS)
        assert caught.value.context == {"field": "candidates", "limit": 50, "value": 51}


@pytest.mark.parametrize(("count", "is_accepted"), [(99, True), (100, True), (101, False)])
def test_ids_of_all_features_together_are_bounded(count: int, is_accepted: bool) -> None:
    features = {"a": IdLists(ints(0, 40), np.arange(40)), "b": IdLists(ints(0, count - 40), np.arange(count - 40))}
    block = encode_batch(CandidateBatch.of([1], features))
    if is_accepted:
        assert len(decode_batch(block, LIMITS).features) == 2
    else:
        with pytest.raises(InvalidRequestError) as caught:
            decode_batch(block, LIMITS)
        assert (caught.value.context["field"], caught.value.context["limit"]) == ("features.b", 60)


def test_features_are_bounded() -> None:
    column = Numbers(floats(1.0))
    assert decode_batch(encode_batch(CandidateBatch.of([1], {f"f{i}": column for i in range(4)})), LIMITS).features
    with pytest.raises(InvalidRequestError, match="features must be at most 4, are 5"):
        decode_batch(encode_batch(CandidateBatch.of([1], {f"f{i}": column for i in range(5)})), LIMITS)


def test_constants_that_claim_much_are_refused_before_anything_is_made() -> None:
    """A column of width 0 has no bytes: only the limits bound what it may claim."""
    head = struct.pack("<IIHH", 1, 0, 1, 0) + struct.pack("<Bq", 0, 7)
    lists = b"\x01t\x00" + struct.pack("<Bq", 0, 2**62) + struct.pack("<Bq", 0, 0)
    with pytest.raises(InvalidRequestError, match="limit 100"):
        decode_batch(head + lists, LIMITS)
    with pytest.raises(InvalidRequestError, match="must be 1 to 50"):
        decode_batch(struct.pack("<IIHH", 2**32 - 1, 0, 0, 0) + struct.pack("<Bq", 0, 7), LIMITS)


@pytest.mark.parametrize(
    "features",
    [
        {"t": IdLists(ints(0, 1), ints(1), floats(math.nan))},
        {"t": Numbers(floats(math.inf))},
    ],
)
def test_numbers_that_are_not_finite_are_refused(features: dict[str, IdLists | Numbers]) -> None:
    with pytest.raises(InvalidRequestError, match="finite"):
        decode_batch(encode_batch(CandidateBatch.of([1], features)), LIMITS)


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "é"])
def test_names_that_no_feature_has_are_not_encoded(name: str) -> None:
    with pytest.raises(ValueError, match="name must match"):
        encode_batch(CandidateBatch.of([1], {name: Numbers(floats(1.0))}))


def test_a_decimal_string_among_texts_is_refused() -> None:
    block = encode_batch(CandidateBatch(ints(-1), ("x",), {})).replace(b"x", b"7")
    with pytest.raises(InvalidRequestError, match="decimal strings as integers"):
        decode_batch(block, LIMITS)


def test_a_request_is_framed() -> None:
    body = encode_request({"user_id": 1}, BATCH)
    header, block = split_request(body)
    assert header == b'{"user_id":1}'
    np.testing.assert_equal(dataclasses.asdict(decode_batch(block, LIMITS)), dataclasses.asdict(BATCH))
    assert body[:4] == MAGIC
    with pytest.raises(MalformedBodyError, match=r"body\.format must be 1, is 2"):
        split_request(body[:4] + bytes([FORMAT + 1]) + body[5:])
    with pytest.raises(MalformedBodyError, match="must begin with RMWC"):
        split_request(b"{" + body[1:])
    for place in (5, 6, 7):
        with pytest.raises(MalformedBodyError, match="reserved bytes"):
            split_request(body[:place] + b"\x01" + body[place + 1 :])


@given(st.binary(max_size=60))
def test_any_bytes_have_a_frame_or_are_refused(data: bytes) -> None:
    for body in (data, MAGIC + bytes([FORMAT]) + data):
        attempt(partial(split_request, body))
