"""Requests between their headers and admission: a burst is refused at the door, not after all of its bodies."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from services.ingress.approach import SECONDS_MAX
from services.ingress.fairness import Caller
from services.ingress.http import create_app
from services.ingress.question import RankQuestion
from shared.errors import OverloadedError
from tests.helpers.admission import HandClock, ask, poisson, rank_gate, simulate
from tests.helpers.fake_stations import FakeMesh

RATE = 30
BURST = 200
RANK = {"user_id": 42, "candidates": [3, 1, 2]}


def measured(clock: HandClock) -> Any:
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(2 * RATE, 0, 10, 1, ask()))
    return gate


def let_by(gate: Any, held: ExitStack, number: int, tenant: str = "") -> int:
    """Return how many of so many at once are let by on their headers."""
    passed = 0
    for _ in range(number):
        try:
            held.enter_context(gate.approach(tenant))
        except OverloadedError:
            continue
        passed += 1
    return passed


def let_in(gate: Any, held: ExitStack, number: int) -> int:
    """Return how many of so many at once are admitted."""
    passed = 0
    for _ in range(number):
        try:
            held.enter_context(gate.admit(ask()))
        except OverloadedError:
            continue
        passed += 1
    return passed


def test_of_a_burst_as_many_are_let_by_as_would_be_let_in() -> None:
    clock = HandClock()
    gate = measured(clock)
    with ExitStack() as held:
        would_be_in = let_in(gate, held, BURST)
    with ExitStack() as held:
        passed = let_by(gate, held, BURST)
    assert 3 < would_be_in < BURST / 2
    assert abs(passed - would_be_in) <= 1


def test_before_anything_is_measured_a_burst_is_bounded_too() -> None:
    with ExitStack() as held:
        assert 3 < let_by(rank_gate(HandClock(), work_start=12), held, BURST) <= 12


def test_who_is_admitted_is_not_counted_twice() -> None:
    clock = HandClock()
    gate = measured(clock)
    with ExitStack() as held:
        alone = let_in(gate, held, BURST)
    with ExitStack() as held:
        passed = 0
        for _ in range(BURST):
            try:
                approach = held.enter_context(gate.approach(""))
                held.enter_context(gate.admit(ask(), approach))
            except OverloadedError:
                continue
            passed += 1
        assert passed == alone
        assert len(gate._approaching) == 0


def test_who_was_let_by_is_not_refused_for_those_behind() -> None:
    clock = HandClock()
    gate = measured(clock)
    with ExitStack() as held:
        approaches = []
        for _ in range(BURST):
            try:
                approaches.append(held.enter_context(gate.approach("")))
            except OverloadedError:
                break
        for approach in approaches[:-1]:
            held.enter_context(gate.admit(ask(), approach))


def test_who_goes_without_being_admitted_leaves_room() -> None:
    clock = HandClock()
    gate = measured(clock)
    for _ in range(3):
        with ExitStack() as held:
            assert let_by(gate, held, BURST) > 3
    assert len(gate._approaching) == 0


def test_a_slow_body_holds_no_place() -> None:
    clock = HandClock()
    gate = measured(clock)
    with ExitStack() as held:
        first = let_by(gate, held, BURST)
        clock.set(clock.monotonic_s() + SECONDS_MAX / 2)
        meanwhile = let_by(gate, held, BURST)
        assert meanwhile <= RATE * SECONDS_MAX / 2  # as many as get done in that time
        clock.set(clock.monotonic_s() + SECONDS_MAX / 2)
        assert let_by(gate, held, BURST) == first
        assert gate._approaching.of("") == first + meanwhile


def test_a_burst_of_one_tenant_leaves_another_its_share() -> None:
    clock = HandClock()
    gate = measured(clock)
    quiet = Caller("quiet", "feed")
    for _ in range(4):
        with ExitStack() as held:
            held.enter_context(gate.admit(ask(caller=quiet)))
    with ExitStack() as held:
        loud = let_by(gate, held, BURST, "loud")
        assert loud > 3
        assert let_by(gate, held, 1, "quiet") == 1


def test_who_comes_no_faster_than_is_served_is_no_queue_however_long_the_way() -> None:
    clock = HandClock()
    gate, served_per_s, way_s = rank_gate(clock), 300, 0.09
    simulate(gate, clock, poisson(0.9 * served_per_s, 0, 5, 1, ask(60)), service_s=2 / served_per_s)
    begin_s, per_s = clock.monotonic_s(), 0.7 * served_per_s
    coming: deque[tuple[float, ExitStack]] = deque()
    for number in range(100):
        at_s = begin_s + number / per_s
        clock.set(at_s)
        while coming and coming[0][0] <= at_s - way_s:
            coming.popleft()[1].close()
        coming.append((at_s, held := ExitStack()))
        assert let_by(gate, held, 1) == 1, f"request {number}, {len(gate._approaching)} before it"
    assert len(gate._approaching) >= int(way_s * per_s)
    with ExitStack() as held:
        assert let_by(gate, held, BURST) < BURST / 2  # but many at once are one
    for _, held in coming:
        held.close()


def test_tenants_beyond_those_told_apart_are_counted_as_the_one_that_they_are() -> None:
    clock = HandClock()
    gate = rank_gate(clock, callers_max=2)
    simulate(gate, clock, poisson(2 * RATE, 0, 10, 1, ask(caller=Caller("quiet", "feed"))))
    with ExitStack() as held:
        held.enter_context(gate.admit(ask(caller=Caller("second", "feed"))))
    with ExitStack() as held:
        assert sum(let_by(gate, held, 1, f"new-{number}") for number in range(BURST)) > 3
        assert let_by(gate, held, 1, "quiet") == 1


async def test_a_burst_is_refused_before_its_bodies_are_read() -> None:
    clock = HandClock()
    mesh = FakeMesh(clock=clock)
    simulate(mesh.ingress.rank_gate, clock, poisson(2 * RATE, 0, 10, 1, ask()))
    arrives, read = asyncio.Event(), []

    async def body() -> Any:
        await arrives.wait()
        read.append(1)
        yield b"{"

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(mesh.ingress)), base_url="http://mesh"
    ) as client:
        headers = {"content-type": "application/json"}
        burst = [asyncio.create_task(client.post("/v1/rank", content=body(), headers=headers)) for _ in range(BURST)]
        refused = 0
        for _ in range(200):  # turns of the loop, in which no body arrives
            await asyncio.sleep(0)
            refused = sum(each.done() for each in burst)
        assert not read
        assert refused > BURST / 2
        arrives.set()
        statuses = [(await each).status_code for each in burst]
    await mesh.ingress.aclose()
    assert statuses.count(429) == refused
    assert len(read) == BURST - refused


async def test_one_body_is_looked_at_in_each_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    turn, turns = 0, []
    parse = RankQuestion.parse

    def counted(*args: Any) -> RankQuestion:
        turns.append(turn)
        return parse(*args)

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(RankQuestion, "parse", counted)
    mesh = FakeMesh()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(mesh.ingress)), base_url="http://mesh"
    ) as client:
        counting = asyncio.create_task(count())
        answers = await asyncio.gather(*(client.post("/v1/rank", json=RANK) for _ in range(5)))
        counting.cancel()
    await mesh.ingress.aclose()
    assert [answer.status_code for answer in answers] == [200] * 5
    assert len(set(turns)) == 5
