"""A replica dies while another version is rolled out: its successor serves what the mesh serves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from benchmarks.chaos.victims import victims
from tests.helpers.live_updates import CLOCK, LiveUpdates, Sent, live_updates

pytestmark = pytest.mark.timeout(240)  # the first of them starts a mesh

WHOLE_IN_A_ROW, SOON_S = 20, 60.0


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveUpdates]:
    with live_updates(tmp_path_factory.mktemp("rollouts"), "rollouts") as started:
        yield started


@pytest.mark.parametrize(("target", "share"), [("ranking:full", 0.0), ("sequence", 0.5), ("ingress", 0.5)])
async def test_who_starts_meanwhile_serves_the_version_too(updated: LiveUpdates, target: str, share: float) -> None:
    version = f"20280101-000000-0000000{len(target)}"
    updated.publish(version, seed=len(target))
    victim = victims(target, updated.mesh)[0].pid
    asked = updated.ask("rollout", version, share=share, watch_s=1)
    os.kill(victim, signal.SIGKILL)
    ended = await updated.until(asked, "served", "rolled_back", "refused")
    assert (ended.phase, ended.reason) == ("served", "")
    sent = await whole_again(updated)
    assert updated.faults(sent) == []
    assert {answer.body.weights_version for *_, answer in sent if answer.body} == {version}
    status = await asyncio.to_thread(updated.status)
    for station in status.deployments:
        assert all(version in replica.held for replica in station.replicas), station
    assert victim not in [process.pid for process in victims(target, updated.mesh)]


async def whole_again(updated: LiveUpdates) -> Sent:
    """Return the first second of traffic in which every answer is whole."""
    until_s = CLOCK.monotonic_s() + SOON_S
    while True:
        sent = await updated.traffic(2.0)
        if {answer.outcome for *_, answer in sent} == {"ok"}:
            return sent
        assert CLOCK.monotonic_s() < until_s, [answer.outcome for *_, answer in sent]
