"""Roll-outs over a made-up mesh: what is served, what is held, what is refused, and why; no clock, no Ray."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.canary import CanaryConfig
from cluster.desk import FolderDesk, RolloutRequest
from cluster.rollout import Rollouts, UpdatesConfig
from services.ingress.serving import ServingOrder
from shared.clock import ManualClock
from shared.log import JsonLogger
from shared.weights import WeightStore
from shared.weights.delta_log import DeltaLog
from shared.weights.deltas import Delta, parse_stamp

STATIONS = ("ingress", "preprocess", "embedding:0")


class FakeMesh:
    """One replica a station; holds what it is told unless a test says otherwise.

    Attributes:
        refuses: (station, stamp) -> reason.
        silent: Stations that do not answer.
        slow: Versions that nobody has read yet.
        took_s: What it takes a station to hold something.
        holds: Station and time of each order to hold something.
        in_flight: Stamps that requests of the ingress use.
        reports: What the ingress adds to its report.
        published: What a replica that starts would find.
        is_deaf: The ingress does not take orders.
    """

    def __init__(self) -> None:
        self.held: dict[str, set[str]] = {name: {"v"} for name in STATIONS}
        self.refuses: dict[tuple[str, str], str] = {}
        self.silent: set[str] = set()
        self.slow: set[str] = set()
        self.in_flight: list[str] = []
        self.reports: dict[str, Any] = {}
        self.served: list[ServingOrder] = []
        self.published: ServingOrder | None = None
        self.holds: list[tuple[str, float]] = []
        self.is_deaf = False
        self.took_s = 0.0
        self.clock = ManualClock()

    def stations(self) -> Sequence[str]:
        return STATIONS

    async def hold(self, station: str, stamps: Sequence[str], wait_s: float) -> Sequence[Mapping[str, Any]]:
        self.holds.append((station, self.clock.monotonic_s()))
        await self.clock.sleep_s(self.took_s)
        assert self.published is not None
        assert set(stamps) <= set(self.published.held), "a replica that starts now would not know of them"
        if station in self.silent:
            return [{"error": "it did not answer in time"}]
        refused = {stamp: reason for (who, stamp), reason in self.refuses.items() if who == station}
        here = {stamp for stamp in stamps if stamp not in refused and parse_stamp(stamp)[0] not in self.slow}
        self.held[station] = here if here == set(stamps) else self.held[station] | here
        return [{"held": sorted(self.held[station]), "refused": refused, "loading": sorted(self.slow)}]

    async def serve(self, order: ServingOrder) -> Sequence[Mapping[str, Any]]:
        for stamp in (order.version, order.canary):
            if stamp is not None:
                missing = [name for name in STATIONS if stamp not in self.held[name]]
                assert missing == [], f"{stamp} is served and not held by {missing}"
        self.served.append(order)
        if self.is_deaf:
            return [{"error": "it did not answer in time"}]
        return [{"in_flight": list(self.in_flight), **self.reports}]

    def publish(self, order: ServingOrder) -> None:
        self.published = order


class Rig:
    """A store with versions v and w, their logs, and the loop over a made-up mesh."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = WeightStore(folder / "weights")
        for version in ("v", "w"):
            with self.store.writer(version) as writer:
                writer.add_json("model", {})
                writer.commit()
        self.mesh = FakeMesh()
        self.clock = self.mesh.clock
        config = UpdatesConfig(
            load_timeout_s=100,
            busy_share=0.1,
            spread_s_max=10,
            canary=CanaryConfig(answers_min=10, labels_min=10),
        )
        logger = JsonLogger(stream=io.StringIO())
        self.loop = Rollouts(FolderDesk(self.store, folder), "v", self.mesh, config, self.clock, logger)

    def append(self, base: str, num: int = 1) -> None:
        log = DeltaLog(self.store, base)
        for _ in range(num):
            sequence, crc = log.last()
            log.append(Delta(base, sequence + 1, crc, "now"))

    def ask(self, action: Any = "rollout", version: str = "w", **fields: Any) -> None:
        RolloutRequest(id="r1", action=action, version=version, **fields).write(self.folder)

    async def rounds(self, num: int = 1) -> None:
        for _ in range(num):
            await self.loop.round()

    async def tried(self) -> str:
        """Do a round that takes its time; returns what is served then."""
        doing = asyncio.create_task(self.loop.round())
        await self.clock.advance(100)
        await doing
        return self.loop.order.version

    @property
    def rollout(self) -> Any:
        return self.loop.order.rollout


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


