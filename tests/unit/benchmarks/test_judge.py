from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.cases import Case
from benchmarks.client import Answer
from benchmarks.judge import Judge, Judgement, SpeculativeInputs
from shared.errors import StageUnavailableError
from shared.schema.api import RankResponse
from shared.schema.user import UserHistory
from shared.userlog import UserLoad
from tests.helpers.faulty import Fault
from tests.helpers.local_mesh import LocalMesh
from tests.helpers.weights import random_weights

SOURCE = random_weights()
HISTORY = UserHistory(
    np.array([3, 9], np.int64), np.array([4, 5], np.float32), np.array([10, 20], np.int64), 2, {"gender": "F"}
)
LOAD = UserLoad(5, HISTORY.item_keys, HISTORY.weights, HISTORY.timestamps_s, [1, 2], HISTORY.profile)
CASE = Case("case", "short", 1, 5, [1, 2, 3, 7, 30, "new-ad"], 1, "ml-1m", 100, HISTORY)
REQUEST = CASE.request("r", speculative=False, tier="auto", deadline_ms=5_000, limit=None)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(SOURCE, default_limit=100, num_shards=2)


async def answer_of_the_mesh(*broken: str) -> RankResponse:
    async with LocalMesh.running(SOURCE) as mesh:
        await mesh.log.load_many([LOAD])
        for station in broken:
            method = "encode" if station == "sequence" else "lookup"
            mesh.services[station].always(method, Fault(StageUnavailableError("dead")))
        body = await mesh.ingress.rank(REQUEST)
    return RankResponse.model_validate(body)


def verdict(judge: Judge, response: RankResponse, speculative: SpeculativeInputs | None = None) -> Judgement:
    return judge.judge("case", CASE, REQUEST, Answer("ok", 200, 1.0, body=response), speculative)


def changed(response: RankResponse, rank: int, **fields: Any) -> RankResponse:
    rows = list(response.candidates)
    rows[rank] = rows[rank].model_copy(update=fields)
    return response.model_copy(update={"candidates": rows})


async def test_the_meshs_answer_is_right_and_its_error_is_small(judge: Judge) -> None:
    judgement = verdict(judge, await answer_of_the_mesh())
    assert judgement.faults == ()
    assert judgement.max_abs_error < judge.tolerance
    assert not judgement.degraded


async def test_every_kind_of_wrong_answer_is_found(judge: Judge) -> None:
    right = await answer_of_the_mesh()
    first, second, *rest = right.candidates
    scores = {**first.scores, "conversion": first.scores["conversion"] * 0.99}
    wrong = {
        "score": changed(right, 0, scores=scores),
        "value": changed(right, 0, value=first.value + 1e-3),
        "not finite": changed(right, 0, value=float("nan")),
        "order": right.model_copy(update={"candidates": [second, first, *rest]}),
        "another candidate": changed(right, 0, id=4),
        "pass": changed(right, 0, scored_by="first"),
        "level": changed(right, 0, speculative="exact"),
        "version": right.model_copy(update={"weights_version": "older"}),
        "history": right.model_copy(update={"history_length": 1}),
        "short": right.model_copy(update={"candidates": [first]}),
    }
    assert {name for name, response in wrong.items() if not verdict(judge, response).faults} == set()


async def test_candidates_of_equal_value_may_stand_either_way_round(judge: Judge) -> None:
    twins = ["twin-a", "twin-b"]  # both unknown, so equal in everything but the key
    case = Case("twins", "short", 1, 5, [1, *twins], 1, "ml-1m", 100, HISTORY)
    request = case.request("r", speculative=False, tier="auto", deadline_ms=5_000, limit=None)
    async with LocalMesh.running(SOURCE) as mesh:
        await mesh.log.load_many([LOAD])
        response = RankResponse.model_validate(await mesh.ingress.rank(request))
    judgement = judge.judge("twins", case, request, Answer("ok", 200, 1.0, body=response))
    assert judgement.faults == ()
    assert judgement.num_ties in (0, 2), "the oracle's own rounding decides which of the twins it puts first"


@pytest.mark.parametrize("broken", [("embedding:0",), ("embedding:1",), ("sequence",), ("sequence", "embedding:1")])
async def test_a_marked_answer_must_be_right_without_what_it_names(judge: Judge, broken: tuple[str, ...]) -> None:
    response = await answer_of_the_mesh(*broken)
    assert set(response.degraded) == set(broken)
    judgement = verdict(judge, response)
    assert (judgement.faults, judgement.degraded) == ((), True)
    assert verdict(judge, changed(response, 0, value=float("inf"))).faults
    assert verdict(judge, response.model_copy(update={"degraded": []})).faults, "it must be marked"


async def test_a_mark_may_name_a_part_that_the_accepted_answer_had(judge: Judge) -> None:
    marked = (await answer_of_the_mesh()).model_copy(update={"degraded": ["sequence", "embedding:1"]})
    assert verdict(judge, marked).faults == ()


async def test_an_unreachable_user_log_means_no_history_and_no_profile(judge: Judge) -> None:
    async with LocalMesh.running(SOURCE) as mesh:
        response = RankResponse.model_validate(await mesh.ingress.rank(REQUEST))  # nothing is loaded
    marks = {"degraded": ["sequence"], "reasons": {"sequence": "store_unavailable"}}
    assert verdict(judge, response.model_copy(update=marks)).faults == ()
    assert verdict(judge, response).faults


async def test_scores_from_an_older_history_cannot_be_known(judge: Judge) -> None:
    marks = {"degraded": ["sequence"], "reasons": {"sequence": "stale_history"}, "history_length": 1}
    stale = (await answer_of_the_mesh()).model_copy(update=marks)
    assert verdict(judge, stale) == Judgement("case", (), degraded=True)


def test_no_answer_is_wrong(judge: Judge) -> None:
    judgement = judge.judge("case", CASE, REQUEST, Answer("hung", 0, 1.0, detail="ReadTimeout"))
    assert judgement.faults == ("hung 0: ReadTimeout",)


async def test_speculative_inputs_change_what_is_right(judge: Judge) -> None:
    cold = await answer_of_the_mesh()
    width = judge.oracle.config.speculative_width
    levels = np.zeros(6, np.int8)
    levels[0] = 3
    inputs = SpeculativeInputs(np.ones((6, width), np.float32), levels)
    faults = verdict(judge, cold, inputs).faults
    assert any("has level none, must have exact" in fault for fault in faults)
    assert any("objective" in fault for fault in faults)


async def test_candidates_are_told_apart_by_type(judge: Judge) -> None:
    response = await answer_of_the_mesh()
    rank = next(rank for rank, row in enumerate(response.candidates) if isinstance(row.id, int))
    renamed = changed(response, rank, id=str(response.candidates[rank].id))
    assert any("not sent in that form" in fault for fault in verdict(judge, renamed).faults)
