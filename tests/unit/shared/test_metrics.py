"""Metrics: pinned names, closed labels, Prometheus' text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.errors import RankMeshError
from shared.metrics import LABELS, METRICS, MS_BUCKETS, OTHER, SERVICES, MetricsRegistry

GOLDEN = Path(__file__).parents[2] / "golden" / "metrics.txt"


def samples(registry: MetricsRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(registry.render().decode())
    found = [sample for family in families for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in found}


def test_the_names_are_those_of_the_golden_file() -> None:
    """Dashboards and alerts hold them: a change must be meant, and made in the golden file by hand too."""
    lines = [f"{spec.kind} {spec.full_name} {','.join(spec.labels)}".rstrip() for spec in METRICS]
    assert lines == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_names_follow_the_rule() -> None:
    units = {"counter": ("total",), "histogram": ("ms",), "gauge": ("requests", "calls", "events", "bytes")}
    for spec in METRICS:
        assert re.fullmatch(r"rankmesh_[a-z]+_[a-z][a-z_]*", spec.full_name)
        assert spec.name.rpartition("_")[2] in units[spec.kind], spec.full_name
        assert spec.help.endswith(".")
        assert set(spec.labels) <= set(LABELS)
    assert len({spec.full_name for spec in METRICS}) == len(METRICS)


def test_every_error_code_is_an_outcome() -> None:
    assert {"ok", "cancelled", RankMeshError.code, "overloaded", "malformed_body"} <= set(LABELS["outcome"])
    assert OTHER not in {value for values in LABELS.values() for value in values}


@pytest.mark.parametrize("service", SERVICES)
def test_every_metric_of_a_service_can_be_written_and_shown(service: str) -> None:
    registry = MetricsRegistry(service)
    write = {"counter": registry.count, "gauge": registry.set, "histogram": registry.observe}
    for spec in METRICS:
        if spec.service == service:
            write[spec.kind](spec.name, 1, **{label: LABELS[label][0] for label in spec.labels})
    text = registry.render().decode()
    for spec in METRICS:
        assert (f"# TYPE {spec.full_name} {spec.kind}" in text) == (spec.service == service)
    assert "_created" not in text


def test_counters_gauges_and_histograms() -> None:
    registry = MetricsRegistry("ingress")
    registry.count("requests_total", kind="rank", outcome="ok")
    registry.count("requests_total", 2, kind="rank", outcome="ok")
    registry.count("candidates_total", 500)
    registry.set("in_flight_requests", 3, kind="rank")
    registry.set("in_flight_requests", 2, kind="rank")
    registry.observe("request_ms", 12.0, kind="rank")
    registry.observe("request_ms", 20.0, kind="rank")
    shown = samples(registry)
    assert shown["rankmesh_ingress_requests_total", (("kind", "rank"), ("outcome", "ok"))] == 3
    assert shown["rankmesh_ingress_candidates_total", ()] == 500
    assert shown["rankmesh_ingress_in_flight_requests", (("kind", "rank"),)] == 2
    assert shown["rankmesh_ingress_request_ms_sum", (("kind", "rank"),)] == 32
    bucket = "rankmesh_ingress_request_ms_bucket"
    assert shown[bucket, (("kind", "rank"), ("le", "10.0"))] == 0
    assert shown[bucket, (("kind", "rank"), ("le", "20.0"))] == 2
    assert shown[bucket, (("kind", "rank"), ("le", "+Inf"))] == 2


def test_a_value_that_is_not_listed_makes_no_series_of_its_own() -> None:
    registry = MetricsRegistry("preprocess")
    for number in range(50):
        registry.count("oov_ids_total", feature=f"surprise{number}")
    shown = samples(registry)
    assert shown["rankmesh_preprocess_oov_ids_total", (("feature", OTHER),)] == 50
    assert len(shown) <= 2


def test_a_deployment_names_its_own_values() -> None:
    registry = MetricsRegistry("ranking", {"tier": ["gold"]})
    registry.count("candidates_total", 5, tier="gold", scored_by="full")
    registry.count("candidates_total", 7, tier="light", scored_by="full")
    shown = samples(registry)
    name = "rankmesh_ranking_candidates_total"
    assert shown[name, (("scored_by", "full"), ("tier", "gold"))] == 5
    assert shown[name, (("scored_by", "full"), ("tier", OTHER))] == 7


def test_two_registries_of_one_process_share_nothing() -> None:
    one, other = MetricsRegistry("embedding"), MetricsRegistry("embedding")
    one.count("rows_total", 5)
    assert samples(one)["rankmesh_embedding_rows_total", ()] == 5
    assert samples(other)["rankmesh_embedding_rows_total", ()] == 0


def test_mistakes_of_the_calling_code_are_errors() -> None:
    registry = MetricsRegistry("embedding")
    with pytest.raises(KeyError):
        registry.count("rwos_total")
    with pytest.raises(KeyError):
        registry.count("compute_ms", method="lookup")  # a histogram
    with pytest.raises(ValueError, match="label"):
        registry.observe("compute_ms", 1.0)
    with pytest.raises(ValueError, match="abel"):
        registry.observe("compute_ms", 1.0, methd="lookup")
    with pytest.raises(ValueError, match="service must be one of"):
        MetricsRegistry("embeding")
    with pytest.raises(ValueError, match="no such labels: teir"):
        MetricsRegistry("ranking", {"teir": ["x"]})


def test_buckets_are_dense_where_the_budget_is() -> None:
    assert list(MS_BUCKETS) == sorted(set(MS_BUCKETS))
    assert sum(10 <= bound <= 100 for bound in MS_BUCKETS) >= 6


def test_label_values_that_are_not_listed_take_no_memory() -> None:
    registry = MetricsRegistry("embedding")
    for number in range(100):
        registry.count("calls_total", method=f"made-up-{number}", outcome="ok")
        registry.count("calls_total", method="lookup", outcome="ok")
    assert len(registry._children) == 1
    text = registry.render().decode()
    assert 'method="other",outcome="ok"} 100.0' in text
    assert 'method="lookup",outcome="ok"} 100.0' in text
