from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks.cases import Case
from benchmarks.chaos import traffic
from benchmarks.chaos.traffic import Seen, Sent, WarmTraffic
from benchmarks.client import Answer, MeshClient
from benchmarks.site import Site
from shared.clock import Clock, ManualClock
from shared.schema.api import RankRequest
from tests.helpers.mesh_answers import response

REQUEST = RankRequest(user_id=6040, candidates=list(range(1, 41)))


def case(name: str = "1-20-long") -> Case:
    return Case(name, "long", 3, 6040, list(range(1, 41)), 2, "home", 978_300_000, cast(Any, None))


class Traffic(WarmTraffic):
    """Judges by a rule that is known; counts how often it has to."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(cast(Site, None), cast(MeshClient, None), clock)
        self.num_judged = 0

    def __post_init__(self) -> None:
        return

    def _faults(self, sent: Sent) -> list[str]:
        self.num_judged += 1
        assert sent.answer.body is not None
        return ["another user"] if sent.answer.body.user_id != 6040 else []

    def form_faults(self, sent: Sent) -> list[str]:
        return ["no form"]

    def note(self, answer: Answer, name: str = "1-20-long") -> Seen:
        return self._note(Sent(case(name), REQUEST, answer))


@pytest.fixture
def judged() -> Traffic:
    return Traffic(ManualClock())


def whole(**changes: Any) -> Answer:
    return Answer("ok", 200, 20.0, body=response(**changes))


def test_answers_that_say_the_same_are_judged_once(judged: Traffic) -> None:
    seen = [judged.note(whole(request_id=f"r-{number}", total_ms=number)) for number in range(5)]
    assert [judged.verdict(each) for each in seen] == [()] * 5
    assert judged.num_judged == 1
    judged.verdict(judged.note(whole(), name="2-20-long"))
    assert judged.num_judged == 2, "another case wants another answer"


def test_a_wrong_answer_stays_wrong_whenever_it_comes_again(judged: Traffic) -> None:
    seen = [judged.note(whole(user_id=6041)) for _ in range(2)]
    assert [judged.verdict(each) for each in seen] == [("another user",)] * 2
    assert judged.verdict(judged.note(whole(user_id=6041))) == ("another user",)
    assert judged.num_judged == 1


def test_what_waits_for_its_judgement_is_bounded(judged: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "PENDING_MAX", 3)
    seen = [judged.note(whole(history_length=number)) for number in range(10)]
    assert judged.num_judged == 7
    assert all(judged.verdict(each) == () for each in seen)
    assert judged.num_judged == 10


def test_once_the_histories_are_lost_only_the_form_is_judged(judged: Traffic) -> None:
    before = judged.note(whole())
    judged.history_known = False
    after = judged.note(whole())
    assert judged.verdict(after) == ("no form",)
    assert after.by_form
    assert judged.verdict(before) == ()


def test_no_answer_has_no_fault(judged: Traffic) -> None:
    seen = judged.note(Answer("hung", 0, 10_000.0, detail="ReadTimeout"))
    assert (seen.outcome, seen.detail) == ("hung", "ReadTimeout")
    assert judged.verdict(seen) == ()
