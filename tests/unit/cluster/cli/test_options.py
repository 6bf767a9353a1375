"""What people write on the command line."""

from __future__ import annotations

import pytest
import typer

from cluster.cli.options import in_words, parse_id, parse_ids, parse_time


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("978300000", 978_300_000),
        ("1970-01-01", 0),
        ("1970-01-01T01:00:00", 3_600),
        ("1970-01-01T01:00:00+01:00", 0),
        ("1970-01-01T00:00:01Z", 1),
    ],
)
def test_times(text: str | None, expected: int | None) -> None:
    assert parse_time(text) == expected


@pytest.mark.parametrize("text", ["yesterday", "-5", "1.5", "", "\u00b2"])
def test_what_is_no_time_is_a_usage_error_that_says_so(text: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        parse_time(text, "--since")
    assert "'--since'" in caught.value.format_message()
    assert caught.value.exit_code == 2


def test_a_time_is_shown_as_people_write_it() -> None:
    assert in_words(978_300_000) == "2000-12-31 22:00:00"
    assert in_words(2**62) == str(2**62)


def test_ids() -> None:
    assert parse_id("6040") == 6040
    assert parse_id("06040") == "06040"
    assert parse_ids("1, 2,abc", "--candidates") == [1, 2, "abc"]


@pytest.mark.parametrize("text", ["", ",", "1,,2", "1, "])
def test_an_empty_place_in_a_list_is_an_error(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_ids(text, "--candidates")
