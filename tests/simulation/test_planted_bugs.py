"""Some bugs, planted one at a time into production code: the simulator finds each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from cluster.rollout import Rollouts
from cluster.simulation.checks import check
from cluster.simulation.mesh import simulate
from cluster.simulation.world import draw_world
from services.ingress.admission import Gate, RankGate
from services.ingress.leg import Leg
from services.speculative.store import EmbeddingStore
from services.worker import Worker
from shared.breaker import Breakers, Trip
from shared.handle import Call
from shared.hashing import EntityId, store_token

SEEDS_MAX = 500

Plant = Callable[[pytest.MonkeyPatch], None]


def lose_cancellation(patch: pytest.MonkeyPatch) -> None:
    """A request that is over leaves its calls running."""

    def cancel(self: Leg) -> None:
        self.watcher.cancel()

    patch.setattr(Leg, "cancel", cancel)


def cross_results(patch: pytest.MonkeyPatch) -> None:
    """Two pieces of work that wait at the same time get one another's result, each under its own stamp."""
    run = Worker.run
    waiting: dict[Worker, list[asyncio.Future[Any]]] = {}

    async def crossed(self: Worker, deadline: Any, work: Any, *args: Any) -> Any:
        result = await run(self, deadline, work, *args)
        if self._station != "ranking:full":
            return result
        others = waiting.setdefault(self, [])
        if others:
            other = others.pop()
            if not other.done():
                other.set_result(result)
        if self.num_held == 0:
            return result
        mine: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        others.append(mine)
        done, _ = await asyncio.wait({mine}, timeout=0.02)
        if not done:
            others.remove(mine)
            return result
        foreign = mine.result()
        if len(foreign.order) != len(result.order):
            return result
        return replace(result, values=foreign.values, scores=foreign.scores)

    patch.setattr(Worker, "run", crossed)


def serve_stale(patch: pytest.MonkeyPatch) -> None:
    """Speculative embeddings of the version before are read for the one that serves."""

    def key(self: EmbeddingStore, user: EntityId) -> str:
        return f"{self._config.namespace}:spec:{self._config.model_namespace}:{{{store_token(user)}}}"

    patch.setattr(EmbeddingStore, "key", key)


def storm_with_retries(patch: pytest.MonkeyPatch) -> None:
    """No call remembers that it is the second one."""
    patch.setattr(Leg, "retried", property(lambda self: False, lambda self, value: None), raising=False)


def queue_without_bound(patch: pytest.MonkeyPatch) -> None:
    """Admission lets everything in."""
    patch.setattr(Gate, "check", lambda self: None)
    patch.setattr(RankGate, "check", lambda self: None)
    patch.setattr(RankGate, "_check_start", lambda self, work: None)
    patch.setattr(RankGate, "_check_wait", lambda self, work, budget_s, owns: 0.0)
    patch.setattr(RankGate, "_check_share", lambda self, who, work, budget_s, has_room: None)


def outlive_their_user(patch: pytest.MonkeyPatch) -> None:
    """Embeddings of a user who is deleted stay where they are."""

    async def forget(self: EmbeddingStore, user: EntityId) -> bool:
        return False

    patch.setattr(EmbeddingStore, "forget", forget)


def try_without_end(patch: pytest.MonkeyPatch) -> None:
    """Every call is copied to a replica that is left out."""
    try_silent = Breakers.try_silent

    def try_again(self: Breakers, start: Callable[[str], Any]) -> None:
        for known in self._open.values():
            known.next_try_s = self.clock.monotonic_s()
        try_silent(self, start)

    patch.setattr(Breakers, "try_silent", try_again)


def leave_all(patch: pytest.MonkeyPatch) -> None:
    """Whatever is given up goes on, as if it had opened a breaker."""

    def leave(self: Trip, call: Call[Any], stop: Callable[[], object]) -> None:
        self.is_left = True

    patch.setattr(Trip, "given_up", leave)


def let_go_too_early(patch: pytest.MonkeyPatch) -> None:
    """What an order replaces is let go of before the ingress has heard of it."""
    patch.setattr(Rollouts, "_retire", lambda self: None)


def watch_by_the_wall(patch: pytest.MonkeyPatch) -> None:
    """A canary is watched by a clock that somebody may set."""
    patch.setattr(Rollouts, "_now_s", lambda self: self._clock.now_s())


PLANTS: dict[str, tuple[Plant, str, tuple[int, ...]]] = {
    "lost cancellation": (lose_cancellation, "went on until", (1, 2, 7, 5)),
    "crossed batch result": (cross_results, "values that nothing explains", (29, 4, 31, 50)),
    "stale version": (serve_stale, "values that nothing explains", (9, 25, 28, 11)),
    "retry storm": (storm_with_retries, "calls of", (17, 59, 4, 9)),
    "embeddings outlive their user": (outlive_their_user, "forgotten before", (37, 41, 58, 201)),
    "tries without end": (try_without_end, "is tried by", (186, 314, 82)),
    "calls left without end": (leave_all, "is left a call", (1, 2, 3, 4)),
    "let go too early": (let_go_too_early, ", asked for v", (545, 641, 0, 71)),
    "watch by the wall clock": (watch_by_the_wall, "was to be watched", (68,)),
    "queue without bound": (queue_without_bound, "requests in flight, limit", (28, 31, 32, 41)),
}
"""Bug -> how it is planted, the rule that it breaks, and seeds that have found it; others may, after a change."""


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        yield


def first_seed(plant: Plant, rule: str, seeds: Iterable[int]) -> int | None:
    """Return the first seed whose world breaks the rule that the bug is against."""
    with planted(plant):
        for seed in seeds:
            if any(rule in broken for broken in check(simulate(draw_world(seed)))):
                return seed
    return None


@pytest.mark.parametrize(("plant", "rule", "seeds"), PLANTS.values(), ids=list(PLANTS))
def test_each_bug_is_found_in_one_of_a_few_worlds(plant: Plant, rule: str, seeds: tuple[int, ...]) -> None:
    assert first_seed(plant, rule, seeds) is not None


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "rule", "seeds"), PLANTS.values(), ids=list(PLANTS))
def test_each_bug_is_found_within_500_seeds(plant: Plant, rule: str, seeds: tuple[int, ...]) -> None:
    assert first_seed(plant, rule, range(SEEDS_MAX)) is not None
