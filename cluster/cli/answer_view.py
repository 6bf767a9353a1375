"""Draws one answer for a terminal: who asked, what came back, how long each station took."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cluster.cli.bars import milliseconds, share_bar, span_bar
from cluster.cli.catalogue import Catalogue, Sample
from shared.hashing import EntityId, canonical_id
from shared.schema.api import RankedCandidate, RankResponse

WIDE = 100
"""From this many columns on, genres are shown."""

_BAR_CELLS = ((130, 10), (WIDE, 6), (0, 4))
"""Columns of the terminal from which on a score's bar has so many cells: titles come first."""

NUM_ROWS = 15
_PLACE, _VALUE, _WORD, _GENRES = 4, 5, 5, 22
_LEVEL_STYLES = {"exact": "bold cyan", "user": "", "none": "bright_black"}
_TIER_WORDS = {
    "default": "the best one, nothing speaks against it",
    "exploration": "to learn from, as a small share of all requests",
    "forced by the request": "as asked for",
}
_WORTH = re.compile(r"worth: (\S+) over \S+ .*; (\S+) takes ")
"""How the router words a choice by worth; the best tier, and the chosen one."""

_PASS_STYLES = {"full": "", "first": "bright_black"}


def show(
    console: Console,
    response: RankResponse,
    catalogue: Catalogue,
    sample: Sample | None,
    next_ratings: Mapping[int, float],
    num_rows: int = NUM_ROWS,
) -> None:
    """Print a whole answer: the user, the titles, the true next items, the verdict, the waterfall.

    Args:
        console: Where to.
        response: The answer.
        catalogue: Names of the items.
        sample: The held-out request that was answered, if it was one.
        next_ratings: True next items among the candidates.
        num_rows: Titles to show.
    """
    if sample is not None:
        console.print(who(sample, catalogue))
        console.print()
    console.print(ranked_titles(response, catalogue, next_ratings, console.width, num_rows))
    if next_ratings:
        console.print(findings(response, next_ratings, num_rows))
    console.print()
    console.print(verdict(response))
    console.print()
    console.print(waterfall(response, console.width))


def who(sample: Sample, catalogue: Catalogue, num_events: int = 6) -> RenderableType:
    """Draw the user and their latest history, newest first."""
    about = [
        f"user {sample.user_id}",
        *(sample.profile[key] for key in ("gender", "age", "occupation") if sample.profile.get(key)),
    ]
    head = Text.assemble((" · ".join(about), "bold"), ("   asks at " + _day(sample.timestamp_s), ""))
    if not sample.history:
        return Group(head, Text("has no history yet: the learned cold start answers", style="bright_black"))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for column, width in (("date", 10), ("rating", 5), ("title", None)):
        table.add_column(column, no_wrap=True, overflow="ellipsis", min_width=width)
    for event in sample.history[:num_events]:
        table.add_row(
            Text(_day(event.timestamp_s), style="bright_black"),
            stars(event.weight),
            catalogue.item(event.item_id).title,
        )
    shown = min(num_events, len(sample.history))
    return Group(
        head,
        Text(f"latest {shown} of {sample.num_earlier:,} earlier ratings:", style="bright_black"),
        Padding(table, (0, 0, 0, 2)),
    )


def stars(weight: float) -> Text:
    """Return a rating as five stars, the rest of them hollow."""
    full = min(round(weight), 5)
    return Text.assemble(("★" * full, "yellow"), ("☆" * (5 - full), "bright_black"))


def ranked_titles(
    response: RankResponse,
    catalogue: Catalogue,
    next_ratings: Mapping[int, float],
    width: int,
    num_rows: int = NUM_ROWS,
) -> RenderableType:
    """Draw the head of the list, and below it the true next items that came later.

    Args:
        response: The answer.
        catalogue: Names of the items.
        next_ratings: True next items with the rating the user then gave; empty when unknown.
        width: Columns of the terminal.
        num_rows: Rows of the head.
    """
    wide = width >= WIDE
    names = _objectives(response)
    cells = next(cells for columns, cells in _BAR_CELLS if width >= columns)
    fixed = _PLACE + len(names) * (cells + 6) + _VALUE + 2 * _WORD + (_GENRES if wide else 0)
    num_gaps = 4 + len(names) + wide
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bright_black")
    table.add_column("#", justify="right", style="bright_black", width=_PLACE)
    title_width = min(max(width - fixed - 2 * num_gaps, 16), 48)
    table.add_column("title", no_wrap=True, overflow="ellipsis", min_width=title_width, max_width=title_width)
    if wide:
        table.add_column("genres", no_wrap=True, overflow="ellipsis", width=_GENRES, style="bright_black")
    for name in names:
        heading = f"P({name})"
        table.add_column(heading if len(heading) <= cells + 6 else f"P({name[:4]}.)", no_wrap=True, width=cells + 6)
    table.add_column("value", justify="right", width=_VALUE)
    table.add_column("pass", width=_WORD)
    table.add_column("spec.", width=_WORD)
    rows = list(enumerate(response.candidates, start=1))
    later = [
        (place, candidate) for place, candidate in rows[num_rows:] if _rating(candidate.id, next_ratings) is not None
    ]
    for place, candidate in rows[:num_rows]:
        _add_row(table, place, candidate, catalogue, next_ratings, names, cells, wide)
    if later:
        table.add_row("⋮")
    for place, candidate in later:
        _add_row(table, place, candidate, catalogue, next_ratings, names, cells, wide)
    return table


