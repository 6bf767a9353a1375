"""Outcomes are joined to the answer that was before them: once, in time, of sound answers of these weights alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models.routing import SIGNALS
from shared.hashing import EntityId, store_token
from shared.schema.api import Event
from shared.schema.explored import ExploredAnswer
from shared.schema.user import UserHistory
from shared.userlog import MemoryUserLog
from shared.userlog.explored import MemoryExploredLog
from training.outcomes import JoinConfig, Outcomes, join_outcomes, read_outcomes

DEPTHS = (0, 1, 2)
NOW_S = 1_000_000
CONFIG = JoinConfig(delay_s=100, window_s=50, age_s_max=10_000, user_outcomes_max=3)


def answer(user: EntityId = 1, as_of_s: int = NOW_S - 1_000, items: tuple[int, ...] = (5, 6, 7)) -> ExploredAnswer:
    exits = np.zeros((len(items), 3, 2), np.float32)
    exits[:, :, 0] = np.arange(len(items))[:, None] + 0.1 * np.arange(3)
    signals = np.full(len(SIGNALS), as_of_s % 97, np.float32)
    return ExploredAnswer(user, "v+2", "feed", as_of_s, as_of_s, DEPTHS, np.array(items), exits, signals)


def history(*events: tuple[int, float, int]) -> UserHistory:
    items, weights, times = zip(*events, strict=True)
    return UserHistory(np.array(items), np.array(weights, np.float32), np.array(times), len(events))


def join(
    answers: list[ExploredAnswer],
    events: dict[EntityId, UserHistory],
    config: JoinConfig = CONFIG,
    now_s: float = NOW_S,
) -> Outcomes:
    known = {store_token(user): one for user, one in events.items()}
    return join_outcomes(answers, known, "v", DEPTHS, now_s, config)


def test_what_was_touched_is_labelled_and_the_rest_is_not() -> None:
    at_s = NOW_S - 1_000
    found = join([answer()], {1: history((5, 3.0, at_s), (9, 5.0, at_s + 1), (7, 4.0, at_s + 2))})
    assert len(found) == 2
    assert found.clicks.tolist() == [True, False], "the newest first"
    assert found.conversions.tolist() == [False, False]
    np.testing.assert_allclose(found.logits[:, :, 0], [[2.0, 2.1, 2.2], [0.0, 0.1, 0.2]], rtol=1e-6)
    assert found.age_s.tolist() == [1_000, 1_000]
    assert found.counts["candidates"] == 3
    assert found.counts["users"] == 1


@pytest.mark.parametrize(("after_s", "counts"), [(-1, False), (0, True), (49, True), (50, False)])
def test_an_event_counts_from_the_request_to_the_end_of_the_window(after_s: int, counts: bool) -> None:
    assert len(join([answer()], {1: history((5, 5.0, NOW_S - 1_000 + after_s))})) == counts


@pytest.mark.parametrize(
    ("age_s", "fate"), [(99, "too_young"), (100, "joined"), (10_000, "joined"), (10_001, "too_old")]
)
def test_an_answer_counts_from_the_delay_to_its_greatest_age(age_s: int, fate: str) -> None:
    as_of_s = NOW_S - age_s
    found = join([answer(as_of_s=as_of_s)], {1: history((5, 5.0, as_of_s))})
    assert found.counts[f"answers_{fate}"] == 1
    assert len(found) == (fate == "joined")


def test_an_event_belongs_to_the_newest_answer_before_it_and_counts_once() -> None:
    first, second = answer(as_of_s=NOW_S - 1_000), answer(as_of_s=NOW_S - 980)
    events = history((5, 2.0, NOW_S - 990), (5, 5.0, NOW_S - 970), (5, 1.0, NOW_S - 960))
    found = join([first, second], {1: events})
    assert found.signals[:, 0].tolist() == [second.signals[0], first.signals[0]]
    assert found.clicks.tolist() == [True, False]
    assert found.counts["events_repeated"] == 1


def test_an_answer_that_was_kept_twice_is_one() -> None:
    events: dict[EntityId, UserHistory] = {1: history((5, 5.0, NOW_S - 999), (6, 1.0, NOW_S - 998))}
    once, twice = join([answer()], events), join([answer(), answer()], events)
    assert twice.counts["answers_repeated"] == 1
    np.testing.assert_array_equal(once.logits, twice.logits)


def test_a_late_outcome_is_found_by_the_next_join() -> None:
    assert len(join([answer()], {})) == 0
    assert len(join([answer()], {1: history((6, 5.0, NOW_S - 995))}, now_s=NOW_S + 500)) == 1


def test_no_user_decides_for_all() -> None:
    items = tuple(range(10))
    many = history(*((item, 5.0, NOW_S - 1_000 + item) for item in items))
    found = join([answer(items=items), answer(2)], {1: many, 2: history((5, 1.0, NOW_S - 999))})
    assert found.counts["outcomes_over_limit"] == 7
    assert found.clicks.tolist() == [True, True, True, False]
    assert found.logits[:3, 0, 0].tolist() == [9.0, 8.0, 7.0], "the newest"


def test_what_is_not_sound_or_of_other_weights_is_left_out_and_counted() -> None:
    sound = answer()
    huge = replace(sound, exits=np.full_like(sound.exits, 51.0))
    others = [
        replace(sound, version="w"),
        replace(sound, version="v+"),
        replace(sound, depths=(0, 2)),
        replace(sound, signals=np.zeros(3, np.float32)),
        huge,
    ]
    found = join(others, {1: history((5, 5.0, NOW_S - 999))})
    assert len(found) == 0
    assert found.counts["answers_of_other_weights"] == 2
    assert found.counts["answers_damaged"] == 3
    hostile = join([sound], {1: history((5, float("nan"), NOW_S - 999), (6, float("inf"), NOW_S - 998))})
    assert hostile.counts["events_damaged"] == 2
    assert len(hostile) == 0


async def test_outcomes_are_read_from_the_store() -> None:
    explored, log = MemoryExploredLog(), MemoryUserLog()
    await explored.add(answer(as_of_s=NOW_S - 2_000))
    await explored.add(answer("u"))
    explored._answers[store_token("u")].append(b"damaged")
    events = [
        Event(event_id="a", user_id=1, item_id=6, weight=5, timestamp_s=NOW_S - 1_990, source="feed"),
        Event(event_id="b", user_id="u", item_id=7, weight=2, timestamp_s=NOW_S - 999, source="feed"),
    ]
    await log.append(events)
    found = await read_outcomes(explored, log, "v", DEPTHS, NOW_S, CONFIG)
    assert found.clicks.tolist() == [True, False]
    assert found.counts["answers_damaged"] == 1
    assert found.counts["users"] == 2
    await log.append(events)
    again = await read_outcomes(explored, log, "v", DEPTHS, NOW_S, CONFIG)
    np.testing.assert_array_equal(again.logits, found.logits)
    await log.delete(1)
    assert len(await read_outcomes(explored, log, "v", DEPTHS, NOW_S, CONFIG)) == 1
