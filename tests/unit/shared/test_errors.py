"""The error tree: every class survives pickling and can be shown to a client."""

from __future__ import annotations

import json
import pickle
import re

import pytest

import shared.errors
from shared.errors import DeadlineExceededError, InvalidRequestError, RankMeshError


def all_errors(cls: type[RankMeshError] = RankMeshError) -> list[type[RankMeshError]]:
    own = [child for child in cls.__subclasses__() if child.__module__ == "shared.errors"]
    return [cls, *(error for child in own for error in all_errors(child))]


@pytest.mark.parametrize("cls", all_errors())
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_class_survives_pickling(cls: type[RankMeshError], protocol: int) -> None:
    error = cls("candidates must be at most 10, are 11", field="candidates", limit=10, value=11, extra=None)
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is cls
    assert str(copy) == str(error) == "candidates must be at most 10, are 11"
    assert copy.context == {"field": "candidates", "limit": 10, "value": 11, "extra": None}
    assert copy.body() == error.body()


@pytest.mark.parametrize("cls", all_errors())
def test_every_body_is_json(cls: type[RankMeshError]) -> None:
    body = json.loads(json.dumps(cls("why", limit=1.5).body()))
    assert body == {"code": cls.code, "message": "why", "context": {"limit": 1.5}}


def test_codes_are_unique_and_statuses_are_errors() -> None:
    codes = [cls.code for cls in all_errors()]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch("[a-z_]+", code) for code in codes)
    assert all(400 <= cls.http_status < 600 for cls in all_errors())


def test_the_tree_in_the_module_is_the_tree_in_the_code() -> None:
    drawn = re.findall(r"(\w+Error) \[(\d+)\]( \*)?", shared.errors.__doc__ or "")
    expected = [(cls.__name__, str(cls.http_status), " *" if cls.retryable else "") for cls in all_errors()[1:]]
    assert drawn == expected


def test_the_body_is_a_copy() -> None:
    error = RankMeshError("why", field="a")
    context = error.body()["context"]
    assert isinstance(context, dict)
    context["field"] = "b"
    assert error.context == {"field": "a"}


def test_a_kind_of_error_is_caught_as_its_parent() -> None:
    with pytest.raises(InvalidRequestError):
        raise shared.errors.MalformedBodyError("not JSON")
    assert not issubclass(DeadlineExceededError, TimeoutError)  # a timeout of a library is not a deadline of ours