def _add_row(
    table: Table,
    place: int,
    candidate: RankedCandidate,
    catalogue: Catalogue,
    next_ratings: Mapping[int, float],
    names: list[str],
    cells: int,
    wide: bool,
) -> None:
    item = catalogue.item(candidate.id)
    rating = _rating(candidate.id, next_ratings)
    title = Text(_titled(item.title, item.year), style="" if rating is None else "bold yellow")
    scores = []
    for name in names:
        score = candidate.scores.get(name, 0.0)
        scores.append(Text.assemble(share_bar(score, cells, "cyan"), f" {100 * score:4.1f}%"))
    if rating is not None:
        title = Text.assemble(("★ " if rating == 0 else f"★{rating:.0f} ", "bold yellow"), title)
    table.add_row(
        str(place),
        title,
        *([", ".join(item.genres)] if wide else []),
        *scores,
        f"{candidate.value:.3f}",
        Text(candidate.scored_by, style=_PASS_STYLES[candidate.scored_by]),
        Text(candidate.speculative, style=_LEVEL_STYLES[candidate.speculative]),
    )


def _titled(title: str, year: int) -> str:
    return title if year == 0 or title.endswith(f"({year})") else f"{title} ({year})"


def _objectives(response: RankResponse) -> list[str]:
    return list(response.candidates[0].scores) if response.candidates else []


def _rating(item_id: EntityId, next_ratings: Mapping[int, float]) -> float | None:
    known = canonical_id(item_id)
    return next_ratings.get(known) if isinstance(known, int) else None


def findings(response: RankResponse, next_ratings: Mapping[int, float], num_rows: int = NUM_ROWS) -> Text:
    """Say in words where the true next items came out, against what chance would give."""
    places = [
        place
        for place, candidate in enumerate(response.candidates, start=1)
        if _rating(candidate.id, next_ratings) is not None
    ]
    if not next_ratings:
        return Text("")
    head = sum(place <= num_rows for place in places)
    by_chance = len(next_ratings) * min(num_rows, response.num_candidates) / max(response.num_candidates, 1)
    return Text.assemble(
        ("★ ", "bold yellow"),
        f"rated next, with the stars then given: {head} of {len(next_ratings)} in the first {num_rows} "
        f"(chance: {by_chance:.1f}); places {', '.join(map(str, places)) or 'beyond the list'}",
    )


def verdict(response: RankResponse) -> RenderableType:
    """Draw tier, version, speculative hits and degradations."""
    levels = Counter(candidate.speculative for candidate in response.candidates)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bright_black", no_wrap=True)
    table.add_column()
    table.add_row("tier", f"{response.tier}: {tier_words(response.tier, response.tier_reason)}")
    table.add_row("weights", response.weights_version)
    table.add_row("history", f"{response.history_length} events read")
    table.add_row("speculative", f"{levels['exact']} exact, {levels['user']} user, {levels['none']} none")
    if response.degraded:
        for station in response.degraded:
            table.add_row(
                Text("degraded", style="bold yellow"), f"{station}: {response.reasons.get(station, 'no reason given')}"
            )
    else:
        table.add_row("degraded", "nothing: the answer is whole")
    unknown = {feature: count for feature, count in response.num_oov.items() if count}
    if unknown:
        table.add_row("unknown ids", ", ".join(f"{count} of {feature}" for feature, count in unknown.items()))
    return table


def tier_words(tier: str, reason: str) -> str:
    """Say why a tier answered; the figures behind it are in ``tier_reason`` of the JSON answer.

    Args:
        tier: The tier that answered.
        reason: ``tier_reason``, why the router chose the one that it chose.
    """
    if (worth := _WORTH.match(reason)) is None:
        return _TIER_WORDS.get(reason, reason)
    best, chosen = worth.groups()
    if tier != chosen:
        return f"in place of {chosen}, which the router had chosen"
    if chosen == best:
        return "what it adds for this user is worth its time now"
    return f"what {best} would add for this user is not worth its time now"


def waterfall(response: RankResponse, width: int) -> RenderableType:
    """Draw the stages on one time axis, the critical path emphasised, the total below."""
    cells = max(min(width, 120) - 36, 20)
    end_ms = (
        max([response.total_ms, *(stage.start_ms + stage.duration_ms for stage in response.stages)], default=0.0) or 1.0
    )
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("critical", width=1)
    table.add_column("stage", no_wrap=True, max_width=18, overflow="ellipsis")
    table.add_column("bar", no_wrap=True, width=cells)
    table.add_column("time", justify="right", no_wrap=True)
    for stage in response.stages:
        style = "bold" if stage.critical else "bright_black"
        table.add_row(
            "•" if stage.critical else "",
            Text(stage.name, style=style),
            span_bar(stage, end_ms, cells),
            Text(milliseconds(stage.duration_ms), style=style),
        )
    table.add_row("", Text("total", style="bold"), "", Text(milliseconds(response.total_ms), style="bold"))
    note = Text("━ computing  ─ waiting and transport; • on the critical path", style="bright_black")
    return Group(table, note)


def _day(timestamp_s: int) -> str:
    return datetime.fromtimestamp(timestamp_s, UTC).strftime("%Y-%m-%d")
