"""What happens in one world, drawn from its seed: plain data, so that it can be printed and made smaller."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, TypeVar

from cluster.simulation.network import WireConfig

FaultKind: TypeAlias = Literal[
    "kill", "silent", "slow", "failing", "far", "clock", "store_down", "store_silent", "store_slow"
]

ItemT = TypeVar("ItemT")

FIRST, SECOND = "v1", "v2"
"""Weights versions."""

NUM_SHARDS = 2
NUM_INGRESS = 2
TIERS = ("full", "light")
STATIONS = (
    "preprocess",
    "sequence",
    *(f"embedding:{shard}" for shard in range(NUM_SHARDS)),
    "speculative",
    "foundation",
    *(f"ranking:{tier}" for tier in TIERS),
)
USERS = 6
KEYS = 24
JUMP_S = 20.0
"""Clocks jump by less than a deletion holds off embeddings of requests that were under way (``forget_margin_s``)."""

END_S = 2.0
"""Requests arrive and faults begin before this time; half a second later all faults are over."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One rank request.

    Args:
        at_s: When it is sent.
        ingress: Which ingress replica gets it.
        user: Who asks.
        candidates: Distinct.
        deadline_ms: Budget.
        patience_s: After which its client goes away; None: it stays.
    """

    at_s: float
    ingress: int
    user: int
    candidates: tuple[int, ...]
    deadline_ms: int
    patience_s: float | None = None


@dataclass(frozen=True, slots=True)
class Append:
    """One event that is appended.

    Args:
        at_s: When.
        ingress: Which ingress replica gets it.
        user: Whose: not one of those who rank, so that their histories are known.
        event: Its id.
    """

    at_s: float
    ingress: int
    user: int
    event: int


@dataclass(frozen=True, slots=True)
class Forget:
    """One user who is deleted.

    Args:
        at_s: When.
        ingress: Which ingress replica is asked.
        user: Who: one of those who rank.
    """

    at_s: float
    ingress: int
    user: int


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong for a while.

    Args:
        at_s: When.
        kind: What; ``failing``: every replica of the station answers every call with an error; ``far``: every way to
            and from the station is longer; ``clock``: the wall clock of a replica jumps, and back.
        station: Whose replica; "" for the store.
        replica: Which of its replicas.
        duration_s: How long; of a killed replica, until its successor is there.
        slow_s: How much longer every call, or way, takes.
        skew_s: By how far a clock jumps.
    """

    at_s: float
    kind: FaultKind
    station: str = ""
    replica: int = 0
    duration_s: float = 0.3
    slow_s: float = 0.0
    skew_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """A roll-out of the second version.

    Args:
        at_s: When it is asked for.
        share: Share of the users that get it first; 0: all at once.
        watch_s: How long it is watched before all get it.
        back_at_s: When a roll-back is asked for; None: it is not.
        flaw: What is wrong with the version; ``refused``: a station cannot read it; ``failing``: it can, and then no
            call of the station with it is answered.
        station: Which.
    """

    at_s: float
    share: float = 0.0
    watch_s: float = 0.0
    back_at_s: float | None = None
    flaw: Literal["", "refused", "failing"] = ""
    station: str = ""


