from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.cases import Case
from benchmarks.client import Answer
from benchmarks.judge import Judge, Judgement, SpeculativeInputs
from models.random_weights import random_weights
from shared.hashing import id_key
from shared.schema.api import RankResponse
from shared.schema.user import UserHistory
from shared.userlog import UserLoad
from tests.helpers.local_mesh import LocalMesh

SOURCE = random_weights()
HISTORY = UserHistory(
    np.array([3, 9], np.int64), np.array([4, 5], np.float32), np.array([10, 20], np.int64), 2, {"gender": "F"}
)
LOAD = UserLoad(5, HISTORY.item_keys, HISTORY.weights, HISTORY.timestamps_s, [1, 2], HISTORY.profile)
CASE = Case("case", "short", 1, 5, [1, 2, 3, 7, 30, "new-ad"], 1, "ml-1m", 100, HISTORY)
REQUEST = CASE.request("r", speculative=False, tier="auto", deadline_ms=5_000, limit=None)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(SOURCE, default_limit=100)


async def answer_of_the_mesh() -> RankResponse:
    async with LocalMesh.running(SOURCE) as mesh:
        await mesh.log.load_many([LOAD])
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
        "value": changed(right, 0, value=first.value * 1.001),
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


async def test_equal_values_go_by_key_and_the_oracle_may_see_them_the_other_way_round(judge: Judge) -> None:
    twins = ["twin-a", "twin-b"]  # both unknown, so equal in everything but the key
    case = Case("twins", "short", 1, 5, [1, *twins], 1, "ml-1m", 100, HISTORY)
    request = case.request("r", speculative=False, tier="auto", deadline_ms=5_000, limit=None)
    async with LocalMesh.running(SOURCE) as mesh:
        await mesh.log.load_many([LOAD])
        response = RankResponse.model_validate(await mesh.ingress.rank(request))
    ids = [row.id for row in response.candidates if row.id in twins]
    assert ids == sorted(twins, key=id_key)
    judgement = judge.judge("twins", case, request, Answer("ok", 200, 1.0, body=response))
    assert judgement.faults == ()
    assert judgement.num_ties in (0, 2), "the oracle's own rounding decides which of the twins it puts first"


async def test_a_degraded_answer_is_marked_and_its_numbers_still_checked(judge: Judge) -> None:
    response = (await answer_of_the_mesh()).model_copy(update={"degraded": ["sequence"]})
    assert verdict(judge, response) == Judgement("case", (), degraded=True)
    assert verdict(judge, changed(response, 0, value=float("inf"))).faults


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
    renamed = changed(response, 0, id=str(response.candidates[0].id))
    assert any("not sent in that form" in fault for fault in verdict(judge, renamed).faults)
