"""A service whose calls fail, hang or take long on command, and that counts what runs inside it."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from shared.clock import Clock


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one call: it hangs until cancelled, fails, or starts late."""

    error: Exception | None = None
    hangs: bool = False
    delay_s: float = 0.0


class FaultyService:
    """Passes calls on to a service, after the faults that a test has planned for the method.

    Args:
        inner: The real or fake service.
        clock: Time of delays.
    """

    def __init__(self, inner: object, clock: Clock) -> None:
        self.inner: Any = inner
        self.in_flight = 0
        self.started: Counter[str] = Counter()
        self.cancelled: Counter[str] = Counter()
        self._clock = clock
        self._always: dict[str, Fault] = {}
        self._next: dict[str, deque[Fault]] = {}

    def plan(self, method: str, *faults: Fault) -> None:
        """Let the next calls of a method meet these faults, one each; later calls are well."""
        self._next.setdefault(method, deque()).extend(faults)

    def always(self, method: str, fault: Fault | None) -> None:
        """Let every call of a method meet a fault; None ends it."""
        if fault is None:
            self._always.pop(method, None)
        else:
            self._always[method] = fault

    def __getattr__(self, method: str) -> Any:
        value = getattr(self.inner, method, None)
        if value is not None and not callable(value):
            return value  # an attribute is no call

        async def call(*args: Any) -> Any:
            self.started[method] += 1
            self.in_flight += 1
            try:
                planned = self._next.get(method)
                fault = planned.popleft() if planned else self._always.get(method, Fault())
                if fault.hangs:
                    await asyncio.Event().wait()
                if fault.delay_s:
                    await self._clock.sleep_s(fault.delay_s)
                if fault.error is not None:
                    raise fault.error
                return await getattr(self.inner, method)(*args)
            except asyncio.CancelledError:
                self.cancelled[method] += 1
                raise
            finally:
                self.in_flight -= 1

        return call


HANG = Fault(hangs=True)
