"""Which weights versions a replica answers for: several at once, so that no request meets a change half done.

A request names its version at every station (a stamp: a version, or a version and the number of its last delta). Who
orders updates tells every replica which stamps to hold; it has requests made with a new one only when all replicas hold
it, and lets go of an old one only when no request can ask for it any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from shared.errors import RankMeshError, VersionMismatchError
from shared.schema.stamp import check_version
from shared.weights.deltas import parse_stamp, version_stamp

PartT = TypeVar("PartT")
PartT_co = TypeVar("PartT_co", covariant=True)

BASES_MAX: Final = 3
"""Whole versions that a replica holds at once: the one that serves, the one before it, and the one that comes."""

REFUSALS_MAX: Final = 8
"""Refused stamps that are remembered; the oldest go first."""


@dataclass(frozen=True, slots=True)
class HeldReport:
    """What a replica holds.

    Args:
        held: Stamps that it answers for, oldest first.
        refused: Stamp -> why it does not hold it although it was told to.
        loading: Versions that it is reading now.
    """

    held: tuple[str, ...]
    refused: dict[str, str]
    loading: tuple[str, ...] = ()

    def body(self) -> dict[str, Any]:
        """Return the fields of a replica's status."""
        return {
            "version": self.held[-1] if self.held else None,
            "held": list(self.held),
            "refused": dict(self.refused),
            "loading": list(self.loading),
        }


class Series(Protocol[PartT_co]):
    """One version and its deltas, as parts that serve."""

    def advance(self, sequence: int) -> None:
        """Take up the state after a delta; blocks, and leaves everything as it was when it fails.

        Raises:
            RankMeshError: the delta is not there, is not the next one, or does not fit.
        """
        ...

    def at(self, stamp: str) -> PartT_co:
        """Return the part of a held state.

        Raises:
            VersionMismatchError: it is not held.
        """
        ...

    def stamps(self) -> tuple[str, ...]:
        """Return the held states, oldest first; the last one is the newest."""
        ...

    def keep(self, stamps: Collection[str]) -> None:
        """Let go of all states but these and the newest, and of these not before told to."""
        ...


class Versions(Protocol[PartT_co]):
    """What a service takes its weights from."""

    async def get(self, version: str, station: str) -> PartT_co:
        """Return the part of the version that a request asks for.

        Raises:
            VersionMismatchError: this replica does not hold it.
        """
        ...

    def newest(self) -> PartT_co:
        """Return the part of the state that was taken up last."""
        ...

    def report(self) -> HeldReport:
        """Return what is held."""
        ...


class OneVersion(Generic[PartT]):
    """A version that never changes.

    Args:
        version: Its name.
        part: What answers for it.
    """

    def __init__(self, version: str, part: PartT) -> None:
        self._version = version
        self._part = part

    async def get(self, version: str, station: str) -> PartT:
        """Return the part.

        Raises:
            VersionMismatchError: another version is asked for.
        """
        check_version(version, self._version, station)
        return self._part

    def newest(self) -> PartT:
        """Return the part."""
        return self._part

    def report(self) -> HeldReport:
        """Return the one version."""
        return HeldReport((self._version,), {})