async def test_nothing_new_costs_no_call(rig: Rig) -> None:
    await rig.rounds(3)
    assert (rig.mesh.holds, rig.mesh.served) == ([], [])


async def test_deltas_are_served_once_all_hold_them(rig: Rig) -> None:
    rig.append("v", 3)
    rig.mesh.silent = {"embedding:0"}
    await rig.rounds(2)
    assert rig.loop.order.version == "v"
    assert rig.loop.order.updates.reason == "embedding:0: it did not answer in time"
    rig.mesh.silent = set()
    rig.append("v", 2)
    await rig.rounds()
    assert rig.loop.order.version == "v+5", "what came meanwhile is taken together"
    assert (rig.loop.order.updates.newest, rig.loop.order.updates.served, rig.loop.order.updates.reason) == (5, 5, "")
    holds = len(rig.mesh.holds)
    await rig.rounds(3)
    assert len(rig.mesh.holds) == holds


async def test_stations_take_a_state_up_in_turn_with_pauses_by_what_it_took(rig: Rig) -> None:
    rig.mesh.took_s, begin_s = 0.1, rig.clock.monotonic_s()
    rig.append("v")
    assert await rig.tried() == "v+1"
    at_s = [(name, round(told_s - begin_s, 3)) for name, told_s in rig.mesh.holds]
    assert at_s == [(name, 1.0 * number) for number, name in enumerate(STATIONS)], "each busy for a tenth of the time"


async def test_the_pauses_have_a_limit(rig: Rig) -> None:
    rig.mesh.took_s, begin_s = 0.8, rig.clock.monotonic_s()
    rig.append("v")
    assert await rig.tried() == "v+1"
    at_s = [round(told_s - begin_s, 3) for _, told_s in rig.mesh.holds]
    assert at_s == [0.0, 8.0, 11.6], "7.2 s and then what is left of 10 s"


async def test_what_somebody_asks_for_ends_the_pauses(rig: Rig) -> None:
    rig.mesh.took_s = 0.1
    rig.append("v")
    doing = asyncio.create_task(rig.loop.round())
    await rig.clock.advance(0.5)
    rig.ask()
    await rig.clock.advance(0.6)
    await rig.clock.advance(0.2)
    assert doing.done()
    begin_s = rig.clock.monotonic_s()
    assert await rig.tried() == "w"
    assert rig.mesh.holds[-1][1] - begin_s == pytest.approx(0.2), "a version is not spread"


async def test_a_loop_that_ends_asks_nobody_any_more(rig: Rig) -> None:
    rig.mesh.took_s = 0.1
    rig.append("v")
    doing = asyncio.create_task(rig.loop.round())
    await rig.clock.advance(0.05)
    doing.cancel()
    await rig.clock.advance(100)
    assert (doing.cancelled(), len(rig.mesh.holds), rig.mesh.held["ingress"]) == (True, 1, {"v"})


async def test_states_in_use_are_held(rig: Rig) -> None:
    rig.append("v")
    rig.mesh.in_flight = ["v"]
    await rig.rounds()
    for expected in ({"v", "v+1", "v+2"}, {"v", "v+1", "v+2", "v+3"}):
        rig.append("v")
        await rig.rounds()
        assert rig.mesh.held["preprocess"] == expected
    rig.mesh.in_flight = []
    rig.append("v", 2)
    await rig.rounds()
    rig.append("v")
    await rig.rounds()
    assert rig.mesh.held["preprocess"] == {"v+3", "v+5", "v+6"}


