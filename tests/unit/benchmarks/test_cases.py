from __future__ import annotations

import numpy as np
import pytest

from benchmarks.cases import HISTORY_KINDS, SHORT_MAX, UNKNOWN_EVERY, UNKNOWN_ID, CaseSource, HistoryKind
from shared.errors import DataUnavailableError
from tests.helpers.tiny_dataset import tiny_dataset

LENGTH = 30


@pytest.fixture(scope="module")
def source() -> CaseSource:
    return CaseSource(tiny_dataset(), LENGTH, seed=3)


@pytest.mark.parametrize("kind", HISTORY_KINDS)
def test_a_case_has_distinct_candidates_and_the_history_of_its_kind(source: CaseSource, kind: HistoryKind) -> None:
    for number in range(12):
        case = source.case(number, kind, 20)
        assert len(case.candidates) == len(set(case.candidates)) == 20
        low, high = {"empty": (0, 0), "short": (1, SHORT_MAX), "long": (LENGTH, LENGTH)}[kind]
        assert low <= len(case.history) <= high
        assert (case.user_index is None) == (kind == "empty")


def test_the_history_is_the_users_newest_events_strictly_before_the_request(source: CaseSource) -> None:
    dataset = tiny_dataset()
    for number in range(20):
        case = source.case(number, "long", 20)
        assert case.user_index is not None
        mine = dataset.log.user_index == case.user_index
        earlier = mine & (dataset.log.timestamp_s < case.as_of_s)
        np.testing.assert_array_equal(case.history.item_keys, dataset.log.item_id[earlier][-LENGTH:])
        np.testing.assert_array_equal(case.history.weights, dataset.log.rating[earlier][-LENGTH:])
        assert case.history.num_total == int(earlier.sum())
        now = mine & (dataset.log.timestamp_s == case.as_of_s)
        assert set(case.candidates[: case.num_true]) <= set(dataset.log.item_id[now].tolist())
        assert case.history.profile == dataset.users.profile(case.user_index)


def test_the_same_seed_draws_the_same_cases_and_another_seed_others() -> None:
    first, again, other = (CaseSource(tiny_dataset(), LENGTH, seed) for seed in (1, 1, 2))
    assert first.case(4, "short", 20).candidates == again.case(4, "short", 20).candidates
    assert first.case(4, "short", 20).candidates != other.case(4, "short", 20).candidates


def test_some_cases_hold_ids_that_nobody_knows_and_strangers_are_ints_and_strings(source: CaseSource) -> None:
    case = source.case(UNKNOWN_EVERY - 1, "long", 20)
    assert {UNKNOWN_ID + UNKNOWN_EVERY - 1, f"new-ad-{UNKNOWN_EVERY - 1}"} <= set(case.candidates)
    assert {type(source.case(number, "empty", 20).user) for number in range(4)} == {int, str}


def test_more_candidates_than_the_catalog_has_are_refused(source: CaseSource) -> None:
    with pytest.raises(DataUnavailableError, match="items"):
        source.case(0, "long", 100_000)


def test_a_case_becomes_a_valid_request(source: CaseSource) -> None:
    case = source.case(1, "short", 20)
    request = case.request("r1", speculative=False, tier="full", deadline_ms=5_000, limit=7)
    assert (request.user_id, request.timestamp_s, request.limit, request.tier) == (case.user, case.as_of_s, 7, "full")
    assert request.candidates == case.candidates
    assert not request.speculative
