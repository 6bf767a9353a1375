"""The whole mesh in one process, real services over a random model: its answers are the oracle's, whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from models.config import TierConfig as ModelTier
from models.oracle import Oracle, OracleAnswer, compare, tolerance
from models.random_weights import TINY
from shared.errors import StageUnavailableError, VersionMismatchError
from shared.hashing import EntityId
from shared.schema.api import Event, EventsRequest, RankResponse
from shared.schema.user import UserHistory
from shared.userlog import UserLoad
from tests.helpers.faulty import HANG, Fault
from tests.helpers.local_mesh import LocalMesh
from tests.helpers.waiting import until
from tests.helpers.weights import random_weights

CONFIG = TINY.model_copy(update={"tiers": {"light": ModelTier(head_max=0), "full": ModelTier(head_max=10)}})
SOURCE = random_weights(CONFIG)
NEXT = random_weights(CONFIG, seed=1, version="next")
ORACLE = Oracle.from_weights(SOURCE)
NOW_S = 1_000_000
ALL = list(range(1, 41))
LEVELS = {"none": 0, "user": 2, "exact": 3}
GONE = Fault(error=StageUnavailableError("the replica died"))

USERS: dict[EntityId, int] = {1: 0, 2: 1, 3: 4, 4: 30, "new user": 3}
"""User -> number of events before ``NOW_S``; one event follows later."""


@pytest.fixture
async def mesh() -> AsyncIterator[LocalMesh]:
    async with LocalMesh.running(SOURCE) as mesh:
        await mesh.log.load_many([load(user, count) for user, count in USERS.items()])
        yield mesh


def load(user: EntityId, count: int) -> UserLoad:
    """Return a user's past: ``count`` events before now, and one after it that no answer may see."""
    steps = np.arange(count + 1)
    return UserLoad(
        user=user,
        item_keys=steps * 7 % 40 + 1,
        weights=(steps % 5 + 1).astype(np.float32),
        timestamps_s=NOW_S - 10 * (count - steps) + np.where(steps == count, 5, 0),
        event_ids=steps,
        profile={"gender": "F", "age": "25", "occupation": "artist", "zip_code": "94110"},
    )


async def expected(
    mesh: LocalMesh, user: EntityId, candidates: Sequence[EntityId], tier: str = "full", limit: int = 100, **how: Any
) -> OracleAnswer:
    mesh.log.down, was_down = False, mesh.log.down
    history = await mesh.log.read(user, NOW_S, CONFIG.history_length)
    mesh.log.down = was_down
    if how.pop("no_history", False):
        history = UserHistory.empty()
    return ORACLE.rank(user, list(candidates), history, "ml-1m", NOW_S, tier, min(limit, len(candidates)), **how)


@dataclass
class Answer:
    """A response in the form that the oracle compares."""

    order: Any
    scores: Any
    values: Any
    full_pass: Any

    @classmethod
    def of(cls, response: RankResponse, candidates: Sequence[EntityId]) -> Answer:
        rows = response.candidates
        return cls(
            np.array([list(candidates).index(row.id) for row in rows], np.int32),
            np.array([[row.scores["click"], row.scores["conversion"]] for row in rows], np.float32),
            np.array([row.value for row in rows], np.float32),
            np.array([row.scored_by == "full" for row in rows]),
        )


def differences(answer: OracleAnswer, response: RankResponse, candidates: Sequence[EntityId]) -> list[str]:
    return compare(answer, Answer.of(response, candidates), tolerance(CONFIG))


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("tier", ["full", "light"])
async def test_answers_equal_the_oracle(mesh: LocalMesh, user: EntityId, tier: str) -> None:
    candidates: list[EntityId] = [*ALL[::-1], 9_999_999, "unheard of"]

    response = await mesh.rank(user, candidates, timestamp_s=NOW_S, tier=tier)

    assert differences(await expected(mesh, user, candidates, tier), response, candidates) == []
    assert (response.degraded, response.tier) == ([], tier)
    assert response.history_length == min(USERS[user], CONFIG.history_length)
    assert response.num_oov["item_id"] == 2


@pytest.mark.parametrize("count", [1, 9, 10, 11])
async def test_answers_equal_the_oracle_around_the_size_of_the_head(mesh: LocalMesh, count: int) -> None:
    response = await mesh.rank(3, ALL[:count], timestamp_s=NOW_S, limit=count + 1)

    assert differences(await expected(mesh, 3, ALL[:count], limit=count + 1), response, ALL[:count]) == []
    assert len(response.candidates) == count