async def test_an_ingress_that_was_not_told_keeps_its_states_held(rig: Rig) -> None:
    rig.mesh.is_deaf = True
    for _ in range(3):
        rig.append("v")
        await rig.rounds()
    assert {"v", "v+1", "v+2", "v+3"} <= rig.mesh.held["preprocess"]
    rig.mesh.is_deaf = False
    rig.append("v")
    await rig.rounds()
    assert rig.mesh.served[-1].version == "v+4"
    rig.append("v")
    await rig.rounds()
    assert rig.mesh.held["preprocess"] == {"v+3", "v+4", "v+5"}


async def test_a_delta_that_is_refused_is_not_served(rig: Rig) -> None:
    rig.append("v")
    rig.mesh.refuses = {("embedding:0", "v+1"): "row must be in [0, 41)"}
    await rig.rounds(2)
    assert rig.loop.order.version == "v"
    assert rig.loop.order.updates.reason == "embedding:0: row must be in [0, 41)"


async def test_a_version_for_all_at_once_and_back(rig: Rig) -> None:
    rig.append("v", 2)
    await rig.rounds()
    rig.ask()
    rig.mesh.slow = {"w"}
    await rig.rounds(2)
    assert (rig.rollout.phase, rig.loop.order.version) == ("loading", "v+2")
    assert "is reading it" in rig.rollout.reason
    rig.append("v")
    rig.mesh.slow = set()
    rig.append("w")
    await rig.rounds(2)
    assert (rig.rollout.phase, rig.rollout.version, rig.rollout.previous) == ("served", "w", "v+3")
    await rig.rounds()
    assert rig.loop.order.version == "w+1", "its deltas are followed now"
    assert "v+3" in rig.mesh.held["preprocess"]
    rig.ask("rollback", "")
    await rig.rounds(2)
    assert (rig.rollout.phase, rig.loop.order.version) == ("rolled_back", "v+3")
    assert rig.mesh.served[-1].version == "v+3"


@pytest.mark.parametrize("station", STATIONS)
async def test_a_version_that_a_replica_refuses(rig: Rig, station: str) -> None:
    rig.mesh.refuses = {(station, "w"): "rows/item.safetensors has 12 bytes"}
    rig.ask(share=0.1)
    await rig.rounds(2)
    assert (rig.rollout.phase, rig.rollout.reason) == ("refused", f"{station}: rows/item.safetensors has 12 bytes")
    assert (rig.loop.order.version, rig.loop.order.canary) == ("v", None)
    rig.append("v")
    rig.mesh.refuses = {}
    await rig.rounds()
    assert rig.loop.order.version == "v+1"
    assert rig.mesh.held[station] == {"v", "v+1"}, "the refused one is let go of"


async def test_a_version_that_is_not_there_or_takes_too_long(rig: Rig) -> None:
    rig.ask(version="no-such-version")
    await rig.rounds()
    assert rig.rollout.phase == "refused"
    assert "no-such-version" in rig.rollout.reason
    rig.ask()
    rig.mesh.slow = {"w"}
    await rig.rounds()
    await rig.clock.advance(101)
    await rig.rounds()
    assert rig.rollout.phase == "refused"
    assert "not every replica holds it after 100 s" in rig.rollout.reason


async def canary(rig: Rig) -> None:
    rig.ask(share=0.25, watch_s=60)
    await rig.rounds()
    assert (rig.rollout.phase, rig.loop.order.canary, rig.loop.order.share) == ("canary", "w", 0.25)


async def test_a_canary_is_given_to_all_after_its_time(rig: Rig) -> None:
    await canary(rig)
    rig.append("w")
    rig.append("v")
    await rig.rounds()
    assert (rig.loop.order.version, rig.loop.order.canary) == ("v+1", "w+1"), "both follow their deltas"
    rig.mesh.reports = {"outcomes": {"v": {"whole": 100}, "w": {"whole": 30}}}
    await rig.clock.advance(61)
    await rig.rounds()
    assert (rig.rollout.phase, rig.loop.order.version, rig.loop.order.canary) == ("served", "w+1", None)
    await rig.rounds()
    assert rig.mesh.served[-1].version == "w+1"


