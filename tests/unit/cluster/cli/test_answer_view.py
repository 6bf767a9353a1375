"""The answer as a person reads it, at the widths of real terminals."""

from __future__ import annotations

import pytest

from cluster.cli.answer_view import findings, ranked_titles, tier_words, verdict, waterfall, who
from cluster.cli.catalogue import Catalogue, Sample
from tests.helpers.mesh_answers import VERSION, answer, catalogue, response
from tests.helpers.terminal import lines

WORTH = "worth: full over light +1.23e-05 for an unknown user, at a price of 1.0e-06; {} takes 8.1 ms, full 12.0"
NEXT = {4: 5.0, 33: 2.0}


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    sample = catalogue().samples[0]
    drawings = [
        who(sample, catalogue()),
        ranked_titles(response(), catalogue(), NEXT, width),
        verdict(response()),
        waterfall(response(), width),
    ]
    for drawing in drawings:
        assert max(len(line) for line in lines(drawing, width)) <= width


def test_head_in_order_then_the_true_next_items_below() -> None:
    text = lines(ranked_titles(response(), catalogue(), NEXT, 80, num_rows=5), 80)
    places = [line.split()[0] for line in text[2:]]
    assert places == ["1", "2", "3", "4", "5", "⋮", "33"]
    assert "★5 Dr. Strange" in text[5]
    assert "★2 Film 33 (1933)" in text[8]
    assert "★" not in text[2]


def test_scores_pass_and_level_are_readable_at_80_columns() -> None:
    text = lines(ranked_titles(response(), catalogue(), NEXT, 80, num_rows=12), 80)
    assert text[0].split() == ["#", "title", "P(click)", "P(conv.)", "value", "pass", "spec."]
    first, last = text[2], text[13]
    assert ("97.6%" in first, "48.8%" in first, "1.463" in first, first.rstrip().endswith("full   exact")) == (
        True,
    ) * 4
    assert last.rstrip().endswith("first  none")


def test_genres_need_a_wide_terminal() -> None:
    narrow, wide = (lines(ranked_titles(response(), catalogue(), {}, width), width) for width in (80, 120))
    assert not any("Drama" in line for line in narrow)
    assert any("Drama, Comedy" in line for line in wide)
    assert "P(conv.)" in wide[0]


def test_a_year_in_the_title_is_not_repeated() -> None:
    text = "\n".join(lines(ranked_titles(response(), catalogue(), {}, 200), 200))
    assert "(1963) (1963)" not in text
    assert "Film 1 (1901)" in text


def test_items_without_a_name_and_answers_without_candidates() -> None:
    text = lines(ranked_titles(response(), Catalogue(), {}, 80, num_rows=2), 80)
    assert "item 1" in text[2]
    assert len(lines(ranked_titles(response(candidates=[]), Catalogue(), {}, 80), 80)) == 2


def test_findings_compare_with_chance() -> None:
    text = findings(response(), NEXT, num_rows=20).plain
    assert "1 of 2 in the first 20 (chance: 1.0); places 4, 33" in text
    assert findings(response(), {}).plain == ""


def test_verdict_names_tier_version_hits_and_what_was_replaced() -> None:
    text = "\n".join(lines(verdict(response()), 80))
    for expected in (
        "full: the best one, nothing speaks",
        VERSION,
        "50 events",
        "3 exact, 3 user, 34 none",
        "the answer is whole",
    ):
        assert expected in text
    worse = response(
        degraded=["embedding:1"], reasons={"embedding:1": "no live replica"}, num_oov={"item_id": 3, "year": 0}
    )
    text = "\n".join(lines(verdict(worse), 80))
    assert "embedding:1: no live replica" in text
    assert "3 of item_id" in text
    assert "year" not in text
    assert "whole" not in text


@pytest.mark.parametrize(
    ("tier", "reason", "words"),
    [
        ("full", "exploration", "to learn from"),
        ("light", "forced by the request", "as asked for"),
        ("light", "budget: 9 ms left, full needs 20 ms at the 99th percentile", "budget: 9 ms left, full needs 20 ms"),
        ("full", WORTH.format("full"), "what it adds for this user is worth its time now"),
        ("light", WORTH.format("light"), "what full would add for this user is not worth its time now"),
        ("light", WORTH.format("full"), "in place of full, which the router had chosen"),
    ],
)
def test_why_a_tier_answered_is_plain_words(tier: str, reason: str, words: str) -> None:
    assert tier_words(tier, reason).startswith(words)


def test_waterfall_puts_bars_where_the_time_went() -> None:
    text = lines(waterfall(response(), 76), 76)
    bars = {line.removeprefix("•").split()[0]: line for line in text}
    axis = 2 + 12 + 1  # mark of the critical path, longest stage name, padding
    assert bars["preprocess"][axis:].index("━") == 0
    ranking = bars["ranking:full"][axis:]
    assert ranking.index("━") == int(4.4 / 20 * 40)
    assert (ranking.count("━"), ranking.count("─")) == (25, 7)  # 12.0 of 15.6 ms computing, 32 cells
    marked = [name for name, line in bars.items() if line.startswith("•")]
    assert marked == ["admission", "preprocess", "ranking:full"]
    assert bars["total"].split() == ["total", "20.0", "ms"]


def test_waterfall_without_stages_still_shows_the_total() -> None:
    assert "0.00 ms" in lines(waterfall(response(stages=[], total_ms=0.0), 80), 80)[0]


def test_who_shows_profile_and_latest_ratings() -> None:
    text = lines(who(catalogue().samples[0], catalogue()), 80)
    assert text[0] == "user 6040 · F · 25 · artist   asks at 2000-12-31"
    assert text[1] == "latest 2 of 1,234 earlier ratings:"
    assert text[2].split() == ["2000-12-30", "★★★★☆", "Film", "50"]
    newcomer = Sample(user_id=1, timestamp_s=0, candidates=(1,))
    assert "cold start" in lines(who(newcomer, catalogue()), 80)[1]


def test_the_fixture_is_what_the_api_sends() -> None:
    assert response().model_dump(exclude_none=True)["candidates"] == answer()["candidates"]
