"""Keys that must be the same in every process, on every machine, for ever."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.hashing import ID_MAX, canonical_id, hash64, id_key, id_keys, mix_keys, store_token
from shared.settings import child_environment

IDS = st.one_of(st.integers(0, ID_MAX), st.text(max_size=12), st.integers(0, ID_MAX + 10).map(str))


def test_known_values() -> None:
    """They are in vocabularies and stores: a change here loses every stored id."""
    assert hash64(b"") == 0xB4B2797457A0A6E4  # b2sum -l 64, bytes reversed
    assert hash64(b"rankmesh") == 0xE68C6C6DC5B85C13
    assert hash64(b"rankmesh", salt=1) == 0xC17C311A1A2BEA72
    assert id_key("user-1") == -8583321985082544998
    assert id_key("") == -5426141060434712860


def test_the_same_in_a_process_with_another_hash_seed() -> None:
    code = "from shared.hashing import id_key; print(id_key('abc'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        env=child_environment(PYTHONHASHSEED="12345"),
        timeout=30,
    )
    assert int(done.stdout) == id_key("abc")


@pytest.mark.parametrize("salt", [0, 1, 2**64 - 1])
def test_hashes_have_64_bits_and_spread(salt: int) -> None:
    values = [hash64(str(number).encode(), salt) for number in range(2_000)]
    assert all(0 <= value < 2**64 for value in values)
    assert len(set(values)) == len(values)
    ones = np.array([[value >> bit & 1 for bit in range(64)] for value in values]).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 0.06  # 5 standard deviations of 2,000 fair coins


@pytest.mark.parametrize("salt", [-1, 2**64])
def test_a_salt_beyond_64_bits_is_refused(salt: int) -> None:
    with pytest.raises(OverflowError):
        hash64(b"x", salt)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("42", 42),
        ("0", 0),
        (42, 42),
        (str(ID_MAX), ID_MAX),
        (str(ID_MAX + 1), str(ID_MAX + 1)),
        ("9" * 30, "9" * 30),
        ("042", "042"),
        ("00", "00"),
        ("-1", "-1"),
        ("+1", "+1"),
        (" 1", " 1"),
        ("1 ", "1 "),
        ("1\n", "1\n"),
        ("1.0", "1.0"),
        ("1e3", "1e3"),
        ("1_000", "1_000"),
        ("٣", "٣"),  # a digit of another script is no decimal of ours
        ("²", "²"),
        ("", ""),
        ("abc", "abc"),
    ],
)
def test_canonical_ids(given: int | str, expected: int | str) -> None:
    value = canonical_id(given)
    assert value == expected
    assert type(value) is type(expected)


@given(one=IDS, other=IDS)
def test_keys_and_tokens_tell_ids_apart(one: int | str, other: int | str) -> None:
    same = canonical_id(one) == canonical_id(other)
    assert (id_key(one) == id_key(other)) == same
    assert (store_token(one) == store_token(other)) == same


@given(value=IDS)
def test_the_two_kinds_of_keys_never_meet(value: int | str) -> None:
    key = id_key(value)
    assert -(2**63) <= key <= ID_MAX
    assert (key >= 0) == isinstance(canonical_id(value), int)


@given(values=st.lists(IDS, max_size=20))
def test_many_keys_are_the_keys_of_each(values: list[int | str]) -> None:
    keys = id_keys(values)
    assert keys.dtype == np.int64
    assert keys.tolist() == [id_key(value) for value in values]


def test_many_keys_of_every_mixture() -> None:
    assert id_keys([]).shape == (0,)
    assert id_keys([]).dtype == np.int64
    assert id_keys(["1", "2"]).tolist() == [1, 2]
    assert id_keys([1, "2", "x"]).tolist() == [1, 2, id_key("x")]
    assert id_keys(["007", 7]).tolist() == [id_key("007"), 7]  # numpy alone would make both 7
    assert id_keys([" 7", "7_0"]).tolist() == [id_key(" 7"), id_key("7_0")]
    assert id_keys([ID_MAX, 0]).tolist() == [ID_MAX, 0]


def test_a_number_that_is_no_id_is_refused() -> None:
    for value in (ID_MAX + 1, -(2**63) - 1):
        with pytest.raises(OverflowError):
            id_keys([value])


@given(value=IDS)
def test_tokens_are_safe_in_a_store_key(value: int | str) -> None:
    token = store_token(value)
    assert token.isascii()
    assert token.isalnum()


def test_known_tokens() -> None:
    assert store_token(42) == store_token("42") == "i42"
    assert store_token("a:{}") == "s613a7b7d"
    assert store_token("") == "s"
    assert store_token("\ud800") == "seda080"  # a lone surrogate has a token too


def test_mixed_keys_are_known() -> None:
    """They choose rows of trained tables: a change here scrambles every unified table."""
    found = mix_keys(np.array([0, 1, -1, ID_MAX], np.int64), 0)
    assert [hex(value) for value in found.tolist()] == [
        "0x48218226ff3cd4bf",
        "0xdce423fc82c0d5b8",
        "0x445018e305810b78",
        "0xe5d2c2f76c5f0a36",
    ]


@pytest.mark.parametrize("salt", [0, 1, 2**64 - 1])
def test_mixing_is_a_bijection_that_spreads(salt: int) -> None:
    found = mix_keys(np.arange(-5_000, 5_000, dtype=np.int64), salt)
    assert len(np.unique(found)) == len(found)
    ones = np.unpackbits(found.view(np.uint8).reshape(-1, 8), axis=1).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 0.025  # 5 standard deviations of 10,000 fair coins


def test_salts_give_independent_rows() -> None:
    keys = np.arange(20_000, dtype=np.int64)
    one, two = (mix_keys(keys, hash64(name)) % np.uint64(100) for name in (b"user", b"item"))
    pairs = np.bincount((one * np.uint64(100) + two).astype(np.int64), minlength=10_000)
    assert abs(pairs.var() - 2.0) < 0.2  # independent rows meet as often as a Poisson count of mean 2
    assert abs(np.mean(one == two) - 0.01) < 0.004


def test_mixing_takes_any_shape_and_refuses_a_salt_beyond_64_bits() -> None:
    keys = np.arange(6, dtype=np.int64).reshape(2, 3)
    np.testing.assert_array_equal(mix_keys(keys, 7).ravel(), mix_keys(keys.ravel(), 7))
    assert mix_keys(keys[:0], 7).shape == (0, 3)
    for salt in (-1, 2**64):
        with pytest.raises(OverflowError):
            mix_keys(keys, salt)
