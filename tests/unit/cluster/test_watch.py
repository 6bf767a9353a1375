"""What keeps a station from starting a replica comes into the log once, and so does its end."""

from __future__ import annotations

import io
import json
import threading

from cluster.names import deployment_name, station_name
from cluster.watch import StationWatch
from shared.log import JsonLogger


def test_each_reason_is_logged_once() -> None:
    lines = io.StringIO()
    reasons: dict[str, str] = {}
    watch = StationWatch(lambda: dict(reasons), JsonLogger(stream=lines))
    watch.look()
    reasons["embedding:0"] = "WeightsError: tables/item.safetensors"
    watch.look()
    watch.look()
    reasons.clear()
    watch.look()
    watch.look()
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [(line["event"], line["station"]) for line in found] == [
        ("replica_start_failed", "embedding:0"),
        ("station_whole", "embedding:0"),
    ]
    assert found[0]["reason"] == "WeightsError: tables/item.safetensors"


def test_a_controller_that_does_not_answer_ends_no_watch() -> None:
    asked = threading.Semaphore(0)

    def fail() -> dict[str, str]:
        asked.release()
        raise RuntimeError("no controller")

    watch = StationWatch(fail, JsonLogger(stream=io.StringIO()), period_s=0.001)
    watch.start()
    for _ in range(3):
        assert asked.acquire(timeout=5)
    watch.stop()
    watch.join(5)
    assert not watch.is_alive()


def test_names_of_serve_lead_back_to_stations() -> None:
    for station in ("ingress", "embedding:11", "ranking:full", "ranking:first-pass"):
        assert station_name(deployment_name(station)) == station
