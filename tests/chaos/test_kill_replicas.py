"""``kill -9`` of one replica of each station under a steady 20 requests a second.

Nothing hangs, nothing is wrong, nothing fails for which docs/architecture.md promises an answer, and the replica is
replaced. Answers that are marked are compared with the oracle too: without exactly the parts that they name.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from benchmarks.chaos.traffic import DEADLINE_MS, WarmTraffic
from benchmarks.client import count_outcomes
from services.ingress.directory import DeploymentStatus, StatusBody

RATE_PER_S = 20.0
BEFORE_S = 2.0
LOAD_S = 12.0
BACK_WITHIN_S = 30.0
SLACK_MS = 750.0
"""Between the deadline and the last byte on a busy two-core machine, the time of a retry by the balancer included."""

STATIONS = (
    *("preprocess", "embedding:0", "embedding:1", "sequence", "speculative", "foundation"),
    *("ranking:full", "ranking:light", "ingress"),
)


async def station(traffic: WarmTraffic, name: str) -> DeploymentStatus:
    status = StatusBody.model_validate(await traffic.client.get("/v1/status"))
    return next(each for each in status.deployments if each.name == name)


async def kill_and_wait(traffic: WarmTraffic, name: str) -> float:
    """Kill one replica after a while; return the seconds until the status shows all replicas ready without it."""
    await traffic.clock.sleep_s(BEFORE_S)
    pid = (await station(traffic, name)).replicas[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed_s = traffic.clock.monotonic_s()
    while traffic.clock.monotonic_s() - killed_s < BACK_WITHIN_S:
        await traffic.clock.sleep_s(0.1)
        now = await station(traffic, name)
        ready = [replica for replica in now.replicas if replica.state == "ready" and replica.version is not None]
        if len(ready) == now.target and pid not in {replica.pid for replica in ready}:
            return traffic.clock.monotonic_s() - killed_s
    raise AssertionError(f"{name} has no successor of its killed replica after {BACK_WITHIN_S:.0f} s")


@pytest.mark.parametrize("name", STATIONS)
async def test_a_killed_replica_costs_at_most_its_own_part(traffic: WarmTraffic, name: str, report: list[str]) -> None:
    load, back_s = await asyncio.gather(traffic.load(RATE_PER_S, LOAD_S), kill_and_wait(traffic, name))
    sent = [sample.answer for sample in load.samples if sample.answer is not None]
    answers = [each.answer for each in sent]
    outcomes = count_outcomes(answers)
    worst_ms = max(load.latencies_ms())
    report.append(f"{name:<14} back after {back_s:4.1f} s, slowest answer {worst_ms:5.0f} ms, {outcomes}")
    assert load.num_not_sent == 0
    details = [answer.detail for answer in answers if answer.outcome not in ("ok", "degraded")]
    assert set(outcomes) <= {"ok", "degraded"}, details[:5]
    assert worst_ms <= DEADLINE_MS + SLACK_MS
    assert traffic.wrong(sent) == []
    marks = {mark: why for answer in answers if answer.body is not None for mark, why in answer.body.reasons.items()}
    assert marks.keys() <= {name, "deadline"}, marks
    after = await traffic.load(RATE_PER_S, 1.0)
    last = [sample.answer.answer.outcome for sample in after.samples if sample.answer is not None]
    assert set(last) == {"ok"}, "whole again"
