"""Where the time of one request goes, and how many bytes a message carries."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel

from shared.clock import Clock
from shared.schema.api import StageTime


class StageClock:
    """One stage of a request while it runs; use as a context manager, or call ``end``."""

    __slots__ = ("_clock", "_compute_ms", "_end_s", "_name", "_start_s")

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._start_s = clock.monotonic_s()
        self._end_s: float | None = None
        self._compute_ms: float | None = None

    def __enter__(self) -> StageClock:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self, compute_ms: float | None = None) -> None:
        """Stop the clock; a second call changes nothing.

        Args:
            compute_ms: What the station says it computed, without waiting and transport.
        """
        if self._end_s is None:
            self._end_s = self._clock.monotonic_s()
            self._compute_ms = compute_ms

    def bar(self, zero_s: float, now_s: float, *, critical: bool) -> StageTime:
        """Return the stage as a bar that starts at ``zero_s``; one that still runs ends at ``now_s``."""
        end_s = now_s if self._end_s is None else self._end_s
        return StageTime(
            name=self._name,
            start_ms=(self._start_s - zero_s) * 1e3,
            duration_ms=(end_s - self._start_s) * 1e3,
            compute_ms=self._compute_ms,
            critical=critical,
        )


class Waterfall:
    """The stages of one request, in the order they started.

    Args:
        clock: Clock of all bars.
        zero_s: Monotonic seconds of the request's start; None: now.
    """

    __slots__ = ("_clock", "_stages", "_zero_s")

    def __init__(self, clock: Clock, zero_s: float | None = None) -> None:
        self._clock = clock
        self._zero_s = clock.monotonic_s() if zero_s is None else zero_s
        self._stages: list[tuple[str, StageClock]] = []

    def start(self, name: str) -> StageClock:
        """Start a stage now."""
        stage = StageClock(name, self._clock)
        self._stages.append((name, stage))
        return stage

    def total_ms(self) -> float:
        """Return the milliseconds since the request's start."""
        return (self._clock.monotonic_s() - self._zero_s) * 1e3

    def bars(self, critical: Collection[str] = ()) -> list[StageTime]:
        """Return all bars.

        Args:
            critical: Names of the stages that follow one another to make the total.
        """
        now_s = self._clock.monotonic_s()
        return [stage.bar(self._zero_s, now_s, critical=name in critical) for name, stage in self._stages]


def payload_bytes(message: Any) -> int:
    """Return the bytes of all numpy arrays and byte strings in a message, however deep.

    Used to show that no large tensor passes through the ingress: what it awaits has at most 64 KiB by this count. An
    array that several fields share is counted each time, as pickling a view of it would copy it.
    """
    if isinstance(message, np.ndarray | np.generic | memoryview):
        return message.nbytes
    if isinstance(message, bytes | bytearray):
        return len(message)
    if isinstance(message, Mapping):
        return sum(payload_bytes(value) for value in message.values())
    if isinstance(message, list | tuple | set | frozenset):
        return sum(payload_bytes(value) for value in message)
    if isinstance(message, BaseModel):
        return sum(payload_bytes(value) for _, value in message)
    if is_dataclass(message) and not isinstance(message, type):
        return sum(payload_bytes(getattr(message, field.name)) for field in fields(message))
    return 0
