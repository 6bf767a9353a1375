"""Log lines of a replica, behind a handler that waits as Serve's does."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from logging.handlers import MemoryHandler

import pytest

from cluster.replica_log import LOGGER, replica_log
from shared.clock import ManualClock
from shared.log import JsonLogger


class Written(logging.Handler):
    """What has come to the file."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(json.loads(record.getMessage())["event"])


@pytest.fixture
def written() -> Iterator[Written]:
    target, logger = Written(), logging.getLogger(LOGGER)
    handler = MemoryHandler(1_000, flushLevel=logging.ERROR, target=target)
    before, logger.level = logger.level, logging.INFO
    logger.addHandler(handler)
    yield target
    logger.removeHandler(handler)
    logger.level = before


@pytest.mark.parametrize("level", ["warning", "error"])
def test_what_went_wrong_is_written_at_once_with_all_before_it(written: Written, level: str) -> None:
    logger = JsonLogger(stream=replica_log(), clock=ManualClock()).bind(service="ingress", replica="r")
    logger.info("ranked", said='"level":"error"')
    assert written.events == []
    getattr(logger, level)("rank_failed", error=ValueError("100% %s\nof it"), said='"level":"info"')
    assert written.events == ["ranked", "rank_failed"]