async def test_the_top_of_a_longer_answer_is_the_shorter_one(mesh: LocalMesh) -> None:
    short = await mesh.rank(3, ALL, timestamp_s=NOW_S, limit=5, speculative=False)
    long = await mesh.rank(3, ALL, timestamp_s=NOW_S, limit=40, speculative=False)

    assert long.candidates[:5] == short.candidates


async def test_requests_at_once_answer_as_alone(mesh: LocalMesh) -> None:
    requests = [(user, ALL[: 5 + 3 * index]) for index, user in enumerate([*USERS, *USERS, *USERS])]
    alone = [await mesh.rank(user, candidates, timestamp_s=NOW_S, speculative=False) for user, candidates in requests]

    together = await asyncio.gather(
        *(mesh.rank(user, candidates, timestamp_s=NOW_S, speculative=False) for user, candidates in requests)
    )

    for one, other in zip(alone, together, strict=True):
        assert other.candidates == one.candidates
        assert other.degraded == []


async def test_a_user_named_by_number_and_by_its_digits_is_the_same(mesh: LocalMesh) -> None:
    number = await mesh.rank(3, ALL, timestamp_s=NOW_S, speculative=False)
    digits = await mesh.rank("3", [str(item) for item in ALL], timestamp_s=NOW_S, speculative=False)

    assert [int(row.id) for row in digits.candidates] == [row.id for row in number.candidates]
    assert [row.value for row in digits.candidates] == [row.value for row in number.candidates]
    assert (number.user_id, digits.user_id) == (3, "3")


async def test_an_event_counts_from_the_next_second_on(mesh: LocalMesh) -> None:
    before = await mesh.rank(3, ALL, timestamp_s=NOW_S)
    event = Event(event_id="new", user_id=3, item_id=17, weight=5, timestamp_s=NOW_S)
    assert (await mesh.ingress.append(EventsRequest(events=[event])))["appended"] == 1

    same = await mesh.rank(3, ALL, timestamp_s=NOW_S)
    later = await mesh.rank(3, ALL, timestamp_s=NOW_S + 1)

    assert (before.history_length, same.history_length, later.history_length) == (4, 4, 5)


async def test_what_was_precomputed_is_an_exact_hit_of_the_same_vectors(mesh: LocalMesh) -> None:
    first = await mesh.rank(3, ALL, timestamp_s=NOW_S)
    assert {row.speculative for row in first.candidates} == {"none"}
    head = {row.id for row in first.candidates if row.scored_by == "full"}
    await mesh.ingress.precompute.drain()

    second = await mesh.rank(3, ALL, timestamp_s=NOW_S)

    exact = {row.id for row in second.candidates if row.speculative == "exact"}
    assert exact == head
    history = await mesh.log.read(3, NOW_S, CONFIG.history_length)
    vectors = ORACLE.embed(3, ALL, history, "ml-1m", NOW_S)
    levels = np.array([3 if item in exact else 0 for item in ALL], np.int8)
    vectors[levels == 0] = 0
    answer = await expected(mesh, 3, ALL, spec_vectors=vectors, spec_levels=levels)
    assert differences(answer, second, ALL) == []


async def test_candidates_of_a_known_group_get_the_users_aggregate(mesh: LocalMesh) -> None:
    await mesh.rank(3, ALL[:10], timestamp_s=NOW_S)
    await mesh.ingress.precompute.drain()

    response = await mesh.rank(3, ALL[10:20], timestamp_s=NOW_S)
    other = await mesh.rank(4, ALL[10:20], timestamp_s=NOW_S)

    assert {row.speculative for row in response.candidates} == {"user", "none"}
    assert {row.speculative for row in other.candidates} == {"none"}, "one user's embeddings are never another's"


async def test_embeddings_made_for_later_are_not_read_by_an_earlier_request(mesh: LocalMesh) -> None:
    await mesh.rank(3, ALL, timestamp_s=NOW_S)
    await mesh.ingress.precompute.drain()

    past = await mesh.rank(3, ALL, timestamp_s=NOW_S - 1)

    assert {row.speculative for row in past.candidates} == {"none"}


