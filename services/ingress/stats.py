"""What an ingress replica counts: requests by outcome, answers by tier, what was degraded, retried and shed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from shared.breaker import Breakers
from shared.clock import Clock
from shared.errors import RankMeshError
from shared.metrics import MetricsRegistry

Kind: TypeAlias = Literal["rank", "events"]


class IngressStats:
    """Counts of one replica, for Prometheus and for ``status``.

    Args:
        tiers: Names of the ranking tiers.
        clock: Time.
    """

    def __init__(self, tiers: Sequence[str], clock: Clock) -> None:
        self._metrics = MetricsRegistry("ingress", {"tier": tiers})
        self._counts: Counter[str] = Counter()
        self._clock = clock

    @contextmanager
    def request(self, kind: Kind, received_s: float) -> Iterator[None]:
        """Count one request by its outcome: ok, cancelled, or the code of its error."""
        outcome = "internal"
        try:
            yield
            outcome = "ok"
        except RankMeshError as error:
            outcome = error.code
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._add("requests_total", kind=kind, outcome=outcome)
            self._metrics.observe("request_ms", (self._clock.monotonic_s() - received_s) * 1e3, kind=kind)

    def shed(self, kind: Kind) -> None:
        """Count a request that was refused at admission."""
        self._add("shed_requests_total", kind=kind)

    def in_flight(self, kind: Kind, number: int) -> None:
        """Say how many requests are in flight."""
        self._counts[f"in_flight_requests.{kind}"] = number
        self._metrics.set("in_flight_requests", number, kind=kind)

    def retried(self, stations: Iterable[str]) -> None:
        """Count calls that were made a second time."""
        for station in stations:
            self._add("retries_total", station=_family(station))

    def hedged(self, calls: Iterable[tuple[str, bool]]) -> None:
        """Count calls that were made of a second replica while the first still ran: station, and whether it won."""
        for station, won in calls:
            self._add("hedges_total", station=_family(station), winner="second" if won else "first")
            self._counts[f"hedges.{station}"] += 1  # a shard each, which the metrics do not tell apart

    def answered(self, body: dict[str, Any]) -> None:
        """Count a rank answer: tier, candidates, what was replaced, and the time of each critical stage."""
        self._add("answers_total", tier=body["tier"])
        self._add("candidates_total", body["num_candidates"])
        for station in body["degraded"]:
            self._add("degraded_total", station=_family(station))
        for stage in body["stages"]:
            if stage["critical"]:
                self._metrics.observe("stage_ms", stage["duration_ms"], stage=_family(stage["name"]))

    def breakers(self, breakers: Iterable[Breakers]) -> None:
        """Take over what the breakers of all stations have counted."""
        for each in breakers:
            counted = {
                "breakers_opened_total": each.num_opened,
                "breakers_closed_total": each.num_opened - len(each.open),
                "refused_calls_total": each.num_refused,
            }
            for metric, number in counted.items():
                known = f"{metric.removesuffix('_total')}.{each.station}"  # a shard each, as hedges
                self._metrics.count(metric, number - self._counts[known], station=_family(each.station))
                self._counts[known] = number

    def counters(self) -> dict[str, int]:
        """Return the plain counts."""
        return dict(self._counts)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return self._metrics.render()

    def _add(self, metric: str, number: int = 1, /, **labels: str) -> None:
        self._counts[".".join((metric.removesuffix("_total"), *labels.values()))] += number
        self._metrics.count(metric, number, **labels)


def _family(station: str) -> str:
    """Return ``embedding`` for ``embedding:1``: metrics do not grow with the mesh."""
    return station.partition(":")[0]
