"""``rankmesh events``: append one event, or a file of them, to the users' logs; ``events delete`` forgets a user."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from cluster.cli.group import usage_error
from cluster.cli.options import (
    DEFAULT_NAME,
    AtOption,
    JsonOption,
    NameOption,
    PortOption,
    UrlOption,
    in_words,
    parse_id,
    parse_time,
)

if TYPE_CHECKING:
    from cluster.cli.client import Client
    from shared.schema.api import Event, EventsRequest, EventsResponse

app = typer.Typer(invoke_without_command=True)

BATCH = 500
"""Events of one append; under every sensible limit of a deployment."""

LINE_BYTES_MAX = 65_536


@app.callback()
def events(
    context: typer.Context,
    user: Annotated[str | None, typer.Option("--user", help="User id of one event.", show_default=False)] = None,
    item: Annotated[str | None, typer.Option("--item", help="Item id of one event.", show_default=False)] = None,
    weight: Annotated[
        float, typer.Option("--weight", "--rating", min=0, max=1e6, help="What it is worth, here the rating.")
    ] = 5.0,
    at: AtOption = None,
    source: Annotated[
        str | None,
        typer.Option("--source", help="Where it happened; default: the deployment's first source.", show_default=False),
    ] = None,
    event_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            help="Event id; default: made of user, item, weight and time. Repeating one is harmless.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", help="JSON lines, one event each; - is standard input.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
    name: NameOption = DEFAULT_NAME,
    port: PortOption = None,
    url: UrlOption = None,
) -> None:
    """Append one event (--user, --item) or a file of events (--file) to the users' logs.

    A line of the file: {"event_id": "e1", "user_id": 6040, "item_id": 260, "weight": 5, "timestamp_s": 978300000}
    """
    if context.invoked_subcommand is not None:
        mesh = {"--name": name != DEFAULT_NAME, "--port": port, "--url": url, "--json": as_json}
        event = {"--user": user, "--item": item, "--at": at, "--source": source, "--id": event_id, "--file": file}
        _refuse_before(context.invoked_subcommand, {**event, **mesh})
        return
    from rich.console import Console

    from cluster.cli.client import Client
    from cluster.cli.locate import mesh_url
    from shared.schema.api import EventsRequest

    if file is None and (user is None) != (item is None):
        raise usage_error(
            "one event needs --user and --item, a file of them --file", "--item" if item is None else "--user"
        )
    if (file is None) == (user is None or item is None):
        raise usage_error("give either --user and --item, or --file", "--file")
    if file is None:
        found: Iterator[Event] = iter([one_event(str(user), str(item), weight, parse_time(at), event_id, source)])
    else:
        found = _read(file)
    counts = {"appended": 0, "duplicates": 0, "expired": 0, "buffered": 0}
    with Client(mesh_url(name, port, url)) as client:
        for batch in _batches(found, BATCH):
            answer = _append(client, EventsRequest(events=batch), at)
            for field in counts:
                counts[field] += getattr(answer, field)
    if as_json:
        import json

        sys.stdout.write(json.dumps(counts) + "\n")
        return
    Console(highlight=False).print(_counts_in_words(counts))


def _counts_in_words(counts: Mapping[str, int]) -> str:
    words = [f"{counts['appended']:,} appended", f"{counts['duplicates']:,} there already"]
    if counts["expired"]:
        words.append(f"{counts['expired']:,} older than all that a full log holds")
    if counts["buffered"]:
        words.append(f"{counts['buffered']:,} kept in memory until the store is back")
    return ", ".join(words)


def _refuse_before(verb: str, options: Mapping[str, object]) -> None:
    """Refuse options before a verb: dropped silently, a name would leave the verb to another mesh."""
    if given := [option for option, value in options.items() if value]:
        raise usage_error(f"they go after {verb}", ", ".join(given))


def _append(client: Client, batch: EventsRequest, at: str | None) -> EventsResponse:
    """Append; a time that the mesh refuses is told as it was given."""
    from shared.errors import InvalidRequestError

    try:
        return client.append(batch)
    except InvalidRequestError as error:
        limit = error.context.get("limit")
        if at is None or not str(error.context.get("field")).endswith("timestamp_s") or not isinstance(limit, int):
            raise
        raise usage_error(f"{at} is too far ahead: this mesh takes events up to {in_words(limit)}", "--at") from error


@app.command()
def delete(
    user: Annotated[str, typer.Option("--user", help="User id.", show_default=False)],
    as_json: JsonOption = False,
    name: NameOption = DEFAULT_NAME,
    port: PortOption = None,
    url: UrlOption = None,
) -> None:
    """Delete a user's events and profile from the log."""
    from rich.console import Console

    from cluster.cli.client import Client
    from cluster.cli.locate import mesh_url

    with Client(mesh_url(name, port, url)) as client:
        answer = client.forget(parse_id(user))
    if as_json:
        sys.stdout.write(answer.model_dump_json() + "\n")
        return
    found = "events and profile are deleted" if answer.deleted else "there was nothing to delete"
    Console(highlight=False).print(f"user {user}: {found}")


