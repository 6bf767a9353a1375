"""``rankmesh rank``: rank candidates of one user through HTTP and draw the answer."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.group import usage_error
from cluster.cli.options import (
    DEFAULT_NAME,
    AtOption,
    JsonOption,
    NameOption,
    PortOption,
    UrlOption,
    UserOption,
    in_words,
    parse_id,
    parse_ids,
    parse_time,
)

if TYPE_CHECKING:
    from cluster.cli.catalogue import Catalogue, Sample
    from shared.hashing import EntityId
    from shared.schema.api import RankRequest

app = typer.Typer()

_CANDIDATES_CEILING = 10_000
_AHEAD_S_MAX = 86_400
"""How far events may lie ahead of a mesh's clock; nothing is known of what is later."""

_OPTIONS = {"user_id": "--user", "timestamp_s": "--at", "limit": "--num"}


@app.command()
def rank(
    user: UserOption,
    candidates: Annotated[
        str | None,
        typer.Option(help="Comma-separated item ids; default: drawn from the catalogue.", show_default=False),
    ] = None,
    num: Annotated[
        int,
        typer.Option(
            "--num",
            min=1,
            max=_CANDIDATES_CEILING,
            help="Number of candidates to draw; the mesh has a limit, 2000 by default.",
        ),
    ] = 500,
    at: AtOption = None,
    tier: Annotated[str, typer.Option(help="auto, or a ranking tier.")] = "auto",
    deadline_ms: Annotated[
        int | None, typer.Option(min=1, help="Time budget, milliseconds.", show_default=False)
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 15,
    as_json: JsonOption = False,
    name: NameOption = DEFAULT_NAME,
    port: PortOption = None,
    url: UrlOption = None,
) -> None:
    """Rank candidates for one user and show titles, scores and stage times.

    Without --candidates: the published sample request of that user at its time, else items drawn from the catalogue.
    Without --at: now, so that what was just appended counts.
    """
    from rich.console import Console

    from cluster.cli.answer_view import show
    from cluster.cli.catalogue import Catalogue
    from cluster.cli.client import Client
    from cluster.cli.locate import mesh_url
    from shared.clock import SystemClock

    user_id = parse_id(user)
    chosen = None if candidates is None else parse_ids(candidates, "--candidates")
    when = parse_time(at)
    latest_s = int(SystemClock().now_s()) + _AHEAD_S_MAX
    if when is not None and when > latest_s:
        raise usage_error(f"{at} is in the future: at most a day ahead, {in_words(latest_s)}", "--at")
    with Client(mesh_url(name, port, url)) as client:
        catalogue = Catalogue.from_documents(client.samples())
        query = Query.of(catalogue, user_id, chosen, num, when, tier, deadline_ms)
        response = client.rank(query.request)
    if as_json:
        sys.stdout.write(response.model_dump_json() + "\n")
        return
    console = Console(highlight=False)
    show(console, response, catalogue, query.sample, query.next_ratings, rows)


@dataclass(frozen=True, slots=True)
class Query:
    """A request and what is known of its right answer.

    Args:
        request: The request.
        sample: The sample request that it is made of, if it is.
        next_ratings: True next items among the candidates, with the rating that the user then gave.
    """

    request: RankRequest
    sample: Sample | None
    next_ratings: dict[int, float]

    @classmethod
    def of(
        cls,
        catalogue: Catalogue,
        user_id: EntityId,
        candidates: list[EntityId] | None,
        num: int,
        timestamp_s: int | None,
        tier: str,
        deadline_ms: int | None,
    ) -> Query:
        """Make the request that a command line means.

        Args:
            catalogue: What the mesh publishes.
            user_id: Who asks.
            candidates: What to rank; None: those of the user's sample request, filled up from the catalogue.
            num: How many, when ``candidates`` is None.
            timestamp_s: When; None: the time of the sample, else now.
            tier: Tier, or auto.
            deadline_ms: Budget; None: that of the deployment.

        Raises:
            typer.BadParameter: a value breaks a limit of the API, or there is nothing to draw from.
        """
        from pydantic import ValidationError

        from shared.rules import broken, short
        from shared.schema.api import RankRequest

        sample = catalogue.sample_of(user_id) if candidates is None else None
        if candidates is None:
            candidates = [*catalogue.draw(user_id, num, sample.candidates if sample else ())]
        if not candidates:
            raise usage_error("this mesh publishes no catalogue to draw from; name the candidates", "--candidates")
        fields = {
            "surface": sample.surface if sample else catalogue.surface,
            "timestamp_s": timestamp_s or (sample.timestamp_s if sample else None),
            "deadline_ms": deadline_ms,
        }
        known = {field: value for field, value in fields.items() if value is not None}
        try:
            request = RankRequest.model_validate(
                {"user_id": user_id, "candidates": candidates, "limit": len(candidates), "tier": tier, **known}
            )
        except ValidationError as error:
            first = error.errors()[0]
            field = str(first["loc"][0])
            option = _OPTIONS.get(field, "--" + field.replace("_", "-"))
            raise usage_error(broken("", [first], short(first["input"])), option) from error
        among = set(candidates)
        ratings = {} if sample is None else {item: stars for item, stars in sample.ratings().items() if item in among}
        return cls(request, sample, ratings)