async def test_a_canary_with_bad_answers_is_taken_back(rig: Rig) -> None:
    await canary(rig)
    rig.mesh.reports = {"outcomes": {"v": {"whole": 100}, "w": {"whole": 8, "degraded": 2}}}
    await rig.rounds()
    assert rig.rollout.phase == "rolled_back"
    assert "20.0% of its answers are degraded or failed, 0.0% of the others" in rig.rollout.reason
    assert rig.loop.order.canary is None
    await rig.rounds()
    assert (rig.mesh.served[-1].version, rig.mesh.served[-1].canary) == ("v", None)


async def test_a_canary_can_be_taken_back_by_hand(rig: Rig) -> None:
    await canary(rig)
    rig.ask("rollback", "")
    await rig.rounds()
    assert (rig.rollout.phase, rig.rollout.reason, rig.loop.order.canary) == ("rolled_back", "asked for", None)


@pytest.mark.parametrize("by_hand", [True, False])
async def test_a_canary_that_is_taken_back_is_held_until_no_ingress_can_ask_for_it(
    rig: Rig, by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulation: replicas let go of it one round before the ingress was told, and requests failed."""
    await canary(rig)
    held_when_told: list[bool] = []
    serve = rig.mesh.serve

    async def told(order: ServingOrder) -> Sequence[Mapping[str, Any]]:
        held_when_told.append("w" in rig.mesh.held["preprocess"])
        return await serve(order)

    monkeypatch.setattr(rig.mesh, "serve", told)
    if by_hand:
        rig.ask("rollback", "")
    else:
        rig.mesh.reports = {"outcomes": {"v": {"whole": 100}, "w": {"degraded": 20}}}
    rig.mesh.is_deaf = by_hand  # and one that is not heard may still do so
    await rig.rounds(2)
    assert rig.loop.order.canary is None
    assert held_when_told == [True, True]
    rig.mesh.is_deaf = False
    await rig.rounds(2)
    assert rig.mesh.served[-1].canary is None
    assert rig.mesh.held["preprocess"] == {"v"}, "and let go of at once then: it is a whole version"


async def test_what_the_ingress_ranked_with_stays_though_two_things_change_at_once(rig: Rig) -> None:
    rig.mesh.slow = {"w"}
    rig.ask(share=0.5, watch_s=1_000)
    await rig.rounds(2)
    rig.append("v")
    rig.mesh.slow = set()
    await rig.rounds(2)
    assert (rig.loop.order.version, rig.loop.order.canary) == ("v+1", "w")
    assert rig.mesh.held["embedding:0"] >= {"v", "v+1", "w"}, "an ingress that starts just now may have read v"
    rig.append("w")
    await rig.rounds(2)
    assert rig.mesh.held["embedding:0"] >= {"v+1", "w", "w+1"}, "and w"


@pytest.mark.parametrize("share", [0.0, 0.25])
async def test_a_version_goes_out_with_its_newest_state(rig: Rig, share: float) -> None:
    """Replicas that still hold a later state of it cannot go back to the one without deltas."""
    rig.append("w", 4)
    rig.ask(share=share, watch_s=1_000)
    await rig.rounds(2)
    assert (rig.loop.order.canary or rig.loop.order.version) == "w+4"
    assert "w" not in rig.mesh.held["preprocess"]
    rig.ask("rollback", "")
    await rig.rounds(2)
    rig.ask(share=share, watch_s=1_000)
    await rig.rounds(2)
    assert (rig.rollout.phase, rig.rollout.reason) == ("canary" if share else "served", "")


async def test_a_roll_back_waits_until_every_replica_holds_the_version(rig: Rig) -> None:
    rig.ask()
    await rig.rounds(2)
    rig.mesh.held["embedding:0"], rig.mesh.slow = {"w"}, {"v"}  # a replica that started since, and reads v again
    rig.ask("rollback", "")
    await rig.rounds(2)
    assert rig.loop.order.version == "w"
    assert (rig.rollout.phase, rig.rollout.reason) == ("loading", "embedding:0: is reading it")
    rig.ask(version="v")
    await rig.rounds()
    assert (rig.rollout.phase, rig.rollout.reason) == ("refused", "v is being gone back to")
    rig.mesh.slow = set()
    await rig.rounds(2)
    assert (rig.loop.order.version, rig.rollout.phase) == ("v", "rolled_back")


async def test_a_roll_back_that_cannot_be_ends(rig: Rig) -> None:
    rig.ask()
    await rig.rounds(2)
    rig.mesh.held["embedding:0"], rig.mesh.refuses = {"w"}, {("embedding:0", "v"): "v is damaged"}
    rig.ask("rollback", "")
    await rig.rounds(2)
    assert (rig.rollout.phase, rig.rollout.reason) == ("loading", "embedding:0: v is damaged")
    await rig.clock.advance(101)
    await rig.rounds()
    assert (rig.rollout.phase, rig.loop.order.version) == ("refused", "w")
    assert rig.rollout.reason == "not every replica holds v after 100 s: embedding:0: v is damaged"


async def test_no_more_versions_are_asked_for_than_replicas_hold(rig: Rig) -> None:
    for version in ("x", "y"):
        with rig.store.writer(version) as writer:
            writer.add_json("model", {})
            writer.commit()
    rig.mesh.is_deaf = True
    for version in ("w", "x", "y"):
        rig.ask(version=version)
        await rig.rounds(2)
    assert (rig.rollout.phase, rig.rollout.version) == ("refused", "y")
    assert "4 versions would be held, limit 3" in rig.rollout.reason
    assert rig.loop.order.version == "x"
    rig.ask("rollback", "")
    await rig.rounds()
    assert (rig.rollout.phase, rig.loop.order.version) == ("rolled_back", "w"), "and the way back is still there"


async def test_who_missed_an_order_is_told_again(rig: Rig) -> None:
    rig.append("v")
    await rig.rounds()
    served, rig.mesh.held["embedding:0"] = len(rig.mesh.served), {"v"}  # a replica that began to serve just then
    await rig.rounds(3)
    assert (rig.mesh.held["embedding:0"], len(rig.mesh.served)) == ({"v"}, served)
    await rig.clock.advance(rig.loop._config.confirm_s)
    await rig.rounds()
    assert "v+1" in rig.mesh.held["embedding:0"]
    assert rig.mesh.served[-1].version == "v+1", "an ingress may have missed its order as well"
    holds = len(rig.mesh.holds)
    await rig.rounds(3)
    assert len(rig.mesh.holds) == holds


class JumpingClock(ManualClock):
    """A wall clock that somebody sets."""

    ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


async def test_a_clock_that_is_set_ends_no_watch_and_no_load(rig: Rig) -> None:
    clock = rig.loop._clock = JumpingClock()
    rig.mesh.slow = {"w"}
    rig.ask(share=0.25, watch_s=60)
    await rig.rounds()
    clock.ahead_s = 1e6
    await rig.rounds()
    assert rig.rollout.phase == "loading"
    rig.mesh.slow = set()
    await rig.rounds()
    clock.ahead_s = 2e6
    await rig.rounds()
    assert (rig.rollout.phase, rig.rollout.reason) == ("canary", ""), "nor does it still read, or not know why"
    clock.ahead_s = -2e6
    await clock.advance(61)
    await rig.rounds()
    assert rig.rollout.phase == "served"


async def test_what_cannot_be_asked_for(rig: Rig) -> None:
    rig.ask("rollback", "")
    await rig.rounds()
    assert (rig.rollout.phase, "no version to go back to" in rig.rollout.reason) == ("refused", True)
    rig.ask(version="nosuch")
    await rig.rounds()
    assert (rig.rollout.phase, rig.rollout.version) == ("refused", "nosuch")
    rig.ask("rollback", "")
    await rig.rounds()
    assert (rig.rollout.phase, rig.rollout.version) == ("refused", "v"), (
        "of the version that serves, not the one before"
    )
    rig.ask(version="v")
    await rig.rounds()
    assert rig.rollout.reason == "it is the version that serves"
    (rig.folder / "rollout.json").write_text("{")
    await rig.rounds()
    assert rig.loop.order.version == "v"
    assert not (rig.folder / "rollout.json").exists()
