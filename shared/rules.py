"""Which rule a value breaks, in plain words: pydantic's reports, worded once for files, command lines, HTTP bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

VALUE_CHARS_MAX = 60
"""Characters of a value that a message for a person shows."""

LIMIT_NAMES = ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern", "expected")
"""Where pydantic keeps the limit that was broken."""

_WORDS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be over {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be under {lt}",
    "too_short": "must have at least {min_length} {entries}",
    "too_long": "must have at most {max_length} {entries}",
    "string_too_short": "must have at least {min_length} {characters}",
    "string_too_long": "must have at most {max_length} {characters}",
    "string_pattern_mismatch": "must match {pattern}",
    "missing": "is missing",
    "extra_forbidden": "is not a field",
    "int_parsing": "must be an integer",
    "int_type": "must be an integer",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
}
_NO_VALUE = ("missing", "extra_forbidden")
_OF_TYPE = ("int_type", "float_type", "bool_type")
_OF_LENGTH = ("too_short", "too_long", "string_too_short", "string_too_long")


def short(value: object, chars_max: int = VALUE_CHARS_MAX) -> str:
    """Return a value as a person writes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"


def rule(error: ErrorDetails) -> str:
    """Return what was asked of a value, e.g. ``must be at least 1``; a validator of ours speaks for itself.

    Args:
        error: One report of a ``pydantic.ValidationError``.
    """
    context = {name: _plain(limit) for name, limit in error.get("ctx", {}).items()}
    words = _WORDS.get(error["type"])
    if words is not None:
        limit = context.get("min_length", context.get("max_length"))
        one = limit == 1
        return words.format(
            **context, entries="entry" if one else "entries", characters="character" if one else "characters"
        )
    for before, after in (("Value error, ", ""), ("Input should be ", "must be ")):
        if error["msg"].startswith(before):
            return after + error["msg"].removeprefix(before)
    return error["msg"]


def broken(field: str, errors: Sequence[ErrorDetails], value: str) -> str:
    """Return one sentence with field, rule and value.

    Args:
        field: Name of the field, or of the option that stands for it.
        errors: Reports of that field, at least one: the members of a union report one each.
        value: The value, as it may be shown; empty: none is.
    """
    rules = dict.fromkeys(map(rule, errors))
    if any(asked.endswith("number") for asked in rules):
        rules.pop("must be an integer", None)  # which is a number
    first, *others = rules
    kind = errors[0]["type"]
    asked = " or ".join([first, *(other.removeprefix("must be ") for other in others)])
    if kind in _OF_LENGTH:
        value = _length(errors[0])
    elif kind in _OF_TYPE and isinstance(errors[0]["input"], str) and value:
        value = f"the text {value}"  # 5 is a number, and "5" looks like one
    verb = "has" if kind in _OF_LENGTH else "is"
    told = f", {verb} {value}" if value and kind not in _NO_VALUE else ""
    joint = " " if asked.startswith(("must ", "is ")) else ": "
    return f"{field}{joint if field else ''}{asked}{told}"


def limit_of(error: ErrorDetails) -> Any:
    """Return the limit that was broken, None where the rule has none."""
    context: dict[str, Any] = error.get("ctx", {})
    return next((context[name] for name in LIMIT_NAMES if name in context), None)


def _plain(limit: Any) -> Any:
    """Return a limit as a person writes it: 0, not 0.0."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() and abs(limit) < 1e15 else limit


def _length(error: ErrorDetails) -> str:
    found = error.get("ctx", {}).get("actual_length")
    if found is None:
        try:
            found = len(error["input"])
        except TypeError:
            return "more"
    return f"{found:,}" if isinstance(found, int) else str(found)
