"""Metrics that a process shows to Prometheus: all names and all label values are listed here.

Names are ``rankmesh_<service>_<thing>_<unit>``. A label value that is not in its list is counted as ``other``: whatever
the data bring, the number of series stays what this file says. ``tests/golden/metrics.txt`` pins the names, since
dashboards and alerts depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from shared.errors import RankMeshError

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

OTHER: Final = "other"

MS_BUCKETS: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 50, 75, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
"""Upper bounds of the latency buckets, milliseconds: dense around the 50 ms that a request may take."""


def _codes(cls: type[RankMeshError]) -> list[str]:
    return [cls.code, *(code for child in cls.__subclasses__() for code in _codes(child))]


LABELS: Final[dict[str, tuple[str, ...]]] = {
    "kind": ("rank", "events"),
    "outcome": ("ok", "cancelled", *_codes(RankMeshError)),
    "method": ("extract", "encode", "append", "forget", "keep_explored", "lookup", "fill", "precompute", "rank"),
    "tier": ("light", "full"),
    "station": ("preprocess", "sequence", "embedding", "speculative", "foundation", "ranking"),
    "stage": ("admission", "preprocess", "gather", "ranking", "render"),
    "scored_by": ("first", "full"),
    "winner": ("first", "second"),
    "level": ("none", "user", "exact"),
    "feature": ("item_id", "genres", "year"),
    "fate": ("appended", "duplicates", "expired", "buffered", "lost"),
    "origin": ("encoded", "reused"),
    "reason": ("store_unavailable", "stale_history"),
}
"""Label name -> the values that it may take; a deployment may name its own tiers and features."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric.

    Args:
        kind: Prometheus type.
        service: Deployment that has it.
        name: ``<thing>_<unit>``; counters end in ``total``.
        help: One line for a person.
        labels: Names from ``LABELS``.
    """

    kind: Kind
    service: str
    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """Name on the wire."""
        return f"rankmesh_{self.service}_{self.name}"


def _station(service: str) -> tuple[MetricSpec, ...]:
    """What every station behind the ingress has."""
    return (
        MetricSpec("counter", service, "calls_total", "Calls by method and outcome.", ("method", "outcome")),
        MetricSpec("histogram", service, "compute_ms", "Time computing, without waiting.", ("method",)),
        MetricSpec("gauge", service, "in_flight_calls", "Calls that wait or run now."),
    )


METRICS: Final[tuple[MetricSpec, ...]] = (
    MetricSpec("counter", "ingress", "requests_total", "Requests by outcome.", ("kind", "outcome")),
    MetricSpec("histogram", "ingress", "request_ms", "Time from the whole body to the answer.", ("kind",)),
    MetricSpec("histogram", "ingress", "stage_ms", "Time of each bar of the critical path.", ("stage",)),
    MetricSpec("gauge", "ingress", "in_flight_requests", "Requests in flight now.", ("kind",)),
    MetricSpec("counter", "ingress", "shed_requests_total", "Requests refused at admission.", ("kind",)),
    MetricSpec("counter", "ingress", "answers_total", "Rank answers by the tier that made them.", ("tier",)),
    MetricSpec("counter", "ingress", "degraded_total", "Answers in which a station was replaced.", ("station",)),
    MetricSpec("counter", "ingress", "retries_total", "Calls made a second time.", ("station",)),
    MetricSpec("counter", "ingress", "hedges_total", "Slow calls made twice, by who won.", ("station", "winner")),
    MetricSpec("counter", "ingress", "breakers_opened_total", "Replicas that fell silent.", ("station",)),
    MetricSpec("counter", "ingress", "breakers_closed_total", "Of these, who answer or are gone.", ("station",)),
    MetricSpec("counter", "ingress", "refused_calls_total", "Calls not made, as none would answer.", ("station",)),
    MetricSpec("counter", "ingress", "candidates_total", "Candidates of all rank requests."),
    *_station("preprocess"),
    MetricSpec("counter", "preprocess", "oov_ids_total", "Ids that no vocabulary holds.", ("feature",)),
    *_station("embedding"),
    MetricSpec("counter", "embedding", "rows_total", "Table rows served."),
    MetricSpec("counter", "embedding", "distinct_rows_total", "Distinct table rows of requests, of all shards."),
    MetricSpec("counter", "embedding", "ids_total", "Ids of requests before rows are told apart."),
    MetricSpec("counter", "embedding", "oov_ids_total", "Ids of requests that the row of the unknown stands for."),
    *_station("sequence"),
    MetricSpec("histogram", "sequence", "store_read_ms", "Time of one read of the user log."),
    MetricSpec("counter", "sequence", "events_total", "Appended events by what became of them.", ("fate",)),
    MetricSpec("gauge", "sequence", "buffered_events", "Events that wait for the store."),
    MetricSpec("counter", "sequence", "history_events_total", "Events in states, by who encoded them.", ("origin",)),
    MetricSpec("gauge", "sequence", "cached_state_bytes", "Encoded histories that are kept."),
    MetricSpec("counter", "sequence", "degraded_total", "States not made from a fresh history.", ("reason",)),
    *_station("speculative"),
    MetricSpec("counter", "speculative", "candidates_total", "Candidates by the level that served them.", ("level",)),
    MetricSpec("counter", "speculative", "stored_total", "Embeddings stored."),
    *_station("foundation"),
    MetricSpec("counter", "foundation", "pairs_total", "Pairs evaluated."),
    *_station("ranking"),
    MetricSpec("counter", "ranking", "candidates_total", "Candidates scored, by pass.", ("tier", "scored_by")),
    MetricSpec("histogram", "ranking", "pass_ms", "Time of one pass.", ("tier", "scored_by")),
)

SERVICES: Final = tuple(dict.fromkeys(spec.service for spec in METRICS))


class MetricsRegistry:
    """The metrics of one process, which runs one service.

    Methods take the name without ``rankmesh_<service>_`` and raise ``KeyError`` or ``ValueError`` for a name or label
    that is not listed: that is a mistake in the calling code, whereas an unlisted value of a label is data.

    Args:
        service: One of ``SERVICES``.
        label_values: Values of this deployment in place of those in ``LABELS``, e.g. ``{"tier": ("gold", "full")}``.

    Raises:
        ValueError: there is no such service or label.
    """

    def __init__(self, service: str, label_values: Mapping[str, Sequence[str]] | None = None) -> None:
        if service not in SERVICES:
            raise ValueError(f"service must be one of {', '.join(SERVICES)}, is {service!r}")
        if unknown := set(label_values or {}) - set(LABELS):
            raise ValueError(f"no such labels: {', '.join(sorted(unknown))}")
        # Else each metric has a second series with the time it was made, which nobody asked for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._values = {name: frozenset(values) for name, values in {**LABELS, **(label_values or {})}.items()}
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._children: dict[tuple[Any, ...], Any] = {}
        for spec in METRICS:
            if spec.service == service:
                self._add(spec)

    def count(self, name: str, number: float = 1, /, **labels: str) -> None:
        """Add to a counter."""
        child: Counter = self._child(self._counters[name], name, labels)
        child.inc(number)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Set a gauge."""
        child: Gauge = self._child(self._gauges[name], name, labels)
        child.set(value)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Put a value, in the metric's unit, into a histogram."""
        child: Histogram = self._child(self._histograms[name], name, labels)
        child.observe(value)

    def render(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self._registry)

    def _add(self, spec: MetricSpec) -> None:
        match spec.kind:
            case "counter":
                self._counters[spec.name] = Counter(spec.full_name, spec.help, spec.labels, registry=self._registry)
            case "gauge":
                self._gauges[spec.name] = Gauge(spec.full_name, spec.help, spec.labels, registry=self._registry)
            case "histogram":
                self._histograms[spec.name] = Histogram(
                    spec.full_name, spec.help, spec.labels, registry=self._registry, buckets=MS_BUCKETS
                )

    def _child(self, family: Any, name: str, labels: dict[str, str]) -> Any:
        """Return the series of some label values, found once: finding it costs as much as counting."""
        if not labels:
            return family
        key = (name, *labels.items())
        child = self._children.get(key)
        if child is None:
            closed = self._closed(labels)
            child = family.labels(**closed)
            if closed == labels:  # what is not listed could be anything, and would fill the memory
                self._children[key] = child
        return child

    def _closed(self, labels: dict[str, str]) -> dict[str, str]:
        return {name: value if value in self._values.get(name, ()) else OTHER for name, value in labels.items()}
