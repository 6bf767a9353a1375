"""A replica holds what it is told to, answers for each of it, and lets go of nothing before the new is there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.errors import VersionMismatchError, WeightsError
from shared.weights.held import BASES_MAX, HeldVersions, OneVersion


class Numbers:
    """A series whose parts are the stamps themselves; ``last`` is the newest delta in its log."""

    def __init__(self, base: str, last: int) -> None:
        self.base = base
        self.last = last
        self.advanced: list[int] = []
        self.held = [base]

    def advance(self, sequence: int) -> None:
        if sequence > self.last:
            raise WeightsError(f"delta {sequence} is not there")
        if sequence:
            self.advanced.append(sequence)
            self.held.append(f"{self.base}+{sequence}")

    def at(self, stamp: str) -> str:
        if stamp not in self.held:
            raise VersionMismatchError("not held")
        return f"part of {stamp}"

    def stamps(self) -> tuple[str, ...]:
        return tuple(self.held)

    def keep(self, stamps: Collection[str]) -> None:
        self.held = [stamp for stamp in self.held if stamp in stamps or stamp == self.held[-1]]


class Rig:
    """Versions a, b, c, d with ten deltas each; those in ``broken`` do not load, ``gate`` holds loads up."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.broken: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.opened: dict[str, Numbers] = {}
        self.versions = HeldVersions(self.open, pool)
        self.versions.start(["a"])

    def open(self, base: str) -> Numbers:
        assert self.gate.wait(10)
        if base in self.broken:
            raise WeightsError(f"{base} is damaged")
        self.opened[base] = Numbers(base, 10)
        return self.opened[base]


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ThreadPoolExecutor(2) as pool:
        yield Rig(pool)


async def test_old_states_go_when_the_new_ones_are_there(rig: Rig) -> None:
    report = await rig.versions.hold(["a", "a+3", "b"], 10)
    assert report.held == ("a", "a+3", "b")
    for stamp in report.held:
        assert await rig.versions.get(stamp, "s") == f"part of {stamp}"
    assert (await rig.versions.hold(["b", "b+2"], 10)).held == ("b", "b+2")
    assert rig.versions.newest() == "part of b+2"
    with pytest.raises(VersionMismatchError, match=r"s holds weights b, b\+2, asked for a$"):
        await rig.versions.get("a", "s")


async def test_what_cannot_be_had_is_refused_and_the_old_goes_on(rig: Rig) -> None:
    rig.broken = {"b"}
    report = await rig.versions.hold(["b", "a+11"], 10)
    assert report.held == ("a",), "nothing is let go of before all is there"
    assert report.refused == {"b": "b is damaged", "a+11": "delta 11 is not there"}
    assert await rig.versions.get("a", "s") == "part of a"
    rig.broken.clear()
    report = await rig.versions.hold(["a", "b"], 10)
    assert (report.held, report.refused) == (("a", "b"), {})


async def test_a_long_load_holds_nobody_up(rig: Rig) -> None:
    rig.gate.clear()
    report = await rig.versions.hold(["a", "b"], 0.01)
    assert (report.held, report.loading) == (("a",), ("b",))
    assert (await rig.versions.hold(["a", "a+1", "b"], 0.1)).held == ("a", "a+1")
    rig.gate.set()
    assert (await rig.versions.hold(["a+1", "b"], 10)).held == ("a+1", "b")
    assert list(rig.opened) == ["a", "b"], "read once"


async def test_the_order_that_came_last_decides(rig: Rig) -> None:
    """Found by the simulation: an older one, ended later, let go of what the newer had just brought."""
    rig.gate.clear()
    older = asyncio.ensure_future(rig.versions.hold(["a", "b"], 10))
    await asyncio.sleep(0)
    newer = asyncio.ensure_future(rig.versions.hold(["a", "b", "c"], 10))
    rig.gate.set()
    assert (await older).refused == {}
    assert (await newer).body() == {"version": "c", "held": ["a", "b", "c"], "refused": {}, "loading": []}


