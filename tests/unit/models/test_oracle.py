"""What ``compare`` lets pass and what it does not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from models.config import TierConfig
from models.features import FeatureExtractor
from models.oracle import Oracle, OracleAnswer, compare, tolerance
from models.random_weights import TINY
from models.stations import CandidateRanker, Ranking, RequestEncoder, TableShard
from shared.schema.embeddings import EmbeddingRows
from shared.schema.stamp import Stamp
from shared.schema.user import UserHistory
from tests.helpers.weights import random_weights

_TOLERANCE = tolerance(TINY)


@pytest.fixture(scope="module")
def pair() -> tuple[OracleAnswer, Ranking]:
    source = random_weights(
        TINY.model_copy(update={"tiers": {"light": TierConfig(head_max=0), "full": TierConfig(head_max=6)}})
    )
    candidates = list(range(1, 13))
    stamp = Stamp("r", "random", "test", "0", 0.0)
    features = FeatureExtractor.from_weights(source).extract_ids(candidates).stamped(stamp)
    rows = [EmbeddingRows(stamp, 0, TableShard(source, 0, 1).lookup(features))]
    state = RequestEncoder.from_weights(source).encode(UserHistory.empty(), 2, "web", 10)
    ranking = CandidateRanker.from_weights(source).rank(features, state, rows, None, "full", 9)
    answer = Oracle.from_weights(source).rank(2, candidates, UserHistory.empty(), "web", 10, "full", 9)
    return answer, ranking


def test_the_right_answer_has_no_difference(pair: tuple[OracleAnswer, Ranking]) -> None:
    assert compare(*pair, _TOLERANCE) == []


def test_an_error_within_the_tolerance_passes_and_beyond_it_does_not(pair: tuple[OracleAnswer, Ranking]) -> None:
    answer, ranking = pair
    for factor, right in ((0.4, True), (3.0, False)):
        off = dataclasses.replace(ranking, scores=ranking.scores + np.float32(factor * _TOLERANCE))
        assert (compare(answer, off, _TOLERANCE) == []) is right


def test_a_swap_of_unequal_candidates_is_a_difference(pair: tuple[OracleAnswer, Ranking]) -> None:
    answer, ranking = pair
    swap = np.array([1, 0, *range(2, 9)])
    swapped = dataclasses.replace(
        ranking, order=ranking.order[swap], scores=ranking.scores[swap], values=ranking.values[swap]
    )
    assert any("must not follow" in difference for difference in compare(answer, swapped, _TOLERANCE))


def test_a_missing_or_repeated_candidate_is_a_difference(pair: tuple[OracleAnswer, Ranking]) -> None:
    answer, ranking = pair
    short = dataclasses.replace(ranking, order=ranking.order[:-1])
    assert compare(answer, short, _TOLERANCE) == ["answer has 8 candidates, must have 9"]
    repeated = dataclasses.replace(ranking, order=np.append(ranking.order[:-1], ranking.order[0]))
    assert compare(answer, repeated, _TOLERANCE) == ["order repeats candidates or names some that were not asked"]


def test_another_candidate_in_the_answer_is_a_difference(pair: tuple[OracleAnswer, Ranking]) -> None:
    answer, ranking = pair
    left_out = next(c for c in range(12) if c not in ranking.order)
    other = dataclasses.replace(
        ranking,
        order=np.append(ranking.order[:-1], left_out).astype(np.int32),
        scores=np.concatenate([ranking.scores[:-1], answer.first_scores[left_out][None]]),
        values=np.append(ranking.values[:-1], answer.first_values[left_out]).astype(np.float32),
    )
    assert f"candidate {ranking.order[-1]} is better than what was answered" in compare(answer, other, _TOLERANCE)


def test_an_answer_that_ends_within_the_head_must_hold_the_best_of_it(pair: tuple[OracleAnswer, Ranking]) -> None:
    answer, ranking = pair
    three = dataclasses.replace(answer, order=answer.order[:3])
    without_second = np.array([0, 2, 3])
    fields = {name: getattr(ranking, name)[without_second] for name in ("order", "scores", "values", "full_pass")}
    differences = compare(three, dataclasses.replace(ranking, **fields), _TOLERANCE)
    assert differences == [f"candidate {ranking.order[1]} is better than what was answered"]


def test_the_wrong_pass_is_a_difference(pair: tuple[OracleAnswer, Ranking]) -> None:
    answer, ranking = pair
    first = dataclasses.replace(ranking, full_pass=np.zeros(9, np.bool_))
    assert any("wrong pass" in difference for difference in compare(answer, first, _TOLERANCE))


def test_values_equal_within_the_tolerance_may_swap(pair: tuple[OracleAnswer, Ranking]) -> None:
    answer, ranking = pair
    tiny = np.float32(_TOLERANCE / 8)
    twins = answer.order[:2]
    values, scores = answer.full_values.copy(), answer.full_scores.copy()
    values[twins], scores[twins] = values[twins[0]], scores[twins[0]]
    values[twins[1]] -= tiny
    near = dataclasses.replace(
        answer,
        full_values=values,
        full_scores=scores,
        values=np.where(answer.full_pass, values, answer.values),
        scores=np.where(answer.full_pass[:, None], scores, answer.scores),
    )
    swap = np.array([1, 0, *range(2, 9)])
    swapped = dataclasses.replace(
        ranking,
        order=ranking.order[swap],
        scores=np.concatenate([scores[twins], ranking.scores[2:]]),
        values=np.concatenate([[values[twins[0]] + tiny, values[twins[0]]], ranking.values[2:]]).astype(np.float32),
    )
    assert compare(near, swapped, _TOLERANCE) == []
