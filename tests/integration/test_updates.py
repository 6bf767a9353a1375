"""Weights change under load: every answer is that of the version that it names, and none is lost over it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from shared.weights.deltas import parse_stamp
from tests.helpers.live_updates import CLOCK, LiveUpdates, live_updates

pytestmark = pytest.mark.timeout(240)  # the first of them starts a mesh


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveUpdates]:
    with live_updates(tmp_path_factory.mktemp("updates"), "updates") as started:
        yield started


async def test_answers_under_updates_are_those_of_the_version_they_name(updated: LiveUpdates) -> None:
    base = parse_stamp(updated.status().version)[0]
    drift = updated.drift(base)
    deltas = [drift.network() if number % 8 == 5 else drift.rows(100) for number in range(24)]

    async def train() -> None:
        for delta in deltas:
            await asyncio.to_thread(drift.append, delta)
            await CLOCK.sleep_s(0.15)

    sent, _ = await asyncio.gather(updated.traffic(5.0), train())
    assert updated.faults(sent) == []
    assert {answer.outcome for *_, answer in sent} == {"ok"}
    served = {answer.body.weights_version for *_, answer in sent if answer.body is not None}
    assert len(served) > 4
    assert parse_stamp(updated.status().version) == (base, deltas[-1].sequence)


async def test_a_version_goes_out_behind_a_canary_and_back(updated: LiveUpdates) -> None:
    before = updated.status().version
    updated.publish("20270101-000000-00000002", seed=2)
    traffic = asyncio.create_task(updated.traffic(7.0))
    asked = updated.ask("rollout", "20270101-000000-00000002", share=0.5, watch_s=3)
    assert (await updated.until(asked, "canary", "refused")).phase == "canary"
    served = await updated.until(asked, "served", "rolled_back", "refused")
    assert (served.phase, served.previous, served.reason) == ("served", before, "")
    sent = await traffic
    assert updated.faults(sent) == []
    assert {answer.outcome for *_, answer in sent} == {"ok"}
    assert {answer.body.weights_version for *_, answer in sent if answer.body} == {before, "20270101-000000-00000002"}
    back = await updated.until(updated.ask("rollback"), "rolled_back", "refused")
    assert back.phase == "rolled_back"
    assert updated.status().version == before
    assert updated.faults(await updated.traffic(1.0)) == []


async def test_a_canary_that_is_taken_back_costs_no_answer(updated: LiveUpdates) -> None:
    before, tried = updated.status().version, "20270101-000000-00000004"
    updated.publish(tried, seed=4)
    traffic = asyncio.create_task(updated.traffic(6.0))
    asked = updated.ask("rollout", tried, share=0.5, watch_s=60)
    assert (await updated.until(asked, "canary", "refused")).phase == "canary"
    await CLOCK.sleep_s(1.0)
    await updated.until(updated.ask("rollback"), "rolled_back")
    sent = await traffic
    assert updated.faults(sent) == []
    assert {answer.outcome for *_, answer in sent} == {"ok"}
    assert {answer.body.weights_version for *_, answer in sent if answer.body} == {before, tried}
    assert updated.status().version == before


async def test_damage_is_refused_with_its_reason_and_the_old_version_serves(updated: LiveUpdates) -> None:
    before = updated.status().version
    folder = updated.publish("20270101-000000-00000003", seed=3)
    path = folder / "dense.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-20] + bytes([data[-20] ^ 4]) + data[-19:])
    refused = await updated.until(updated.ask("rollout", folder.name, share=0.1), "refused", "canary")
    assert refused.phase == "refused"
    assert "dense.safetensors has SHA-256" in refused.reason
    sent = await updated.traffic(1.0)
    assert updated.faults(sent) == []
    assert {answer.body.weights_version for *_, answer in sent if answer.body} == {before}
