"""Circuit breakers: a replica that answers nobody is left out, and tried again by one call at a time.

One ``Breakers`` watches all calls of one process to one station. Waiting for a call is *in vain* when its replica has
answered nobody for longer than answers of that station take: what is merely slow, or has a queue, answers others
meanwhile. After ``failures`` calls in a row that are given up in vain the replica's breaker is open: calls go to other
replicas, and where none is left they are refused at once, unless nothing can replace their answer. The call that opened
it is not cancelled but left to try the replica, if it changes nothing: a replica that had no processor while others had
all of them answers as soon as it gets one, and with that the breaker is closed. Every ``open_ms`` after that a copy of
one call, for whose answer nobody waits either, tries the replica (half-open); any answer of it, to whomever, closes the
breaker. Where no call came to be copied for as long again, nothing is known any more, and the next call goes out.

Calls that are left are one for each time a breaker opens, copies are bounded by ``open_ms`` whatever the load, and a
refusal is not repeated, so none of this can amplify a failure.

Source: Nygard, Release It!, 2nd edition, 2018, chapter 5.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import Field

from shared.clock import Clock
from shared.config import Config
from shared.errors import StageSilentError
from shared.handle import Call

_SLACK_S = 1e-6  # a clock's rounding must not turn "at the limit" into "just before it"
_NUM_ANSWERS, _NUM_ANSWERS_MIN = 32, 8
_TRY_S_MAX = 10.0


class BreakerConfig(Config):
    """When a replica is left out, and for how long.

    Args:
        failures: Calls in a row that are given up in vain until a replica's breaker opens.
        silent_ms: Least silence of a replica that is no answer's usual time, milliseconds. More where one of the
            station's newest answers took more, up to the station's limit: a call that is given up sooner, as its
            client's budget was small, says nothing.
        apart_ms: Calls that are given up within less than this count as one, milliseconds: it may be the caller that
            stood still.
        open_ms: Time between two copies of calls that try a replica that is left out, milliseconds.
    """

    failures: int = Field(3, ge=1, le=100)
    silent_ms: float = Field(100.0, gt=0)
    apart_ms: float = Field(50.0, ge=0)
    open_ms: float = Field(500.0, gt=0)


@dataclass(slots=True)
class _Replica:
    """What is known of one replica."""

    heard_s: float = -math.inf
    failed_s: float = -math.inf
    num_failures: int = 0
    next_try_s: float = 0.0


class Breakers:
    """The breakers of one station's replicas, in one process.

    Args:
        station: Its name, e.g. ``embedding:1``.
        config: Limits.
        clock: Time.
        limit_s: Longest wait for an answer of this station, seconds; in vain from there on, also before the usual time
            of answers is known.

    Attributes:
        num_opened: How often one opened.
        num_tried: Copies of calls, and calls that were left, that tried a replica that is left out.
        num_refused: Calls that were not made.
    """

    def __init__(self, station: str, config: BreakerConfig, clock: Clock, limit_s: float = math.inf) -> None:
        self.station = station
        self.config = config
        self.clock = clock
        self.num_opened = 0
        self.num_tried = 0
        self.num_refused = 0
        self._limit_s = limit_s
        self._took_s: deque[float] = deque(maxlen=_NUM_ANSWERS)
        self._replicas: dict[str, _Replica] = {}
        self._open: dict[str, _Replica] = {}
        self._tries: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> list[str]:
        """Names of the replicas that are left out."""
        return list(self._open)

    # --- for who chooses a replica --------------------------------------------------------------------------------

    def keep(self, replicas: Collection[str]) -> None:
        """Forget every replica but these: the others are gone."""
        self._replicas = {name: known for name, known in self._replicas.items() if name in replicas}
        self._open = {name: known for name, known in self._open.items() if name in replicas}

    def usable(self, replicas: list[str]) -> list[str]:
        """Return which of some replicas a call may go to, in their order.

        Those that are not left out; all where that leaves none, since who asks has decided to call.
        """
        self._let_go()
        if not self._open:
            return replicas
        return [name for name in replicas if name not in self._open] or replicas

    # --- for who makes a call -------------------------------------------------------------------------------------

    def check(self, replicas: Collection[str]) -> None:
        """Refuse a call where all of its replicas are left out.

        Raises:
            StageSilentError: the call is not to be made.
        """
        self._let_go()
        if not self._open or not replicas or any(name not in self._open for name in replicas):
            return
        self.num_refused += 1
        raise StageSilentError(
            f"{self.station}: none of {len(replicas)} replicas answers", stage=self.station, value=len(replicas)
        )

    def try_silent(self, start: Callable[[str], Call[Any]]) -> None:
        """Try the replicas that are left out and due by calls for whose answers nobody waits.

        Args:
            start: Makes a call to the replica of a name.
        """
        if not self._open:
            return
        self._let_go()
        now_s = self.clock.monotonic_s()
        due = [name for name, known in self._open.items() if known.next_try_s <= now_s]
        for name in due:
            self._open[name].next_try_s = now_s + self.config.open_ms / 1e3
            call = start(name)
            self.leave(call, call.cancel)

    def leave(self, call: Call[Any], end: Callable[[], object]) -> None:
        """Let a call for whose answer nobody waits try the replica that has it.

        Args:
            call: The call.
            end: Stops it, once it has taken too long.
        """
        self.num_tried += 1
        task = asyncio.get_running_loop().create_task(self._give_up_later(call, end), name=f"try {self.station}")
        self._tries.add(task)
        task.add_done_callback(self._tries.discard)

    def _let_go(self) -> None:
        """Close the breakers of replicas that were not tried when they were due; one more failure opens them again."""
        if not self._open:
            return
        stale_s = self.clock.monotonic_s() - self.config.open_ms / 1e3
        for name in [name for name, known in self._open.items() if known.next_try_s < stale_s]:
            self._open.pop(name).num_failures = self.config.failures - 1

    async def _give_up_later(self, call: Call[Any], end: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()
        # How it ended is asked too: one that broke with its replica is no answer.
        waits = [loop.create_task(call.failure()), loop.create_task(self.clock.sleep_s(min(self._limit_s, _TRY_S_MAX)))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            end()

    def sent(self, replica: str) -> None:
        """Note that a replica gets a call."""
        self._replicas.setdefault(replica, _Replica())

    def heard_s(self, replica: str) -> float:
        """Return when a replica answered last, monotonic seconds; minus infinity: never."""
        known = self._replicas.get(replica)
        return -math.inf if known is None else known.heard_s

    def silent_s(self) -> float:
        """Return the silence of a replica from which on waiting for it is in vain, seconds."""
        usual_s = max(self._took_s) if len(self._took_s) >= _NUM_ANSWERS_MIN else math.inf
        return min(max(self.config.silent_ms / 1e3, usual_s), self._limit_s)

    def answered(self, replica: str, sent_s: float) -> None:
        """Note that a replica has answered; its breaker is closed.

        Args:
            replica: Its name.
            sent_s: Since when it had the call, monotonic seconds.
        """
        if (known := self._replicas.get(replica)) is None:
            return  # it is gone
        known.heard_s, known.num_failures = self.clock.monotonic_s(), 0
        if self._open.pop(replica, None) is None:  # what a silence took is not what answers take
            self._took_s.append(known.heard_s - sent_s)

    def given_up(self, replica: str, sent_s: float) -> bool:
        """Note that a call is waited for no longer.

        Args:
            replica: That has it.
            sent_s: Since when, monotonic seconds.

        Returns:
            Whether the replica's breaker has opened with that.
        """
        known, now_s = self._replicas.get(replica), self.clock.monotonic_s()
        if known is None or now_s - max(sent_s, known.heard_s) < self.silent_s() - _SLACK_S:
            return False
        if now_s - known.failed_s < self.config.apart_ms / 1e3:
            return False
        known.failed_s = now_s
        known.num_failures += 1
        if known.num_failures < self.config.failures or replica in self._open:
            return False
        known.next_try_s = now_s + self.config.open_ms / 1e3
        self._open[replica] = known
        self.num_opened += 1
        return True


class Trip:
    """One call on its way: which replica has it, since when, and whether that is over.

    Args:
        breakers: Of the station that is called.
        only: The one replica that it may go to; None: any.
        may_stay: Whether the call may be left to try its replica when nobody waits for it any longer.

    Attributes:
        is_left: Whether that has happened.
    """

    __slots__ = ("_breakers", "_is_over", "_may_stay", "_replica", "_sent_s", "is_left", "only")

    def __init__(self, breakers: Breakers, only: str | None = None, *, may_stay: bool = False) -> None:
        self.only = only
        self._breakers = breakers
        self._may_stay = may_stay
        self._replica: str | None = None
        self._sent_s = 0.0
        self._is_over = False
        self.is_left = False

    @contextmanager
    def being_made(self) -> Iterator[None]:
        """Let ``current`` return this trip in the block, and in tasks that begin in it."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    @staticmethod
    def current() -> Trip | None:
        """Return the trip of the call that is being made here, None where nobody watches it."""
        return _CURRENT.get()

    def sent_to(self, replica: str) -> None:
        """Note which replica has the call from now on."""
        self._replica, self._sent_s = replica, self._breakers.clock.monotonic_s()
        self._breakers.sent(replica)

    @property
    def patience_s(self) -> float:
        """Seconds until waiting for the call is in vain, 0 or less where it is; infinite where no replica has it."""
        if self._replica is None or self._is_over:
            return math.inf
        silence_s = self._breakers.clock.monotonic_s() - max(self._sent_s, self._breakers.heard_s(self._replica))
        return self._breakers.silent_s() - silence_s

    def answered(self) -> None:
        """Note that the call has its answer, a value or an error of the replica's own."""
        if self._replica is not None and not self._is_over:
            self._breakers.answered(self._replica, self._sent_s)
        self._is_over = True

    def ended(self) -> None:
        """Note that the call has ended in some way, which is an answer unless somebody asks in which."""
        if not self.is_left and self.only is None:
            self.answered()

    def given_up(self, call: Call[Any], stop: Callable[[], object]) -> None:
        """Stop a call, as nobody waits for its answer any longer; one that opens its replica's breaker is left to try.

        Args:
            call: The call.
            stop: Stops it; harmless when it has ended.
        """
        if self.is_left:
            return
        if self._opens_breaker() and self._may_stay:
            self.is_left = True
            self._breakers.leave(call, partial(self._end, stop))
        else:
            self._end(stop)

    def _opens_breaker(self) -> bool:
        if self._replica is None or self._is_over:
            return False
        return self._breakers.given_up(self._replica, self._sent_s)

    def _end(self, stop: Callable[[], object]) -> None:
        self._is_over = True
        stop()

    def lost(self) -> None:
        """Note that the call broke on its way, which says nothing of whether its replica answers."""
        self._is_over = True


_CURRENT: ContextVar[Trip | None] = ContextVar("trip", default=None)
