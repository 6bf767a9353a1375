from __future__ import annotations

import asyncio

import pytest

from services.ingress.admission import Gate
from services.ingress.config import IngressConfig
from services.ingress.stats import IngressStats
from shared.clock import ManualClock
from shared.errors import OverloadedError
from shared.schema.api import RankRequest
from tests.helpers.fake_stations import FakeMesh
from tests.helpers.faulty import HANG


def test_the_gate_holds_its_limit_and_says_when_to_come_back() -> None:
    gate = Gate("rank", 2, 3, IngressStats(["full"], ManualClock()))
    with gate.enter(), gate.enter():
        with pytest.raises(OverloadedError) as caught, gate.enter():
            pass
        assert caught.value.context == {"limit": 2, "value": 2, "retry_after_s": 3}
    with gate.enter():
        pass
    assert gate.in_flight == 0


def test_a_place_is_given_back_when_the_work_fails() -> None:
    gate = Gate("rank", 1, 1, IngressStats(["full"], ManualClock()))
    with pytest.raises(ZeroDivisionError), gate.enter():
        raise ZeroDivisionError
    assert gate.in_flight == 0


async def test_overload_is_shed_before_any_station_is_called() -> None:
    mesh = FakeMesh(IngressConfig(in_flight_max=2))
    mesh.services["sequence"].always("encode", HANG)
    request = RankRequest(user_id=1, candidates=[1, 2])
    held = [asyncio.create_task(mesh.ingress.rank(request)) for _ in range(2)]
    await mesh.manual.advance(0.001)
    started = mesh.services["preprocess"].started["extract"]

    with pytest.raises(OverloadedError):
        await mesh.ingress.rank(request)

    assert mesh.services["preprocess"].started["extract"] == started == 2
    for task in held:
        task.cancel()
    await mesh.manual.advance(0)
    assert mesh.ingress.counters()["shed_requests.rank"] == 1
