"""Routing by worth in a whole mesh: what an answer says of a user decides where the next request goes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models.config import TierConfig as ModelTier
from models.random_weights import TINY
from models.routing import GROUP, SIGNALS, GainModel, surface_keys
from models.source import MemorySource
from services.ingress.config import RouterConfig
from services.ingress.routing import GainRouter, router_for
from services.ingress.service import IngressService
from shared.errors import StageUnavailableError
from shared.schema.api import RankRequest
from shared.userlog import UserLoad
from tests.helpers.faulty import Fault
from tests.helpers.local_mesh import PATIENT, LocalMesh
from tests.helpers.weights import random_weights

NOW_S = 1_000_000
CONFIG = TINY.model_copy(update={"tiers": {"light": ModelTier(head_max=0), "full": ModelTier(head_max=10)}})
K = len(SIGNALS)


def _source() -> MemorySource:
    """Return weights that say: depth is worth something to those whose newest event weighs little."""
    hidden = np.zeros((K, 1))
    hidden[SIGNALS.index("last_weight")] = -1.0
    model = GainModel(
        depths=CONFIG.depths,
        mean=np.zeros(K),
        deviation=np.ones(K),
        hidden=hidden,
        bias=np.array([0.5]),
        out=np.ones((1, 2)),
        worth=np.array([0.0, 1.0]),
        unknown=np.array([0.0, 0.1]),
        surface_keys=surface_keys(("ml-1m",)),
        surface=np.zeros((1, 2)),
        prices=np.array([[0.1, 1.0], [1.0, 0.0]]),
    )
    source = random_weights(CONFIG)
    return replace(source, groups={**source.groups, GROUP: model.tensors()})


def _past(user: int, weight: float) -> UserLoad:
    return UserLoad(
        user=user,
        item_keys=np.arange(1, 6),
        weights=np.full(5, weight, np.float32),
        timestamps_s=NOW_S - 100 * np.arange(5, 0, -1),
        event_ids=np.arange(5),
        profile={},
    )


async def test_what_an_answer_says_of_a_user_routes_the_next_request() -> None:
    config = PATIENT.model_copy(update={"router": RouterConfig(explore_share=0.0)})
    source = _source()
    async with LocalMesh.running(source, config=config) as mesh:
        await mesh.log.load_many([_past(1, 1.0), _past(2, 5.0)])
        router = router_for(config, source, mesh.clock)
        assert isinstance(router, GainRouter)
        ingress = IngressService(
            config, mesh.stations, mesh.ingress.serving.info, mesh.directory, mesh.clock, "ingress-1", router
        )

        async def tier(user: int) -> tuple[str, str]:
            body = await ingress.rank(
                RankRequest(user_id=user, candidates=[1, 2, 3], timestamp_s=NOW_S, speculative=False)
            )
            return body["tier"], body["tier_reason"]

        first = [await tier(user) for user in (1, 2)]
        assert [name for name, _ in first] == ["full", "full"]
        assert all("not seen yet" in reason for _, reason in first)
        second = [await tier(user) for user in (1, 2)]
        assert [name for name, _ in second] == ["full", "light"]
        assert all("this user's history" in reason for _, reason in second)
        signals = router.users.get(2, NOW_S)
        assert signals is not None
        assert signals[SIGNALS.index("last_weight")] == 1.0
        await ingress.aclose()


async def test_a_state_that_was_replaced_says_nothing_of_the_user() -> None:
    config = PATIENT.model_copy(update={"router": RouterConfig(explore_share=0.0)})
    source = _source()
    async with LocalMesh.running(source, config=config) as mesh:
        router = router_for(config, source, mesh.clock)
        ingress = IngressService(
            config, mesh.stations, mesh.ingress.serving.info, mesh.directory, mesh.clock, "ingress-1", router
        )
        mesh.services["sequence"].always("encode", Fault(error=StageUnavailableError("the replica died")))
        body = await ingress.rank(RankRequest(user_id=2, candidates=[1, 2], timestamp_s=NOW_S, speculative=False))
        assert body["degraded"] == ["sequence"]
        assert isinstance(router, GainRouter)
        assert len(router.users) == 0
        prior_ms = 60 * (0.1 + 0.9 * 2 / 500)
        assert router.costs.of(2)[0] != pytest.approx(prior_ms), "what it cost is learned all the same"
        await ingress.aclose()
