"""Writes into the log of a mesh why a station lacks replicas, which else only the log of Serve's controller says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from shared.log import JsonLogger

_PERIOD_S = 2.0  # the question costs the controller some milliseconds


class StationWatch(threading.Thread):
    """Asks again and again, and logs what changes; one thread, for the question may block.

    Args:
        reasons: Returns station -> why it lacks replicas, those alone that failed to start one.
        logger: Told of each new reason, and when it is gone.
        period_s: Between two questions, seconds.
    """

    def __init__(
        self, reasons: Callable[[], Mapping[str, str]], logger: JsonLogger, period_s: float = _PERIOD_S
    ) -> None:
        super().__init__(name="stations", daemon=True)
        self._reasons = reasons
        self._logger = logger
        self._period_s = period_s
        self._known: Mapping[str, str] = {}
        self._ended = threading.Event()

    def run(self) -> None:
        """Look until ``stop``."""
        while not self._ended.wait(self._period_s):
            with suppress(Exception):  # a controller that is being replaced answers anything; the next look tells
                self.look()

    def look(self) -> None:
        """Ask once."""
        found = self._reasons()
        for station, reason in found.items():
            if self._known.get(station) != reason:
                self._logger.error("replica_start_failed", station=station, reason=reason)
        for station in self._known.keys() - found.keys():
            self._logger.info("station_whole", station=station)
        self._known = found

    def stop(self) -> None:
        """Stop looking; a question that hangs is left behind."""
        self._ended.set()