class HeldVersions(Generic[PartT]):
    """The versions of one replica, which change while it serves.

    Args:
        open_series: Reads a version and checks it; blocks.
        opening: Where versions are read, beside the event loop that answers requests; takes up to minutes.
        advancing: Where deltas are applied, which takes milliseconds and must not wait for a version that is read;
            None: ``opening``, which has two workers then.
    """

    def __init__(
        self, open_series: Callable[[str], Series[PartT]], opening: Executor, advancing: Executor | None = None
    ) -> None:
        self._open = open_series
        self._opener = opening
        self._advancer = advancing or opening
        self._series: dict[str, Series[PartT]] = {}
        self._refused: dict[str, str] = {}
        self._bringing: dict[str, asyncio.Task[None]] = {}
        self._opening: set[str] = set()
        self._num_orders = 0
        self._wanted: frozenset[str] = frozenset()  # of the newest order

    def start(self, stamps: Sequence[str], needed: str | None = None) -> None:
        """Take up versions before the replica serves, and let go of all others; blocks. May be called once more.

        Args:
            stamps: All that requests may ask for. Of states before the newest that is here, none can be had.
            needed: The one without which a replica must not serve; what else cannot be had is refused. None: all are.

        Raises:
            RankMeshError: one that is needed cannot be had.
        """
        wanted = _by_base(stamps)
        for base in [base for base in self._series if base not in wanted]:
            del self._series[base]
        for base, sequences in wanted.items():
            first = None if needed is None or base != parse_stamp(needed)[0] else parse_stamp(needed)[1]
            for sequence in (0, *sequences):
                try:
                    self._start(base, sequence)
                except Exception as error:
                    if needed is None or (first is not None and sequence <= first):
                        raise
                    self._refuse(version_stamp(base, sequence), _told(error))
                    break
            if base in self._series:
                self._series[base].keep(stamps)

    def _start(self, base: str, sequence: int) -> None:
        if base not in self._series:
            self._series[base] = self._open(base)
        series = self._series[base]
        if sequence > parse_stamp(series.stamps()[-1])[1]:
            series.advance(sequence)

    async def hold(self, stamps: Sequence[str], wait_s: float) -> HeldReport:
        """Take up these states, and when all are there let go of all others; what fails changes nothing.

        The order that came last decides: one that still waits for what it asked for lets go of nothing any more.

        Args:
            stamps: All that requests may ask for, in any order.
            wait_s: Longest wait; what takes longer goes on, and is found by the next call.
        """
        self._num_orders = number = self._num_orders + 1
        wanted = _by_base(stamps)
        self._wanted = frozenset(wanted)
        tasks = [self._bring(base, sequences) for base, sequences in wanted.items()]
        await asyncio.wait(tasks, timeout=wait_s)
        if number == self._num_orders and all(self._holds(stamp) for stamp in stamps):
            for base in [base for base in self._series if base not in wanted]:
                del self._series[base]
            for series in self._series.values():
                series.keep(stamps)
        if number == self._num_orders:
            self._refused = {stamp: reason for stamp, reason in self._refused.items() if stamp in stamps}
        return self.report()

    async def get(self, version: str, station: str) -> PartT:
        """Return the part of a version; one that is some deltas ahead is caught up with.

        A replica that starts while the others are told of a delta would miss it: it learns of it by the first request.

        Raises:
            VersionMismatchError: it is not held and cannot be reached by deltas.
        """
        if (part := self._find(version)) is not None:
            return part
        if self._is_ahead(version):
            base, sequence = parse_stamp(version)
            await asyncio.wait([self._bring(base, [sequence])])
            if (part := self._find(version)) is not None:
                return part
        held = ", ".join(self.report().held)
        raise VersionMismatchError(
            f"{station} holds weights {held}, asked for {version}", asked=version, held=held, station=station
        )

    def newest(self) -> PartT:
        """Return the part of the state that was taken up last, of the version that was read last."""
        series = list(self._series.values())[-1]
        return series.at(series.stamps()[-1])

    def report(self) -> HeldReport:
        """Return what is held."""
        held = tuple(stamp for series in self._series.values() for stamp in series.stamps())
        return HeldReport(held, dict(self._refused), tuple(self._opening))

    def _find(self, version: str) -> PartT | None:
        series = self._series.get(version.partition("+")[0])
        if series is None:
            return None
        try:
            return series.at(version)
        except VersionMismatchError:
            return None

    def _holds(self, stamp: str) -> bool:
        series = self._series.get(stamp.partition("+")[0])
        return series is not None and stamp in series.stamps()

    def _is_ahead(self, version: str) -> bool:
        base, sequence = parse_stamp(version)
        series = self._series.get(base)
        return series is not None and sequence > parse_stamp(series.stamps()[-1])[1]

    def _bring(self, base: str, sequences: Sequence[int]) -> asyncio.Task[None]:
        """Return the task that takes up states of a version; one at a time for each version."""
        before = self._bringing.get(base)
        task = asyncio.get_running_loop().create_task(self._take_up(base, sequences, before), name=f"weights {base}")
        self._bringing[base] = task
        task.add_done_callback(lambda done: self._bringing.pop(base) if self._bringing.get(base) is done else None)
        return task

    async def _take_up(self, base: str, sequences: Sequence[int], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        stamp = version_stamp(base, sequences[0])
        # Whatever a foreign version breaks in, this replica goes on serving: every failure is a refusal.
        (failure,) = await asyncio.gather(self._opened(base), return_exceptions=True)
        for sequence in sequences:
            if isinstance(failure, BaseException):
                break
            stamp = version_stamp(base, sequence)
            (failure,) = await asyncio.gather(self._advanced(base, sequence, stamp), return_exceptions=True)
        if isinstance(failure, BaseException):
            self._refuse(stamp, _told(failure))

    async def _advanced(self, base: str, sequence: int, stamp: str) -> None:
        if (series := self._series.get(base)) is None:
            raise VersionMismatchError(f"{base} was let go of while {stamp} was asked for", asked=stamp)
        if stamp not in series.stamps():
            self._refused.pop(stamp, None)
            await asyncio.get_running_loop().run_in_executor(self._advancer, series.advance, sequence)
        self._refused.pop(stamp, None)

    async def _opened(self, base: str) -> None:
        if base in self._series:
            return
        if (number := len(self._series) + len(self._opening & self._wanted)) >= BASES_MAX:
            raise VersionMismatchError(f"{number} versions are held, limit {BASES_MAX}", limit=BASES_MAX, asked=base)
        self._opening.add(base)
        self._refused.pop(base, None)  # it is tried anew
        try:
            series = await asyncio.get_running_loop().run_in_executor(self._opener, self._open, base)
        finally:
            self._opening.discard(base)
        if base not in self._wanted:
            raise VersionMismatchError(f"{base} is not wanted any more", asked=base)
        self._series[base] = series

    def _refuse(self, stamp: str, reason: str) -> None:
        kept = list(self._refused.items())[-(REFUSALS_MAX - 1) :]
        self._refused = dict(kept) | {stamp: reason}


def _told(failure: BaseException) -> str:
    return failure.message if isinstance(failure, RankMeshError) else f"{type(failure).__name__}: {failure}"


def _by_base(stamps: Iterable[str]) -> dict[str, list[int]]:
    """Return version -> numbers of its states, ascending."""
    found: dict[str, list[int]] = {}
    for base, sequence in sorted(map(parse_stamp, dict.fromkeys(stamps))):
        found.setdefault(base, []).append(sequence)
    return found
