from __future__ import annotations

import pytest

from services.ingress.config import IngressConfig
from shared.errors import StageUnavailableError
from shared.schema.api import RankRequest
from tests.helpers.fake_stations import FakeMesh
from tests.helpers.faulty import Fault


@pytest.fixture
def mesh() -> FakeMesh:
    return FakeMesh(IngressConfig())


async def test_metrics_and_status_count_the_same_things(mesh: FakeMesh) -> None:
    mesh.services["embedding:1"].always("lookup", Fault(error=StageUnavailableError("gone")))
    await mesh.ingress.rank(RankRequest(user_id=1, candidates=[1, 2, 3]))
    mesh.services["preprocess"].always("extract", Fault(error=StageUnavailableError("gone")))
    with pytest.raises(StageUnavailableError):
        await mesh.ingress.rank(RankRequest(user_id=1, candidates=[1, 2, 3]))

    counters, text = mesh.ingress.counters(), mesh.ingress.metrics().decode()

    for name, line in {
        "requests.rank.ok": 'rankmesh_ingress_requests_total{kind="rank",outcome="ok"} 1.0',
        "answers.full": 'rankmesh_ingress_answers_total{tier="full"} 1.0',
        "degraded.embedding": 'rankmesh_ingress_degraded_total{station="embedding"} 1.0',
        "retries.embedding": 'rankmesh_ingress_retries_total{station="embedding"} 1.0',
        "retries.preprocess": 'rankmesh_ingress_retries_total{station="preprocess"} 1.0',
    }.items():
        assert counters[name] == 1, name
        assert line in text
    assert counters["requests.rank.stage_unavailable"] == 1
    assert counters["candidates"] == 3
    assert counters["in_flight_requests.rank"] == 0


async def test_every_critical_stage_is_measured(mesh: FakeMesh) -> None:
    await mesh.ingress.rank(RankRequest(user_id=1, candidates=[1], speculative=False))

    text = mesh.ingress.metrics().decode()

    for stage in ("admission", "preprocess", "gather", "ranking", "render"):
        assert f'rankmesh_ingress_stage_ms_count{{stage="{stage}"}} 1.0' in text
