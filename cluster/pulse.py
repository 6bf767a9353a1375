"""Tells a part that has fallen silent from one that is slow: asked again and again, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from shared.clock import SystemClock

_PERIOD_S = 5.0


class Pulse:
    """Asks a part whether it answers, where asking may block or fail in any way.

    Args:
        ask: Asks once; raises or blocks while the part does not answer.
        clock: Measures the silence.
        period_s: Between two questions, seconds.
    """

    def __init__(
        self, ask: Callable[[], object], clock: SystemClock | None = None, period_s: float = _PERIOD_S
    ) -> None:
        self._ask = ask
        self._clock = clock or SystemClock()
        self._period_s = period_s
        self._answered_s = self._clock.monotonic_s()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        """Start asking."""
        self._answered_s = self._clock.monotonic_s()
        self._thread.start()

    def stop(self) -> None:
        """Stop asking; a question that hangs is left behind."""
        self._ended.set()

    @property
    def silence_s(self) -> float:
        """Seconds since the last answer."""
        return self._clock.monotonic_s() - self._answered_s

    def _run(self) -> None:
        while not self._ended.is_set():
            with suppress(Exception):  # whatever it raises, it has not answered
                self._ask()
                self._answered_s = self._clock.monotonic_s()
            self._ended.wait(self._period_s)