def one_event(
    user: str, item: str, weight: float, timestamp_s: int | None, event_id: str | None, source: str | None = None
) -> Event:
    """Make one event; without an id, the same event always gets the same.

    Args:
        user: User id.
        item: Item id.
        weight: What it is worth.
        timestamp_s: Seconds since the epoch; None: now.
        event_id: Its id; None: derived from the rest.
        source: Where it happened; None: the deployment's first source.

    Raises:
        typer.BadParameter: a value breaks a limit of the API.
    """
    from pydantic import ValidationError

    from shared.clock import SystemClock
    from shared.hashing import hash64, store_token
    from shared.rules import broken, short
    from shared.schema.api import Event

    user_id, item_id = parse_id(user), parse_id(item)
    when = int(SystemClock().now_s()) if timestamp_s is None else timestamp_s
    if event_id is None:
        content = f"{store_token(user_id)}:{store_token(item_id)}:{weight!r}:{when}" + (f":{source}" if source else "")
        event_id = f"cli-{hash64(content.encode()):016x}"
    try:
        return Event(
            event_id=event_id, user_id=user_id, item_id=item_id, weight=weight, timestamp_s=when, source=source
        )
    except ValidationError as error:
        first = error.errors()[0]
        options = {"event_id": "--id", "user_id": "--user", "item_id": "--item", "timestamp_s": "--at"}
        option = {**options, "source": "--source"}.get(str(first["loc"][0]), "--weight")
        raise usage_error(broken("", [first], short(first["input"])), option) from error


def _read(file: str) -> Iterator[Event]:
    if file == "-":
        yield from parse_lines(sys.stdin, "standard input")
        return
    try:
        with Path(file).open(encoding="utf-8") as stream:
            yield from parse_lines(stream, file)
    except OSError as error:
        raise usage_error(f"cannot read {file}: {error.strerror}", "--file") from error


def parse_lines(stream: TextIO, name: str) -> Iterator[Event]:
    """Yield the events of JSON lines; empty lines are skipped.

    Raises:
        InvalidRequestError: a line is no event; names file, line and field. Earlier lines have been yielded.
    """
    from pydantic import ValidationError

    from shared.errors import InvalidRequestError
    from shared.rules import broken, short
    from shared.schema.api import Event

    number = 0
    while line := stream.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise InvalidRequestError(
                f"{name}, line {number}: longer than {LINE_BYTES_MAX} characters",
                field="line",
                limit=LINE_BYTES_MAX,
                value=number,
            )
        if not line.strip():
            continue
        try:
            yield Event.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidRequestError(
                f"{name}, line {number}: {broken(where, [first], short(first['input']))}",
                field=where or "line",
                value=number,
            ) from error


def _batches(found: Iterator[Event], size: int) -> Iterator[list[Event]]:
    batch: list[Event] = []
    for event in found:
        batch.append(event)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
