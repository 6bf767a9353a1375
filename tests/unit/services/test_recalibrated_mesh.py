"""From explored answers to other scores: requests, outcomes, the refit as a delta, and the router that goes by it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.heads import probabilities
from models.random_weights import TINY
from models.routing import GROUP
from services.ingress.config import RouterConfig
from services.ingress.gains import gain_series
from services.ingress.routing import GainRouter, router_for
from services.ingress.serving import FrontModel
from shared.schema.api import Event, RankRequest
from shared.schema.explored import ExploredAnswer
from shared.weights.delta_log import DeltaLog
from tests.helpers.local_mesh import PATIENT
from tests.helpers.updated_mesh import LIVE, UpdatedMesh
from tests.helpers.weights import random_weights
from tests.unit.training.test_recalibration import gain_model
from training.outcomes import JoinConfig, read_outcomes
from training.recalibration import RecalibrationConfig, publish_refit, published_parts, refit

NOW_S = 1_000_000
NUM_ITEMS = 12
ITEMS: list[int | str] = list(range(1, NUM_ITEMS + 1))
CONFIG = PATIENT.model_copy(update={"router": RouterConfig(explore_share=1.0)})
JOIN = JoinConfig(delay_s=0, window_s=1_000)
REFIT = RecalibrationConfig(outcomes_min=20, users_min=3, prior_rows=10)


class _Mesh(UpdatedMesh):
    """Routes by worth, and explores with every request."""

    def __init__(self, folder: Path) -> None:
        source = random_weights(TINY, version="v")
        source.groups[GROUP] = gain_model().tensors()
        super().__init__(folder, source, CONFIG)
        reader = self.store.open("v")
        self.router = router_for(CONFIG, reader, self.clock)
        gains = gain_series(reader, DeltaLog(self.store, "v"), LIVE)
        self.ingress.serving._models["v"] = FrontModel(self.ingress.serving.info, self.router, gains)

    async def explore(self, user: int) -> RankRequest:
        request = RankRequest(user_id=user, candidates=ITEMS, timestamp_s=NOW_S, speculative=False)
        body = await self.ingress.rank(request)
        assert body["tier_reason"] == "exploration"
        await self.ingress.exploration.drain()
        return request

    def explored(self) -> list[bytes]:
        log = self.services["sequence"].inner.explored
        return [data for answers in log._answers.values() for data in answers]


async def test_outcomes_of_explored_answers_change_scores_and_router(tmp_path: Path) -> None:
    mesh = _Mesh(tmp_path)
    try:
        for user in range(1, 6):
            await mesh.explore(user)
        answers = [ExploredAnswer.decode(data, 2) for data in mesh.explored()]
        assert len(answers) == 5
        assert mesh.ingress.counters()["explored_kept"] == 5
        assert all(answer.depths == TINY.depths and np.isfinite(answer.exits).all() for answer in answers)
        before = await mesh.rank(1, ITEMS, timestamp_s=NOW_S, tier="full", speculative=False)
        events = [
            Event(event_id=f"{user}-{item}", user_id=user, item_id=item, weight=1.0, timestamp_s=NOW_S + item)
            for user in range(1, 6)
            for item in range(1, NUM_ITEMS + 1)
        ]
        await mesh.log.append(events)
        now_s = mesh.clock.now_s()
        explored = mesh.services["sequence"].inner.explored
        found = await read_outcomes(explored, mesh.log, "v", TINY.depths, now_s, JOIN)
        assert len(found) == sum(len(answer.item_keys) for answer in answers)
        assert not found.clicks.any()
        _, calibration, gain, costs = published_parts(mesh.store, "v")
        asked = refit(calibration, gain, costs, found, REFIT)
        assert asked is not None
        publish_refit(mesh.store, "v", asked)
        for _ in range(4):
            await mesh.rollouts.round()
        assert mesh.ingress.serving.order.version == "v+1", mesh.ingress.serving.order.updates
        after = await mesh.rank(1, ITEMS, timestamp_s=NOW_S, tier="full", speculative=False)
        assert after.weights_version == "v+1"
        means = [np.mean([one.scores["click"] for one in body.candidates]) for body in (before, after)]
        assert means[1] < means[0] - 0.05, "nobody clicked"
        own = next(answer for answer in answers if answer.user == 1)
        said = probabilities(asked.calibration.apply(own.exits[:, -1], TINY.depths[-1]))[:, 0]
        wanted = dict(zip(own.item_keys.tolist(), said.tolist(), strict=True))
        compared = [one for one in after.candidates if one.id in wanted]
        assert compared
        for one in compared:
            assert one.scores["click"] == pytest.approx(wanted[int(one.id)], abs=1e-5)
        assert isinstance(mesh.router, GainRouter)
        assert asked.gain is not None
        np.testing.assert_array_equal(mesh.router._model.worth, asked.gain.worth)
        assert mesh.router.price._model is mesh.router._model
    finally:
        await mesh.aclose()


async def test_a_deleted_user_has_no_explored_answers(tmp_path: Path) -> None:
    mesh = _Mesh(tmp_path)
    try:
        await mesh.explore(1)
        await mesh.explore(2)
        assert (await mesh.ingress.forget(1))["deleted"]
        assert [ExploredAnswer.decode(data, 2).user for data in mesh.explored()] == [2]
        request = RankRequest(user_id=3, candidates=ITEMS, timestamp_s=NOW_S, speculative=False)
        await mesh.ingress.rank(request)  # its answer is on its way to the store
        await mesh.ingress.forget(3)
        await mesh.ingress.exploration.drain()
        assert [ExploredAnswer.decode(data, 2).user for data in mesh.explored()] == [2]
        sequence = mesh.services["sequence"].inner
        late = ExploredAnswer.decode(mesh.explored()[0], 2)
        keeping, log = asyncio.Event(), sequence.explored
        plain_add = log.add

        async def slow_add(answer: ExploredAnswer) -> None:
            await keeping.wait()
            await plain_add(answer)

        log.add = slow_add
        kept = asyncio.create_task(sequence.keep_explored(replace(late, user=4)))
        await asyncio.sleep(0)
        await sequence.forget(4)
        keeping.set()
        await kept
        assert [ExploredAnswer.decode(data, 2).user for data in mesh.explored()] == [2]
    finally:
        await mesh.aclose()


async def test_what_is_degraded_or_not_explored_is_not_kept(tmp_path: Path) -> None:
    mesh = _Mesh(tmp_path)
    try:
        mesh.log.down = True
        await mesh.explore(1)
        mesh.log.down = False
        await mesh.rank(2, ITEMS, timestamp_s=NOW_S, tier="full")
        await mesh.rank(2, ITEMS, timestamp_s=NOW_S, tier="light")
        await mesh.ingress.exploration.drain()
        assert mesh.explored() == []
        assert json.loads(json.dumps(mesh.ingress.counters()))["explored_kept"] == 0
    finally:
        await mesh.aclose()