@dataclass(frozen=True, slots=True)
class World:
    """All that happens.

    Args:
        seed: Draws what is not written here: delays, losses, choices of replicas.
        wire: How calls travel.
        num_replicas: Replicas of every station.
        work_s: Longest time of one network pass.
        asks: Requests.
        appends: Events.
        faults: What goes wrong.
        rollout: Of the second weights version; None: there is none.
        forgets: Users who are deleted.
        deltas_s: When each delta of the first version comes.
        load_s: Longest time that a replica takes to read a version.
        deaf_share: Share of orders to ingress replicas of which nothing is heard.
    """

    seed: int
    wire: WireConfig
    num_replicas: int
    work_s: float
    asks: tuple[Ask, ...]
    appends: tuple[Append, ...] = ()
    faults: tuple[Fault, ...] = ()
    rollout: Rollout | None = None
    forgets: tuple[Forget, ...] = ()
    deltas_s: tuple[float, ...] = ()
    load_s: float = 0.0
    deaf_share: float = 0.0

    def smaller(self) -> list[World]:
        """Return the worlds with one thing less, the largest cuts first."""
        worlds = [replace(self, faults=()), replace(self, rollout=None), replace(self, appends=())]
        worlds += [replace(self, forgets=()), replace(self, deltas_s=()), replace(self, deaf_share=0.0)]
        worlds += [replace(self, load_s=0.0), replace(self, deltas_s=self.deltas_s[1:])]
        if self.rollout is not None:
            plainer = (replace(self.rollout, back_at_s=None), replace(self.rollout, share=0.0, watch_s=0.0))
            worlds += [replace(self, rollout=rollout) for rollout in plainer]
        worlds.append(replace(self, wire=replace(self.wire, lost_share=0.0, lost_cancel_share=0.0)))
        worlds.append(replace(self, wire=replace(self.wire, doubled_share=0.0)))
        worlds += [replace(self, asks=asks) for asks in _cuts(self.asks)]
        worlds += [replace(self, faults=faults) for faults in _cuts(self.faults)]
        worlds += [replace(self, appends=appends) for appends in _cuts(self.appends)]
        return [world for world in worlds if world != self and world.asks]


def _cuts(items: tuple[ItemT, ...]) -> list[tuple[ItemT, ...]]:
    """Return the halves of a list, and the list without each of its items."""
    half = len(items) // 2
    return [items[:half], items[half:], *(items[:i] + items[i + 1 :] for i in range(len(items)))]


def draw_world(seed: int) -> World:
    """Draw a world; some kinds of trouble are off in each, so that the others meet."""
    rng = random.Random(seed)
    is_lossy, has_burst = rng.random() < 0.3, rng.random() < 0.35
    wire = WireConfig(
        delay_s_max=rng.choice([0.0005, 0.002, 0.01]),
        lost_share=0.02 if is_lossy else 0.0,
        lost_cancel_share=0.1 if is_lossy else 0.0,
        ongoing_max=rng.choice([4, 16]),
        queued_max=rng.choice([4, 32]),
    )
    kinds: list[FaultKind] = ["kill", "silent", "slow", "failing", "store_down", "store_silent", "store_slow"]
    allowed = [kind for kind in kinds if rng.random() < 0.5]
    num_faults = rng.randint(0, 5) if allowed else 0
    world = World(
        seed=seed,
        wire=wire,
        num_replicas=rng.choice([1, 2, 2, 3]),
        work_s=rng.choice([0.002, 0.01, 0.03]),
        asks=tuple(sorted(_draw_asks(rng, has_burst), key=lambda ask: ask.at_s)),
        appends=tuple(
            Append(rng.uniform(0, END_S), rng.randrange(NUM_INGRESS), 1_000 + rng.randrange(3), number)
            for number in range(rng.choice([0, 0, 3]))
        ),
        faults=tuple(_draw_fault(rng, rng.choice(allowed)) for _ in range(num_faults)),
        rollout=Rollout(rng.uniform(0.1, 1.2)) if rng.random() < 0.5 else None,
    )
    return _with_releases(_with_rarer(world))


