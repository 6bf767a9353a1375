"""Broken rules in plain words: every kind that a file, a command line or a body can break."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

from shared.rules import broken, limit_of, short


class Sample(BaseModel, extra="forbid"):
    count: int = Field(1, ge=1, lt=5)
    share: float = Field(0.5, gt=0, le=1)
    ids: list[int] = Field([1], min_length=1, max_length=2)
    name: str = Field("abc", min_length=2, max_length=4, pattern="^a")
    mode: Literal["fast", "slow"] = "fast"
    either: int | list[int] = 1
    own: int = 0

    @field_validator("own")
    @classmethod
    def _own(cls, value: int) -> int:
        if value:
            raise ValueError("must be nothing at all")
        return value


def sentence(**given: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Sample(**given)
    errors = caught.value.errors()
    return broken(str(errors[0]["loc"][0]), errors, short(errors[0]["input"]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"count": 0}, "count must be at least 1, is 0"),
        ({"count": 5}, "count must be under 5, is 5"),
        ({"count": "x"}, "count must be an integer, is 'x'"),
        ({"share": 0}, "share must be over 0, is 0"),
        ({"share": 2}, "share must be at most 1, is 2"),
        ({"ids": []}, "ids must have at least 1 entry, has 0"),
        ({"ids": [1, 2, 3]}, "ids must have at most 2 entries, has 3"),
        ({"ids": 3}, "ids must be a list, is 3"),
        ({"name": "a"}, "name must have at least 2 characters, has 1"),
        ({"name": "abcde"}, "name must have at most 4 characters, has 5"),
        ({"name": "bcd"}, "name must match ^a, is 'bcd'"),
        ({"mode": "odd"}, "mode must be 'fast' or 'slow', is 'odd'"),
        ({"either": None}, "either must be an integer or a list, is None"),
        ({"own": 1}, "own must be nothing at all, is 1"),
        ({"others": 1}, "others is not a field"),
    ],
)
def test_sentences(given: dict[str, Any], words: str) -> None:
    assert sentence(**given) == words


def test_limits() -> None:
    for given, limit in (({"count": 0}, 1), ({"ids": []}, 1), ({"mode": "x"}, "'fast' or 'slow'"), ({"own": 1}, None)):
        with pytest.raises(ValidationError) as caught:
            Sample.model_validate(given)
        assert limit_of(caught.value.errors()[0]) == limit


def test_long_values_are_cut() -> None:
    assert short("x" * 58) == repr("x" * 58)
    assert len(short("x" * 59)) == 60
    assert short("x" * 59).endswith("…")