async def test_nothing_is_made_of_a_user_who_was_forgotten(mesh: LocalMesh) -> None:
    await mesh.rank(3, ALL, timestamp_s=NOW_S)
    await mesh.ingress.precompute.drain()
    assert "exact" in {row.speculative for row in (await mesh.rank(3, ALL, timestamp_s=NOW_S)).candidates}
    await mesh.ingress.precompute.drain()

    assert (await mesh.ingress.forget("3"))["deleted"]

    for _ in range(2):
        after = await mesh.rank(3, ALL, timestamp_s=NOW_S)
        assert (after.history_length, after.degraded) == (0, [])
        assert {row.speculative for row in after.candidates} == {"none"}
        await mesh.ingress.precompute.drain()
    assert not (await mesh.ingress.forget(3))["deleted"]


async def test_missing_shard_is_answered_from_the_out_of_vocabulary_row(mesh: LocalMesh) -> None:
    mesh.services["embedding:1"].always("lookup", GONE)

    response = await mesh.rank(3, ALL, timestamp_s=NOW_S)

    answer = await expected(mesh, 3, ALL, missing_shards=[1], num_shards=2)
    assert response.degraded == ["embedding:1"]
    assert differences(answer, response, ALL) == []
    assert mesh.ingress.precompute.num_started == 0, "what a broken answer saw is not stored"


async def test_missing_user_state_is_answered_from_the_cold_start(mesh: LocalMesh) -> None:
    mesh.services["sequence"].always("encode", GONE)

    response = await mesh.rank(3, ALL, timestamp_s=NOW_S)

    assert response.degraded == ["sequence"]
    assert differences(await expected(mesh, 3, ALL, cold_start=True), response, ALL) == []


async def test_ranking_without_its_full_tier_gives_the_first_pass(mesh: LocalMesh) -> None:
    mesh.services["ranking:full"].always("rank", GONE)

    response = await mesh.rank(3, ALL, timestamp_s=NOW_S)

    assert (response.tier, response.degraded) == ("light", ["ranking:full"])
    assert differences(await expected(mesh, 3, ALL, "light"), response, ALL) == []


async def test_user_log_down_before_a_user_was_seen_gives_an_empty_history(mesh: LocalMesh) -> None:
    mesh.log.down = True

    response = await mesh.rank(3, ALL, timestamp_s=NOW_S)

    assert response.reasons == {"sequence": "store_unavailable"}
    assert differences(await expected(mesh, 3, ALL, no_history=True), response, ALL) == []
    assert mesh.ingress.precompute.num_started == 0


async def test_user_log_down_after_a_user_was_seen_gives_the_last_known_history(mesh: LocalMesh) -> None:
    await mesh.rank(3, ALL, timestamp_s=NOW_S, speculative=False)
    mesh.log.down = True

    response = await mesh.rank(3, ALL, timestamp_s=NOW_S, speculative=False)

    assert response.reasons == {"sequence": "stale_history"}
    assert differences(await expected(mesh, 3, ALL), response, ALL) == []


async def test_speculative_store_down_is_an_answer_without_embeddings(mesh: LocalMesh) -> None:
    await mesh.rank(3, ALL, timestamp_s=NOW_S)
    await mesh.ingress.precompute.drain()
    mesh.redis.down = True

    response = await mesh.rank(3, ALL, timestamp_s=NOW_S)

    assert response.degraded == []
    assert differences(await expected(mesh, 3, ALL), response, ALL) == []
    assert mesh.counters("speculative")["lookup_store_unavailable"] == 1


@pytest.mark.parametrize("station", ["sequence", "embedding:0", "ranking:full"])
async def test_two_versions_never_mix(mesh: LocalMesh, station: str) -> None:
    mesh.replace(station, NEXT)

    response = await mesh.rank(3, ALL, timestamp_s=NOW_S)

    assert response.weights_version == SOURCE.version
    assert response.degraded == [station]
    assert "holds weights next, asked for random" in response.reasons[station]


async def test_a_needed_station_of_another_version_is_an_error(mesh: LocalMesh) -> None:
    mesh.replace("preprocess", NEXT)

    with pytest.raises(VersionMismatchError):
        await mesh.rank(3, ALL, timestamp_s=NOW_S)


async def test_dropped_requests_leave_nothing_in_flight(mesh: LocalMesh) -> None:
    mesh.services["embedding:0"].always("lookup", HANG)
    tasks = [asyncio.create_task(mesh.rank(3, ALL, timestamp_s=NOW_S)) for _ in range(30)]
    await until(lambda: mesh.services["embedding:0"].in_flight == 30)

    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await until(lambda: mesh.in_flight() == 0)

    assert all(mesh.counters(name)["in_flight"] == 0 for name in mesh.services)
    mesh.services["embedding:0"].always("lookup", None)
    assert (await mesh.rank(3, ALL, timestamp_s=NOW_S)).degraded == []