def _with_rarer(world: World) -> World:
    """Add rarer trouble, drawn by itself."""
    rng = random.Random(-1 - world.seed)
    faults, asks = list(world.faults), list(world.asks)
    forgets: tuple[Forget, ...] = ()
    if rng.random() < 0.15:
        faults.append(replace(_draw_fault(rng, "far"), slow_s=rng.choice([0.005, 0.03, 0.1])))
    if rng.random() < 0.15:
        station = rng.choice(["ingress", "speculative", "sequence"])
        faults.append(replace(_draw_fault(rng, "clock"), station=station, skew_s=rng.choice([-JUMP_S, JUMP_S])))
    doubled_share = 0.1 if rng.random() < 0.1 else 0.0
    if rng.random() < 0.2:
        forgets = (Forget(rng.uniform(0, END_S), rng.randrange(NUM_INGRESS), rng.randrange(1, USERS)),)
    if rng.random() < 0.07:  # a whole station, for long enough that it is left out
        silent = replace(_draw_fault(rng, "silent"), at_s=rng.uniform(0.2, 1.0), duration_s=1.0)
        faults += [replace(silent, replica=replica) for replica in range(world.num_replicas)]
        asks += [_draw_ask(rng, silent.at_s - 0.2 + 0.02 * number) for number in range(24)]
    return replace(
        world,
        wire=replace(world.wire, doubled_share=doubled_share),
        asks=tuple(sorted(asks, key=lambda ask: ask.at_s)),
        faults=tuple(faults),
        forgets=forgets,
    )


def _with_releases(world: World) -> World:
    """Add deltas, and all that may be about a roll-out, drawn by itself."""
    rng = random.Random(-1_000_003 - world.seed)
    rollout, faults, asks = world.rollout, list(world.faults), list(world.asks)
    if rollout is not None and rng.random() < 0.6:
        rollout = replace(rollout, share=rng.choice([0.2, 0.5, 0.8]), watch_s=rng.choice([0.1, 0.3, 0.6]))
    if rollout is not None and rng.random() < 0.3:
        back_at_s = rollout.at_s + rng.uniform(0.0, 1.5)
        rollout = replace(rollout, back_at_s=back_at_s)
        asks += [_draw_ask(rng, back_at_s + 0.02 * number) for number in range(8)]
    if rollout is not None and rng.random() < 0.2:
        flaw: Literal["refused", "failing"] = rng.choice(["refused", "failing"])
        able = ["preprocess", "embedding:0", "ranking:full"] if flaw == "failing" else STATIONS
        rollout = replace(rollout, flaw=flaw, station=rng.choice(able))
        if flaw == "failing" and rollout.share:  # who judges a canary needs answers of it
            asks += [_draw_ask(rng, rollout.at_s + 0.04 * number) for number in range(24)]
    if rollout is not None and rng.random() < 0.2:
        faults.append(replace(_draw_fault(rng, "clock"), station="owner", skew_s=rng.choice([-JUMP_S, JUMP_S])))
    return replace(
        world,
        rollout=rollout,
        faults=tuple(faults),
        asks=tuple(sorted(asks, key=lambda ask: ask.at_s)),
        deltas_s=tuple(sorted(rng.uniform(0, END_S) for _ in range(rng.choice([0, 0, 0, 1, 4])))),
        load_s=rng.choice([0.0, 0.05, 0.3]),
        deaf_share=0.3 if rng.random() < 0.15 else 0.0,
    )


def _draw_ask(rng: random.Random, at_s: float) -> Ask:
    return Ask(
        at_s=at_s,
        ingress=rng.randrange(NUM_INGRESS),
        user=rng.randrange(USERS),
        candidates=tuple(rng.sample(range(KEYS), rng.randint(1, 6))),
        deadline_ms=rng.choice([50, 120, 400, 1_000]),
        patience_s=rng.uniform(0, 0.1) if rng.random() < 0.1 else None,
    )


def _draw_asks(rng: random.Random, has_burst: bool) -> list[Ask]:
    asks = [_draw_ask(rng, rng.uniform(0, END_S)) for _ in range(rng.randint(3, 12))]
    if has_burst:
        at_s = rng.uniform(0, END_S)
        asks += [_draw_ask(rng, at_s + rng.uniform(0, 0.005)) for _ in range(rng.choice([8, 20]))]
    return asks


def _draw_fault(rng: random.Random, kind: FaultKind) -> Fault:
    return Fault(
        at_s=rng.uniform(0, END_S),
        kind=kind,
        station="" if kind.startswith("store") else rng.choice(STATIONS),
        replica=rng.randrange(3),
        duration_s=rng.choice([0.05, 0.3, 1.0]),
        slow_s=rng.choice([0.01, 0.08, 0.4]),
    )
