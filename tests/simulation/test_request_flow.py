"""The production code of the ingress over stations that fail, hang and lag as a seed says, on a simulated clock.

One seed is one world: which stations misbehave, how, and a burst of requests with budgets of their own. The checks hold
in every world; a world that breaks one is repeated with ``make sim SEED=n N=1``.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from services.ingress.config import IngressConfig, PrecomputeConfig, StageBudgets
from shared.errors import (
    DeadlineExceededError,
    OverloadedError,
    RankMeshError,
    StageUnavailableError,
    VersionMismatchError,
)
from shared.schema.api import RankRequest, RankResponse
from tests.helpers.fake_stations import VERSION, FakeMesh
from tests.helpers.faulty import HANG, Fault

METHODS = {
    "preprocess": "extract",
    "sequence": "encode",
    "embedding:0": "lookup",
    "embedding:1": "lookup",
    "speculative": "lookup",
    "foundation": "precompute",
    "ranking:full": "rank",
    "ranking:light": "rank",
}
CONFIG = IngressConfig(
    budgets=StageBudgets(preprocess_ms=80, sequence_ms=120, embedding_ms=80, speculative_ms=40, render_ms=2),
    in_flight_max=6,
    light_above_in_flight=4,
    precompute=PrecomputeConfig(in_flight_max=2, timeout_ms=300),
)
STEP_S = 0.002
SLACK_S = 0.010
"""Steps of the clock are this coarse: a wait may end a few of them late."""
END_S = 3.0


@dataclass(slots=True)
class Outcome:
    """What became of one request."""

    request: RankRequest
    sent_s: float
    ended_s: float = 0.0
    answer: RankResponse | None = None
    error: RankMeshError | None = None


def draw_fault(rng: random.Random) -> Fault:
    kind = rng.choice(["hang", "slow", "gone", "version", "overloaded"])
    if kind == "hang":
        return HANG
    if kind == "slow":
        return Fault(delay_s=rng.choice([0.005, 0.03, 0.1, 0.4]))
    return Fault(
        error={
            "gone": StageUnavailableError("the replica died", stage="x"),
            "version": VersionMismatchError("another version", asked=VERSION, held="v0"),
            "overloaded": OverloadedError("full", retry_after_s=1.0),
        }[kind],
        delay_s=rng.choice([0.0, 0.02]),
    )


def draw_world(rng: random.Random, mesh: FakeMesh) -> None:
    for name, method in METHODS.items():
        if rng.random() < 0.35:  # some kinds of fault are off in each world, so that others meet
            mesh.services[name].plan(method, *(draw_fault(rng) for _ in range(rng.randint(1, 3))))
        elif rng.random() < 0.15:
            mesh.services[name].always(method, draw_fault(rng))


async def send(mesh: FakeMesh, request: RankRequest, after_s: float, outcomes: list[Outcome]) -> None:
    await mesh.clock.sleep_s(after_s)
    outcome = Outcome(request, mesh.clock.monotonic_s())
    outcomes.append(outcome)
    try:
        outcome.answer = RankResponse.model_validate(await mesh.ingress.rank(request))
    except RankMeshError as error:
        outcome.error = error
    outcome.ended_s = mesh.clock.monotonic_s()


async def simulate(seed: int) -> tuple[FakeMesh, list[Outcome]]:
    rng = random.Random(seed)
    mesh = FakeMesh(CONFIG)
    draw_world(rng, mesh)
    outcomes: list[Outcome] = []
    tasks = []
    for user in range(rng.randint(1, 8)):
        candidates = rng.sample(range(10 * user, 10 * user + 10), rng.randint(1, 6))
        fields = {"user_id": user, "candidates": candidates, "deadline_ms": rng.choice([50, 90, 200, 1_000])}
        request = RankRequest.model_validate(fields)
        tasks.append(asyncio.create_task(send(mesh, request, rng.choice([0.0, 0.0, 0.02, 0.15]), outcomes)))
    dropped = rng.randrange(len(tasks)) if rng.random() < 0.3 else None
    for step in range(round(END_S / STEP_S)):
        if step == 20 and dropped is not None:
            tasks[dropped].cancel()  # its client has gone away
        if all(task.done() for task in tasks) and mesh.in_flight() == 0:
            break
        await mesh.manual.advance(STEP_S)
    for task in tasks:
        assert task.done(), f"seed {seed}: a request has no answer after {END_S} s"
        if not task.cancelled():
            task.result()
    return mesh, outcomes


def check_answer(seed: int, outcome: Outcome) -> None:
    answer, request = outcome.answer, outcome.request
    assert answer is not None
    where = f"seed {seed}, user {request.user_id}"
    assert answer.user_id == request.user_id, where
    assert {row.id for row in answer.candidates} <= set(request.candidates), f"{where}: another request's candidates"
    ids = [row.id for row in answer.candidates]
    assert ids == sorted(ids, reverse=True), f"{where}: out of order"
    assert answer.weights_version == VERSION, where
    assert set(answer.reasons) == set(answer.degraded), f"{where}: a mark without a reason"
    if answer.history_length == 0:  # the fake sequence always knows 7 events
        assert "sequence" in answer.degraded, f"{where}: a cold start without a mark"
    if answer.tier == "light" and answer.tier_reason == "default":
        assert "ranking:full" in answer.degraded, f"{where}: a lower tier without a mark"


async def test_every_world_keeps_its_promises(sim_seed: int) -> None:
    mesh, outcomes = await simulate(sim_seed)
    for outcome in outcomes:
        if outcome.ended_s:  # its client stayed
            budget_s = (outcome.request.deadline_ms or 0) / 1e3
            took_s = outcome.ended_s - outcome.sent_s
            assert took_s <= budget_s + SLACK_S, f"seed {sim_seed}: answered after {took_s:.3f} of {budget_s} s"
            if outcome.answer is not None:
                check_answer(sim_seed, outcome)
            else:
                assert isinstance(
                    outcome.error,
                    DeadlineExceededError | OverloadedError | StageUnavailableError | VersionMismatchError,
                ), f"seed {sim_seed}: {outcome.error!r}"
    assert mesh.ingress.rank_gate.in_flight == 0
    assert mesh.in_flight() == 0, f"seed {sim_seed}: work goes on that nobody waits for"