async def test_an_older_order_forgets_no_reason_of_a_newer(rig: Rig) -> None:
    rig.gate.clear()
    older = asyncio.ensure_future(rig.versions.hold(["a", "b"], 0.2))
    await asyncio.sleep(0)
    refused = {"a+11": "delta 11 is not there"}
    assert (await rig.versions.hold(["a", "a+11"], 0.05)).refused == refused
    assert (await older).refused == refused
    rig.gate.set()


def test_a_start_goes_on_without_what_only_may_be_asked_for(rig: Rig) -> None:
    rig.broken = {"b"}
    starting = HeldVersions(rig.open, ThreadPoolExecutor(1))
    starting.start(["a+2", "b"], needed="a+2")
    report = starting.report()
    assert (report.held, report.refused) == (("a+2",), {"b": "b is damaged"})
    with pytest.raises(WeightsError, match="b is damaged"):
        starting.start(["a+2", "b"], needed="b")
    with pytest.raises(WeightsError, match="b is damaged"):
        starting.start(["a+2", "b"])


def test_a_start_goes_on_without_a_damaged_delta_that_does_not_serve(rig: Rig) -> None:
    starting = HeldVersions(rig.open, ThreadPoolExecutor(1))
    starting.start(["a+2", "a+11"], needed="a+2")
    report = starting.report()
    assert (report.held, report.refused) == (("a+2",), {"a+11": "delta 11 is not there"})
    with pytest.raises(WeightsError, match="delta 11"):
        HeldVersions(rig.open, ThreadPoolExecutor(1)).start(["a+11"], needed="a+11")


async def test_a_version_that_is_tried_anew_is_not_refused_for_what_was(rig: Rig) -> None:
    rig.broken = {"b"}
    assert (await rig.versions.hold(["a", "b"], 10)).refused == {"b": "b is damaged"}
    rig.broken.clear()
    rig.gate.clear()
    report = await rig.versions.hold(["a", "b"], 0.05)
    assert (report.refused, report.loading) == ({}, ("b",))
    rig.gate.set()
    assert (await rig.versions.hold(["a", "b"], 10)).held == ("a", "b")


async def test_versions_that_are_read_in_vain_take_no_place(rig: Rig) -> None:
    rig.gate.clear()
    for base in ("b", "c"):
        await rig.versions.hold(["a", base], 0.01)
        await rig.versions.hold(["a"], 0.01)
    await rig.versions.hold(["a", "d"], 0.01)
    rig.gate.set()
    report = await rig.versions.hold(["a", "d"], 10)
    assert (report.held, report.refused) == (("a", "d"), {})


def test_a_start_can_be_brought_up_to_date(rig: Rig) -> None:
    starting = HeldVersions(rig.open, ThreadPoolExecutor(1))
    starting.start(["a+2", "b"])
    opened = dict(rig.opened)
    starting.start(["a+1", "a+4", "c"], needed="a+4")  # it cannot go back to a+1
    assert starting.report().held == ("a+4", "c")
    assert rig.opened["a"] is opened["a"], "read once"


async def test_a_request_ahead_is_caught_up_with(rig: Rig) -> None:
    parts = await asyncio.gather(*(rig.versions.get("a+4", "s") for _ in range(5)))
    assert parts == ["part of a+4"] * 5
    assert rig.opened["a"].advanced == [4], "once for all who wait"
    for stamp in ("a+3", "b", "b+1"):  # behind, or of a version that nobody ordered
        with pytest.raises(VersionMismatchError):
            await rig.versions.get(stamp, "s")
    with pytest.raises(VersionMismatchError):
        await rig.versions.get("a+11", "s")


async def test_no_more_versions_than_fit(rig: Rig) -> None:
    names = ["a", "b", "c", "d"]
    assert len(names) == BASES_MAX + 1
    report = await rig.versions.hold(names, 10)
    assert len(report.held) == BASES_MAX
    (reason,) = report.refused.values()
    assert f"limit {BASES_MAX}" in reason


async def test_one_version() -> None:
    fixed = OneVersion("v", 7)
    assert await fixed.get("v", "s") == fixed.newest() == 7
    assert fixed.report().body() == {"version": "v", "held": ["v"], "refused": {}, "loading": []}
    with pytest.raises(VersionMismatchError, match=r"s holds weights v, asked for v\+1"):
        await fixed.get("v+1", "s")
