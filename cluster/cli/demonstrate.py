"""Ranks held-out real requests and shows what came of it, in numbers and one answer in full."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import mean, median

from rich.console import Console, Group, RenderableType
from rich.text import Text

from cluster.cli.answer_view import show
from cluster.cli.bars import milliseconds
from cluster.cli.catalogue import Catalogue, Sample
from cluster.cli.client import Client
from cluster.cli.options import DEFAULT_NAME, own_command
from cluster.cli.rank import Query
from cluster.cli.steps import Steps
from cluster.config import HttpConfig
from shared.hashing import canonical_id
from shared.schema.api import RankResponse

NUM_HEAD = 20
"""Places that count as the head in the summary."""

NUM_ROWS = 12
_WAITS_MAX = 20
_WAIT_S = 0.25


@dataclass(frozen=True, slots=True)
class Summary:
    """How the true next items of several requests came out.

    Args:
        num_requests: Requests.
        num_next: True next items of all of them.
        num_in_head: Those among the first ``NUM_HEAD``.
        by_chance: Those that a random order would put there, on average.
        beaten: Mean share of the other candidates that a true next item is above.
        total_ms: Median of the meshes' own times.
        num_degraded: Answers that are marked.
    """

    num_requests: int
    num_next: int
    num_in_head: int
    by_chance: float
    beaten: float
    total_ms: float
    num_degraded: int

    @classmethod
    def of(cls, samples: list[Sample], answers: list[RankResponse]) -> Summary:
        """Summarise answers to sample requests; both lists at least one long, in the same order."""
        places = [next_places(sample, answer) for sample, answer in zip(samples, answers, strict=True)]
        shares = [
            1 - (place - 1) / max(len(sample.candidates) - 1, 1)
            for sample, found in zip(samples, places, strict=True)
            for place in found
        ]
        return cls(
            num_requests=len(samples),
            num_next=sum(map(len, places)),
            num_in_head=sum(place <= NUM_HEAD for found in places for place in found),
            by_chance=sum(
                len(found) * min(NUM_HEAD / len(sample.candidates), 1.0)
                for sample, found in zip(samples, places, strict=True)
            ),
            beaten=mean(shares) if shares else 0.0,
            total_ms=median(answer.total_ms for answer in answers),
            num_degraded=sum(bool(answer.degraded) for answer in answers),
        )

    def in_words(self) -> str:
        """Return one line."""
        words = f"{self.num_requests} held-out users, {milliseconds(self.total_ms)} each (median)"
        return words + (f", {self.num_degraded} degraded" if self.num_degraded else "")


def next_places(sample: Sample, answer: RankResponse) -> list[int]:
    """Return the places, from 1, of the true next items; those beyond the list count as last."""
    place = {canonical_id(candidate.id): rank for rank, candidate in enumerate(answer.candidates, start=1)}
    return [place.get(item, answer.num_candidates) for item in sample.true_next]


def demonstrate(client: Client, catalogue: Catalogue, steps: Steps) -> int | None:
    """Rank every sample request, then the first one again, and show that answer.

    Args:
        client: Speaks to the mesh.
        catalogue: What its weights publish.
        steps: Told of it.

    Returns:
        The user whose answer is shown, None when the weights bring no sample request.

    Raises:
        RankMeshError: the mesh does not answer.
    """
    samples = list(catalogue.samples)
    if not samples:
        steps.note("these weights bring no sample requests; nothing to show")
        return None
    with steps.step("requests", "ranking held-out real requests") as step:
        answers = [client.rank(_query(catalogue, sample).request) for sample in samples]
        summary = Summary.of(samples, answers)
        step.done(summary.in_words())
    with steps.step("again", "the first user again") as step:
        first, again = answers[0], _again(client, catalogue, samples[0], answers[0], steps)
        before, after = (Counter(candidate.speculative for candidate in answer.candidates) for answer in (first, again))
        step.done(f"speculative exact hits: {before['exact']} the first time, {after['exact']} now")
    query = _query(catalogue, samples[0])
    console = steps.console
    console.print()
    console.rule(f"{len(query.request.candidates)} candidates for one user of {catalogue.dataset}")
    show(console, again, catalogue, query.sample, query.next_ratings, NUM_ROWS)
    console.print()
    console.print(over_all(summary, catalogue), soft_wrap=False)
    return samples[0].user_id


def over_all(summary: Summary, catalogue: Catalogue) -> RenderableType:
    """Say in words how all sample requests came out, and on what data."""
    return Group(
        Text(
            f"Over all {summary.num_requests} users an item that was really chosen next ranks above "
            f"{summary.beaten:.0%} of the others; {summary.num_in_head} of {summary.num_next} are in the first "
            f"{NUM_HEAD} (chance: {summary.by_chance:.1f})."
        ),
        Text(catalogue.provenance, style="bright_black"),
    )


def direct(
    console: Console,
    url: str,
    user_id: int | None,
    name: str,
    elapsed_s: float,
    *,
    detached: bool = False,
    http: HttpConfig | None = None,
) -> None:
    """Print where the mesh serves, how to ask it and how to end it; each line can be copied whole."""
    of_name = "" if name == DEFAULT_NAME else f" --name {name}"
    called = own_command()
    user = 1 if user_id is None else user_id
    body = f'{{"user_id": {user}, "candidates": [1, 2, 260, 1196]}}'
    token = "" if http is None or http.tokens_file is None else ' -H "authorization: Bearer $RANKMESH_TOKEN"'
    curl = f"curl -s {url}/v1/rank -H 'content-type: application/json'{token} -d '{body}'"
    lines = {
        "page": f"{url}/",
        "ask": f"{called} rank --user {user}{of_name}",
        # Whether curl trusts a certificate, and under this machine's own address, is not for us to say.
        **({"or": curl} if http is None or http.tls is None else {}),
        "watch": f"{called} status{of_name}",
        "end": f"{called} down{of_name}" if detached else "Ctrl-C",
    }
    console.print()
    console.print(Text.assemble(("Serving", "bold green"), f" after {elapsed_s:.0f} s"))
    for word, line in lines.items():
        style = "bold cyan" if word == "page" else ""
        # Never wrapped by us: a terminal joins what it wraps itself when it is copied.
        console.print(Text.assemble((f"{word:<7}", "bright_black"), (line, style)), soft_wrap=True)


def _query(catalogue: Catalogue, sample: Sample) -> Query:
    return Query.of(catalogue, sample.user_id, None, len(sample.candidates), None, "auto", None)


def _again(client: Client, catalogue: Catalogue, sample: Sample, first: RankResponse, steps: Steps) -> RankResponse:
    """Ask again until what the foundation workers computed after the first answer is found, a few seconds at most."""
    known = sum(candidate.speculative == "exact" for candidate in first.candidates)
    answer = first
    for _ in range(_WAITS_MAX):
        answer = client.rank(_query(catalogue, sample).request)
        if sum(candidate.speculative == "exact" for candidate in answer.candidates) > known:
            break
        steps.pause(_WAIT_S)
    return answer
