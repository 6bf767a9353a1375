"""Worlds of the simulator keep every rule; the simulator itself repeats a seed to the letter and finds the same again.

The long form is ``make sim``.
"""

from __future__ import annotations

import asyncio
from typing import get_args

import pytest

from cluster.simulation.__main__ import main, shrink
from cluster.simulation.checks import check
from cluster.simulation.loop import LoopExecutor, SimulatedLoop, StuckError, run_simulated
from cluster.simulation.mesh import Report, simulate
from cluster.simulation.network import WireConfig
from cluster.simulation.world import Ask, FaultKind, World, draw_world
from shared.clock import LoopClock


@pytest.mark.parametrize("first", range(0, 60, 6))
def test_worlds_keep_every_rule(first: int) -> None:
    broken = {seed: rules for seed in range(first, first + 6) if (rules := check(simulate(draw_world(seed))))}
    assert not broken


def test_a_replica_that_falls_silent_twice_loses_nothing_that_arrived() -> None:
    assert check(simulate(draw_world(411))) == []


def digest(report: Report) -> list[object]:
    answers = [
        (each.ask, each.ended_s, each.body and each.body["candidates"], repr(each.error)) for each in report.outcomes
    ]
    return [*answers, report.calls, report.peaks, report.taken, report.stored]


@pytest.mark.parametrize("seed", [4, 17])
def test_a_seed_is_repeated_to_the_letter(seed: int) -> None:
    assert digest(simulate(draw_world(seed))) == digest(simulate(draw_world(seed)))


def test_the_worlds_meet_what_they_are_for() -> None:
    """A simulator whose requests are all well, or all fail, finds nothing."""
    reports = [simulate(draw_world(seed)) for seed in range(300, 312)]
    bodies = [outcome.body for report in reports for outcome in report.outcomes if outcome.body is not None]
    errors = {type(outcome.error).__name__ for report in reports for outcome in report.outcomes}
    versions = {body["weights_version"] for body in bodies}
    levels = {row["speculative"] for body in bodies for row in body["candidates"]}
    marks = {mark.partition(":")[0] for body in bodies for mark in body["degraded"]}
    assert {version.partition("+")[0] for version in versions} == {"v1", "v2"}
    assert any("+" in version for version in versions), "and deltas"
    assert levels == {"none", "exact"}
    assert {body["tier"] for body in bodies} == {"full", "light"}
    assert {"OverloadedError", "DeadlineExceededError"} <= errors
    assert len(marks) >= 3
    assert sum(not body["degraded"] for body in bodies) > len(bodies) / 2


def test_every_kind_of_trouble_is_drawn() -> None:
    worlds = [draw_world(seed) for seed in range(150)]
    assert {fault.kind for world in worlds for fault in world.faults} == set(get_args(FaultKind))
    assert {fault.station for world in worlds for fault in world.faults if fault.kind == "clock"} == {
        "ingress", "owner", "sequence", "speculative",
    }  # fmt: skip
    for share in ("lost_share", "lost_cancel_share", "doubled_share"):
        assert any(getattr(world.wire, share) for world in worlds), share
    assert any(world.forgets and world.rollout is not None and world.faults for world in worlds)
    silent = [[fault for fault in world.faults if fault.kind == "silent"] for world in worlds]
    assert any(len({(fault.at_s, fault.station) for fault in faults}) < len(faults) for faults in silent)


def test_time_jumps_and_a_loop_that_cannot_go_on_says_so() -> None:
    async def sleep(loop: SimulatedLoop) -> float:
        await LoopClock(loop, 1_000.0).sleep_s(3_600.0)
        return loop.time()

    async def wait_for_ever(loop: SimulatedLoop) -> None:
        await loop.create_future()

    async def turn_for_ever(loop: SimulatedLoop) -> None:
        def turn() -> None:
            loop.call_soon(turn)

        turn()
        await loop.create_future()

    assert run_simulated(sleep) == 3_600.0
    with pytest.raises(StuckError, match="no timer"):
        run_simulated(wait_for_ever)
    with pytest.raises(StuckError, match="turned"):
        run_simulated(turn_for_ever)


def test_the_worker_of_a_loop_takes_one_piece_at_a_time_and_drops_what_is_cancelled() -> None:
    ran: list[int] = []

    async def work(loop: SimulatedLoop) -> float:
        executor = LoopExecutor(loop, lambda: 1.0)
        futures = [executor.submit(ran.append, number) for number in range(4)]
        futures[2].cancel()
        await asyncio.wrap_future(futures[3], loop=loop)
        return loop.time()

    assert run_simulated(work) == 3.0
    assert ran == [0, 1, 3]


def test_a_world_that_breaks_a_rule_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    guilty = 3

    def broken(report: Report) -> list[str]:
        return ["a rule"] if any(ask.user == guilty for ask in report.world.asks) else []

    monkeypatch.setattr("cluster.simulation.__main__.check", broken)
    monkeypatch.setattr("cluster.simulation.__main__.simulate", Report)
    world = next(world for seed in range(50) if broken(Report(world := draw_world(seed))))
    small = shrink(world)
    assert [ask.user for ask in small.asks] == [guilty]
    assert (small.faults, small.appends, small.rollout, small.forgets) == ((), (), None, ())
    assert (small.wire.lost_share, small.wire.lost_cancel_share, small.wire.doubled_share) == (0.0, 0.0, 0.0)


def test_the_command_says_which_seed_and_how_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--seed", "5", "--count", "1", "--jobs", "1"]) == 0
    assert "1 worlds from seed 5, 0 broke a rule" in capsys.readouterr().out
    monkeypatch.setattr("cluster.simulation.__main__.check", lambda report: ["something is wrong"])
    monkeypatch.setattr("cluster.simulation.__main__.simulate", lambda world: world)
    assert main(["--seed", "5", "--count", "2", "--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert "something is wrong" in said
    assert "make sim SEED=5 N=1" in said
    assert "make sim SEED=6 N=1" in said


def test_a_smaller_world_always_asks_something() -> None:
    world = World(1, WireConfig(), 1, 0.01, (Ask(0.0, 0, 1, (1,), 100),))
    assert all(smaller.asks for smaller in draw_world(7).smaller())
    assert world.smaller() == []


def test_every_way_of_a_roll_out_is_drawn() -> None:
    worlds = [draw_world(seed) for seed in range(150)]
    rollouts = [world.rollout for world in worlds if world.rollout is not None]
    assert {rollout.flaw for rollout in rollouts} == {"", "refused", "failing"}
    assert {bool(rollout.share) for rollout in rollouts} == {True, False}
    assert {rollout.back_at_s is None for rollout in rollouts} == {True, False}
    assert any(world.deltas_s and world.rollout is not None and world.faults for world in worlds)
    assert {world.load_s > 0 for world in worlds} == {world.deaf_share > 0 for world in worlds} == {True, False}


def test_roll_outs_end_in_every_way() -> None:
    ended = [simulate(draw_world(seed)).ended for seed in (11, 14, 18, 28, 592)]
    assert {order.rollout.phase for order in ended} == {"served", "rolled_back", "refused"}
    reasons = [order.rollout.reason for order in ended]
    assert any("of its answers are degraded or failed" in reason for reason in reasons), reasons
    assert any("cannot read v2" in reason for reason in reasons), reasons
    assert any(order.version.startswith("v1+") for order in ended), "deltas serve too"
