"""Weights change under requests: every answer is the oracle's of the state that it names, and none fails."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.weights.drift import Drift, States
from cluster.desk import RolloutRequest
from models.golden import Golden
from models.oracle import Oracle, compare, tolerance
from shared.hashing import EntityId
from shared.schema.api import Event, EventsRequest, RankResponse
from shared.weights.deltas import parse_stamp
from tests.helpers.local_mesh import PATIENT
from tests.helpers.updated_mesh import UpdatedMesh, publish_source
from tests.helpers.waiting import until
from tests.helpers.weights import random_weights
from tests.unit.services.test_mesh import ALL, CONFIG, NOW_S, SOURCE, Answer, load

USERS: list[EntityId] = [2, 3, 4]


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[UpdatedMesh]:
    mesh = UpdatedMesh(tmp_path, SOURCE)
    await mesh.log.load_many([load(user, 3 * int(user)) for user in USERS])
    yield mesh
    await mesh.aclose()


def drift(mesh: UpdatedMesh, base: str = SOURCE.version) -> Drift:
    return Drift(mesh.store, base, Golden.from_weights(mesh.store.open(base)).request, seed=5)


async def faults(mesh: UpdatedMesh, answers: list[tuple[EntityId, RankResponse]]) -> list[str]:
    """Compare answers with the oracle of the state that each names."""
    states, found = States(mesh.store), []
    for stamp in sorted({answer.weights_version for _, answer in answers}, key=parse_stamp):
        oracle, right = Oracle.from_weights(states.source(stamp)), set[str]()
        for user, answer in answers:
            text = f"{user} {answer.candidates}"
            if answer.weights_version != stamp or text in right:
                continue
            right.add(text)
            history = await mesh.log.read(user, NOW_S, CONFIG.history_length)
            expected = oracle.rank(user, ALL, history, "ml-1m", NOW_S, "full", len(ALL))
            wrong = compare(expected, Answer.of(answer, ALL), tolerance(CONFIG))
            found += [f"{stamp} user {user}: {each}" for each in wrong]
    return found


async def ask(mesh: UpdatedMesh, user: EntityId, **fields: Any) -> tuple[EntityId, RankResponse]:
    return user, await mesh.rank(user, ALL, timestamp_s=NOW_S, speculative=False, **fields)


async def test_no_answer_mixes_states_and_none_fails(mesh: UpdatedMesh) -> None:
    trainer = drift(mesh)
    deltas = [trainer.network() if number % 4 == 2 else trainer.rows(10) for number in range(7)]
    answers: list[tuple[EntityId, RankResponse]] = []
    done = asyncio.Event()

    async def client(user: EntityId) -> None:
        while not done.is_set():
            answers.append(await ask(mesh, user))

    async def owner() -> None:
        for number, delta in enumerate(deltas):
            trainer.append(delta)
            if number % 2 == 0:
                await mesh.rollouts.round()
        done.set()

    await asyncio.gather(owner(), *map(client, USERS))
    assert await faults(mesh, answers) == []
    assert {tuple(answer.degraded) for _, answer in answers} == {()}
    assert len({answer.weights_version for _, answer in answers}) >= 4
    assert mesh.rollouts.order.version == f"{SOURCE.version}+7"
    assert (await mesh.ingress.mesh_status()).version == f"{SOURCE.version}+7"


async def test_a_request_that_is_under_way_gets_the_state_that_it_began_with(mesh: UpdatedMesh) -> None:
    gate = asyncio.Event()
    door = mesh.services["embedding:0"]
    inner = door.inner

    class Held:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        async def lookup(self, features: Any, remaining_ms: float) -> Any:
            await gate.wait()
            return await inner.lookup(features, remaining_ms)

    door.inner = Held()
    waiting = asyncio.create_task(ask(mesh, 3))
    await until(lambda: door.in_flight == 1)
    door.inner = inner
    trainer = drift(mesh)
    for _ in range(3):
        trainer.append(trainer.rows(20))
        await mesh.rollouts.round()
    gate.set()
    late, fresh = await waiting, await ask(mesh, 3)
    assert late[1].weights_version == SOURCE.version
    assert fresh[1].weights_version == f"{SOURCE.version}+3"
    assert late[1].candidates != fresh[1].candidates
    assert await faults(mesh, [late, fresh]) == []


async def test_embeddings_of_another_state_are_not_read(tmp_path: Path) -> None:
    precompute = PATIENT.precompute.model_copy(update={"settle_s": 0.0})
    mesh = UpdatedMesh(tmp_path, SOURCE, PATIENT.model_copy(update={"precompute": precompute}))
    await mesh.log.load_many([load(3, 9)])
    await mesh.rank(3, ALL, timestamp_s=NOW_S)
    await mesh.ingress.precompute.drain()
    again = await mesh.rank(3, ALL, timestamp_s=NOW_S)
    assert "exact" in {row.speculative for row in again.candidates}
    await mesh.ingress.precompute.drain()
    trainer = drift(mesh)
    trainer.append(trainer.rows(5))
    await mesh.rollouts.round()
    after = await mesh.rank(3, ALL, timestamp_s=NOW_S)
    assert {row.speculative for row in after.candidates} == {"none"}
    await mesh.ingress.precompute.drain()
    later = await mesh.rank(3, ALL, timestamp_s=NOW_S)
    assert "exact" in {row.speculative for row in later.candidates}
    await mesh.aclose()


async def test_a_wrong_delta_is_refused_and_a_new_version_helps(mesh: UpdatedMesh) -> None:
    trainer = drift(mesh)
    trainer.append(trainer.wrong())
    await mesh.rollouts.round()
    status = await mesh.ingress.mesh_status()
    assert status.version == SOURCE.version
    assert "golden" in status.updates.reason
    assert await faults(mesh, [await ask(mesh, 3)]) == []
    publish_source(mesh.store, random_weights(CONFIG, seed=1, version="next"))
    RolloutRequest(id="r", action="rollout", version="next").write(mesh.folder)
    for _ in range(2):
        await mesh.rollouts.round()
    status = await mesh.ingress.mesh_status()
    assert (status.version, status.rollout.phase) == ("next", "served")
    assert await faults(mesh, [await ask(mesh, 3)]) == []


async def test_damaged_versions_are_refused_and_the_old_one_serves(mesh: UpdatedMesh) -> None:
    publish_source(mesh.store, random_weights(CONFIG, seed=1, version="next"))
    whole = Path(mesh.store.root) / "next"
    damages: dict[str, Callable[[bytes], bytes | None]] = {
        "flipped": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        "truncated": lambda data: data[:-100],
        "empty": lambda data: b"",
        "half-written": lambda data: None,
    }
    for name, damaged in damages.items():
        folder = whole.with_name(name)
        shutil.copytree(whole, folder)
        manifest = folder / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"next"', f'"{name}"'))
        victim = next(path for path in sorted(folder.rglob("*")) if "dense" in path.name)
        if (data := damaged(victim.read_bytes())) is None:
            manifest.unlink()
        else:
            victim.write_bytes(data)
        RolloutRequest(id="r", action="rollout", version=name, share=0.5).write(mesh.folder)
        for _ in range(2):
            await mesh.rollouts.round()
        status = await mesh.ingress.mesh_status()
        assert (status.version, status.rollout.phase, status.rollout.version) == (SOURCE.version, "refused", name)
        assert name in status.rollout.reason
    assert await faults(mesh, [await ask(mesh, 3)]) == []
    trainer = drift(mesh)
    trainer.append(trainer.rows(5))
    await mesh.rollouts.round()
    assert mesh.rollouts.order.version == f"{SOURCE.version}+1"


async def test_a_canary_is_asked_about_labelled_events_and_taken_back(mesh: UpdatedMesh) -> None:
    publish_source(mesh.store, random_weights(CONFIG, seed=1, version="next"))
    RolloutRequest(id="r", action="rollout", version="next", share=0.5).write(mesh.folder)
    await mesh.rollouts.round()
    assert mesh.rollouts.order.canary == "next"
    answers = [await ask(mesh, user) for user in range(1, 30)]
    assert {answer.weights_version for _, answer in answers} == {SOURCE.version, "next"}
    for number in range(12):
        event = Event(event_id=f"e{number}", user_id=3, item_id=number + 1, weight=1 + number % 5, timestamp_s=NOW_S)
        await mesh.ingress.append(EventsRequest(events=[event]))
        await mesh.ingress.feedback.drain()
    sums = mesh.ingress.feedback.sums()
    assert sums["labels"] == 12
    assert sums["clicks"] == 4
    history = await mesh.log.read(3, NOW_S, CONFIG.history_length)
    assert sums["base_predicted"] == pytest.approx(predicted(mesh, SOURCE.version, history), rel=1e-4)
    assert sums["canary_predicted"] == pytest.approx(predicted(mesh, "next", history), rel=1e-4)
    RolloutRequest(id="b", action="rollback").write(mesh.folder)
    for _ in range(2):
        await mesh.rollouts.round()
    assert {(await ask(mesh, user))[1].weights_version for user in range(1, 30)} == {SOURCE.version}
    order = mesh.rollouts.order
    assert order.canary is None


def predicted(mesh: UpdatedMesh, version: str, history: Any) -> float:
    """Sum of the oracle's click probabilities of the twelve events, each asked alone."""
    oracle = Oracle.from_weights(mesh.store.open(version))
    answers = [oracle.rank(3, [item], history, "ml-1m", NOW_S, "full", 1) for item in range(1, 13)]
    return float(np.sum([answer.full_scores[0, 0] for answer in answers]))
