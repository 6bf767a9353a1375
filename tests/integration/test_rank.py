"""Ranking over HTTP: what an answer holds, in both wire forms, and what the views say of the mesh."""

from __future__ import annotations

from typing import Any

import httpx
import msgpack
import pytest

from benchmarks.cases import Case, CaseSource
from benchmarks.checks import number_faults, stage_fault
from benchmarks.site import Site
from services.ingress.directory import ModelsBody, StatusBody
from shared.schema.api import RankResponse


@pytest.fixture(scope="module")
def case(site: Site) -> Case:
    return CaseSource(site.dataset, site.history_length, seed=7).case(0, "long", 500)


def body(case: Case, **fields: Any) -> dict[str, Any]:
    request = case.request("it-1", speculative=False, tier="auto", deadline_ms=10_000, limit=None)
    return {**request.model_dump(mode="json", exclude_none=True), **fields}


def rank(http: httpx.Client, document: dict[str, Any]) -> RankResponse:
    response = http.post("/v1/rank", json=document)
    assert response.status_code == 200, response.text
    return RankResponse.model_validate(response.json())


def test_an_answer_is_whole(http: httpx.Client, site: Site, case: Case) -> None:
    answer = rank(http, body(case))
    assert (answer.degraded, answer.reasons) == ([], {})
    assert (answer.request_id, answer.user_id) == ("it-1", case.user)
    assert (answer.tier, answer.weights_version) == ("full", site.source.version)
    assert answer.num_candidates == 500
    assert len(answer.candidates) == site.default_limit
    assert {row.id for row in answer.candidates} <= set(case.candidates)
    assert number_faults(answer) == []
    values = [row.value for row in answer.candidates if row.scored_by == "full"]
    assert values == sorted(values, reverse=True)


def test_critical_stages_add_up_to_the_total_and_compute_fits_into_them(http: httpx.Client, case: Case) -> None:
    rank(http, body(case))
    answers = [rank(http, body(case)) for _ in range(5)]
    assert [stage_fault(answer) for answer in answers] == [None] * 5
    for stage in answers[-1].stages:
        if stage.critical and stage.compute_ms is not None:
            assert 0 < stage.compute_ms <= stage.duration_ms
    names = {stage.name for stage in answers[-1].stages}
    assert {"admission", "preprocess", "sequence", "embedding:0", "embedding:1", "gather", "ranking:full"} <= names


def test_the_same_request_gets_the_same_bits(http: httpx.Client, case: Case) -> None:
    first, second = rank(http, body(case)), rank(http, body(case))
    assert first.candidates == second.candidates


def test_scores_do_not_depend_on_the_other_candidates(http: httpx.Client, case: Case) -> None:
    whole = {row.id: row for row in rank(http, body(case, limit=500)).candidates}
    few = rank(http, body(case, candidates=case.candidates[:3], limit=3))
    for row in few.candidates:
        assert row.scores == pytest.approx(whole[row.id].scores, abs=1e-5)


def test_msgpack_in_and_out_says_the_same_as_json(http: httpx.Client, case: Case) -> None:
    document = body(case)
    packed = http.post(
        "/v1/rank",
        content=msgpack.packb(document),
        headers={"content-type": "application/msgpack", "accept": "application/msgpack"},
    )
    assert packed.status_code == 200
    assert packed.headers["content-type"].startswith("application/msgpack")
    answer = RankResponse.model_validate(msgpack.unpackb(packed.content))
    again = rank(http, document)
    assert (answer.tier, answer.tier_reason) == (again.tier, again.tier_reason)
    assert answer.candidates == again.candidates
    assert len(packed.content) < len(http.post("/v1/rank", json=document).content)


def test_ids_come_back_as_they_were_sent(http: httpx.Client, case: Case) -> None:
    sent: list[int | str] = [1, "2", "an-ad", 2**63 - 1, "\u00e9\u4e2d"]
    answer = rank(http, body(case, user_id="5", candidates=sent))
    assert answer.user_id == "5"
    assert {(type(row.id), row.id) for row in answer.candidates} == {(type(id_), id_) for id_ in sent}
    assert answer.num_oov["item_id"] == 3


def test_a_number_and_its_spelling_are_one_user(http: httpx.Client, case: Case) -> None:
    by_number, by_text = rank(http, body(case)), rank(http, body(case, user_id=str(case.user)))
    assert by_number.candidates == by_text.candidates
    assert by_number.history_length == by_text.history_length == len(case.history)


def test_a_forced_tier_is_obeyed(http: httpx.Client, case: Case) -> None:
    answer = rank(http, body(case, tier="light"))
    assert answer.tier == "light"
    assert {row.scored_by for row in answer.candidates} == {"first"}


def test_the_status_lists_every_deployment_with_live_replicas(http: httpx.Client, site: Site) -> None:
    status = StatusBody.model_validate(http.get("/v1/status").json())
    assert status.ready
    assert status.version == site.source.version
    assert status.store.healthy
    deployments = {each.name: each for each in status.deployments}
    expected = {"ingress", "preprocess", "embedding:0", "embedding:1", "sequence", "speculative", "foundation"}
    assert set(deployments) == expected | {"ranking:full", "ranking:light"}
    for name, each in deployments.items():
        assert len(each.replicas) == each.target >= 1, name
        assert all(replica.state == "ready" and replica.pid for replica in each.replicas), name
        versions = {replica.version for replica in each.replicas}
        assert versions <= {site.source.version}, name
    pids = [replica.pid for each in status.deployments for replica in each.replicas]
    assert len(set(pids)) == len(pids)


def test_the_models_view_and_the_probes(http: httpx.Client, site: Site) -> None:
    (model,) = ModelsBody.model_validate(http.get("/v1/models").json()).models
    assert (model.version, model.history_length) == (site.source.version, site.history_length)
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ready", "version": site.source.version}
    assert http.get("/openapi.json").json()["openapi"].startswith("3.")
    assert "text/html" in http.get("/").headers["content-type"]
