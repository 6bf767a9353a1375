"""What labelled events say of a version that is tried, against the one that serves, on the very same events.

While a canary runs, events that come in are put to both versions as requests of one candidate at the event's own time:
the user's history ends before it, so neither knows the answer. Comparing both on each event needs far fewer labels
than comparing the users of one with those of the other, and works whichever replica served the impression.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from services.ingress.config import FeedbackConfig
from services.ingress.serving import Serving
from shared.errors import RankMeshError
from shared.schema.api import Event
from shared.weights.deltas import parse_stamp

_PROBABILITY_MIN: Final = 1e-6

AskClick = Callable[[Event, str], Awaitable[float]]
"""Event and stamp -> probability of a click."""


class Feedback:
    """Sums of the labelled events of one ingress replica.

    Args:
        ask: Ranks an event's item for its user with a version.
        config: What a click is, and bounds.
        serving: Which versions are compared.
    """

    def __init__(self, ask: AskClick, config: FeedbackConfig, serving: Serving) -> None:
        self._ask = ask
        self._config = config
        self._serving = serving
        self._running: set[asyncio.Task[None]] = set()
        self._of = ""
        self._sums: dict[str, float] = {}

    def offer(self, events: Sequence[Event]) -> None:
        """Take up events while a canary runs and there is room; the others are let go."""
        canary = self._serving.order.canary
        if canary is None:
            return
        if (base := parse_stamp(canary)[0]) != self._of:
            self._of, self._sums = base, {}
        for event in events:
            if len(self._running) >= self._config.in_flight_max:
                return
            task = asyncio.get_running_loop().create_task(self._compare(event, canary), name="feedback")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def sums(self) -> dict[str, float]:
        """Return labels, clicks, and what both versions predicted and lost; empty without a canary."""
        return dict(self._sums) if self._serving.order.canary is not None else {}

    async def drain(self) -> None:
        """Wait until none runs."""
        while self._running:
            await asyncio.wait(self._running)

    def close(self) -> None:
        """Cancel what runs."""
        for task in self._running:
            task.cancel()

    async def _compare(self, event: Event, canary: str) -> None:
        stamps = (self._serving.order.version, canary)
        for stamp in stamps:
            self._serving.begin(stamp)
        try:
            base_p, canary_p = [_inside(await self._ask(event, stamp)) for stamp in stamps]
        except RankMeshError:
            return  # what fails is counted among the answers, and says nothing of quality
        finally:
            for stamp in stamps:
                self._serving.end(stamp)
        if self._of != parse_stamp(canary)[0]:
            return
        is_click = event.weight >= self._config.click_weight_min
        losses = [-math.log(p if is_click else 1 - p) for p in (base_p, canary_p)]
        added = {
            "labels": 1.0,
            "clicks": float(is_click),
            "base_loss": losses[0],
            "canary_loss": losses[1],
            "base_predicted": base_p,
            "canary_predicted": canary_p,
            "rise_squared": (losses[1] - losses[0]) ** 2,
        }
        for name, value in added.items():
            self._sums[name] = self._sums.get(name, 0.0) + value


def _inside(probability: float) -> float:
    return min(max(probability, _PROBABILITY_MIN), 1 - _PROBABILITY_MIN)
