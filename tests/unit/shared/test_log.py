"""Log lines: JSON, ASCII, bounded, and without secrets."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.clock import ManualClock, SystemClock
from shared.errors import StoreUnavailableError
from shared.log import ITEMS_MAX, LINE_CHARS_MAX, TEXT_CHARS_MAX, JsonLogger, Level, redact, redact_text
from shared.settings import child_environment


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def logger(stream: io.StringIO) -> JsonLogger:
    return JsonLogger("debug", stream, ManualClock(1_796_000_000.25))


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_time_level_event_and_fields(logger: JsonLogger, stream: io.StringIO) -> None:
    bound = logger.bind(service="ranking", replica="r#1")
    bound.bind(request_id="abc").info("request_done", total_ms=1.5, tiers=("light", "full"), ok=True, limit=None)
    bound.error("call_failed")
    logger.warning("alone", service="mine")
    assert stream.getvalue().endswith("\n")
    assert lines(stream) == [
        {
            "ts": "2026-11-30T00:53:20.250+00:00",
            "level": "info",
            "event": "request_done",
            "service": "ranking",
            "replica": "r#1",
            "request_id": "abc",
            "total_ms": 1.5,
            "tiers": ["light", "full"],
            "ok": True,
            "limit": None,
        },
        {
            "ts": "2026-11-30T00:53:20.250+00:00",
            "level": "error",
            "event": "call_failed",
            "service": "ranking",
            "replica": "r#1",
        },
        {"ts": "2026-11-30T00:53:20.250+00:00", "level": "warning", "event": "alone", "service": "mine"},
    ]


@pytest.mark.parametrize(("level", "num_lines"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_the_level_is_the_smallest_that_is_written(stream: io.StringIO, level: Level, num_lines: int) -> None:
    logger = JsonLogger(level, stream).bind(service="x")
    for write in (logger.debug, logger.info, logger.warning, logger.error):
        write("event")
    assert len(lines(stream)) == num_lines


def test_a_text_cannot_forge_a_line(logger: JsonLogger, stream: io.StringIO) -> None:
    logger.info("event", text='x\n{"level":"error"}\u2028\x00\x1b[31m', **{"bad\nname": 1})
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().strip().isprintable()
    assert lines(stream)[0]["text"].startswith("x\n{")


def test_lines_are_ascii_in_every_locale() -> None:
    code = "from shared.log import JsonLogger; JsonLogger().info('title', title='Am\\u00e9lie \\u2615', bad='\\ud800')"
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", code],
        env=child_environment(LANG="C", LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="ascii"),
        capture_output=True,
        check=True,
        timeout=30,
    )
    assert done.stderr.isascii()
    assert json.loads(done.stderr)["title"] == "Amélie ☕"


def test_an_exception_is_its_type_and_message(logger: JsonLogger, stream: io.StringIO) -> None:
    logger.error("failed", error=StoreUnavailableError("cannot reach redis://:hunter2@host:1"))
    expected = {"type": "StoreUnavailableError", "message": "cannot reach redis://***@host:1"}
    assert lines(stream)[0]["error"] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://user:pw@host:6379/0", "redis://***@host:6379/0"),
        ("rediss://:p@ss:w@rd@host", "rediss://***@host"),
        ("a s3://key:secret@bucket/x?y=1 b https://u@h", "a s3://***@bucket/x?y=1 b https://***@h"),
        ("https://host/path@v2", "https://host/path@v2"),
        ("https://host?email=a@b", "https://host?email=a@b"),
        ("mail a@b.c", "mail a@b.c"),
        ("https://h/x?token=abc&y=2", "https://h/x?token=***&y=2"),
        ("https://h/x?a=1&api_key=abc#f", "https://h/x?a=1&api_key=***#f"),
        ("https://h/x?X-Amz-Signature=abc&Password=p", "https://h/x?X-Amz-Signature=***&Password=***"),
        ("no secret here", "no secret here"),
    ],
)
def test_credentials_in_urls(text: str, expected: str) -> None:
    assert redact_text(text) == expected
    assert redact_text(expected) == expected


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "PASSWORD",
        "redis_password",
        "passwd",
        "client_secret",
        "secret_key",
        "token",
        "access_token",
        "api_key",
        "apikey",
        "Authorization",
        "aws_credentials",
    ],
)
def test_fields_named_like_secrets(logger: JsonLogger, stream: io.StringIO, name: str) -> None:
    logger.bind(**{name: "hunter2"}).info("event", nested={"deep": [{name: "hunter2"}]}, **{f"x_{name}": ["hunter2"]})
    assert "hunter2" not in stream.getvalue()
    line = lines(stream)[0]
    assert line[name] == line[f"x_{name}"] == line["nested"]["deep"][0][name] == "***"


def test_numbers_of_tokens_are_no_secrets(logger: JsonLogger, stream: io.StringIO) -> None:
    logger.info("event", num_tokens=7, tokens_per_s=1.5, password=1234, secret=None)
    line = lines(stream)[0]
    assert (line["num_tokens"], line["tokens_per_s"]) == (7, 1.5)
    assert (line["password"], line["secret"]) == ("***", None)


def test_values_that_json_does_not_know(logger: JsonLogger, stream: io.StringIO) -> None:
    logger.info(
        "event",
        nan=float("nan"),
        inf=np.float32("inf"),
        count=np.int64(7),
        flag=np.bool_(True),
        array=np.zeros((2, 2)),
        data=b"x",
        path=ManualClock,
        mixed={1: {"a"}, None: ()},
    )
    line = lines(stream)[0]
    assert (line["nan"], line["inf"], line["count"], line["flag"]) == ("nan", "inf", 7, True)
    assert line["mixed"] == {"1": ["a"], "None": []}
    assert line["data"] == "b'x'"


def test_everything_is_bounded(logger: JsonLogger, stream: io.StringIO) -> None:
    logger.info("event", text="x" * (TEXT_CHARS_MAX + 1), edge="x" * TEXT_CHARS_MAX, items=range(ITEMS_MAX + 1))
    line = lines(stream)[0]
    assert line["text"] == "x" * TEXT_CHARS_MAX + f"... ({TEXT_CHARS_MAX + 1} characters)"
    assert line["edge"] == "x" * TEXT_CHARS_MAX
    assert len(line["items"]) == ITEMS_MAX
    deep: list[object] = []
    deep.append(deep)
    logger.info("event", deep=deep, names={str(n): n for n in range(ITEMS_MAX + 1)})
    assert len(lines(stream)[1]["names"]) == ITEMS_MAX


def test_a_line_that_is_too_long_keeps_its_head(logger: JsonLogger, stream: io.StringIO) -> None:
    logger.bind(service="x").info("event", items=["y" * TEXT_CHARS_MAX] * ITEMS_MAX)
    line = lines(stream)[0]
    assert line["event"] == "event"
    assert line["service"] == "x"
    assert line["dropped_chars"] > LINE_CHARS_MAX
    assert "items" not in line


@pytest.mark.parametrize("text", ["y" * 10**6, "://" * 10**5, "?token" * 10**5, "?" + "token" * 10**5, "a@" * 10**5])
def test_no_text_takes_long(logger: JsonLogger, stream: io.StringIO, text: str) -> None:
    clock = SystemClock()
    start_s = clock.monotonic_s()
    logger.info("event", text=text)
    assert clock.monotonic_s() - start_s < 0.2  # 1 ms; a pattern that is quadratic would take seconds


def test_a_password_at_the_cut_is_hidden_too(logger: JsonLogger, stream: io.StringIO) -> None:
    logger.info("event", text="x" * (TEXT_CHARS_MAX - 15) + " redis://u:hunter2@host" + "y" * 100)
    assert "hunter" not in stream.getvalue()
    assert "redis://***@" in stream.getvalue()


def test_a_dead_stream_fails_no_request() -> None:
    stream = io.StringIO()
    stream.close()
    JsonLogger(stream=stream).error("event")


@settings(max_examples=30)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda values: st.lists(values) | st.dictionaries(st.text() | st.integers(), values),
        max_leaves=20,
    )
)
def test_any_value_becomes_json(value: object) -> None:
    json.loads(json.dumps(redact(value), allow_nan=False))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://key:se/cr+et@bucket/x", "s3://***@bucket/x"),
        ("redis://:p@ss/word@host:6379/0", "redis://***@host:6379/0"),
        ("http://host:8341/v1/a@b", "http://host:8341/v1/a@b"),
    ],
)
def test_a_slash_does_not_end_a_password(text: str, expected: str) -> None:
    assert redact_text(text) == expected
