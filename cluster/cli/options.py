"""Options that several verbs share, and what they stand for."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from cluster.bounds import NAME_PATTERN, NAME_RULE, PORT_MAX, PORT_MIN
from cluster.cli.group import usage_error

if TYPE_CHECKING:
    from shared.hashing import EntityId

DEFAULT_NAME = "rankmesh"


def _check_name(value: str | None) -> str | None:
    if value is not None and re.fullmatch(NAME_PATTERN, value) is None:
        raise typer.BadParameter(f"{NAME_RULE}, is {value!r}")
    return value


def _check_url(value: str | None) -> str | None:
    if value is not None and not value.startswith(("http://", "https://")):
        raise typer.BadParameter(f"must begin with http:// or https://, is {value!r}")
    return value


NameOption: TypeAlias = Annotated[
    str, typer.Option("--name", help="Name of the mesh; several run side by side.", callback=_check_name)
]
FreeNameOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--name",
        help="Name of the mesh; default from the configuration.",
        show_default=False,
        callback=_check_name,
    ),
]
TrainConfigOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--train",
        help="Training configuration (YAML); default configs/train/quick.yaml.",
        show_default=False,
        dir_okay=False,
        exists=True,
    ),
]
StoreOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--store", help="Weight store, a folder or URL; default var/weights.", show_default=False),
]
WeightsOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--weights",
        help="Weights version to serve; default: the newest trained with --train's configuration.",
        show_default=False,
    ),
]
PortOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--port", min=1, max=65_535, help="HTTP port of a mesh on this machine, in place of --name.", show_default=False
    ),
]
NewPortOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=PORT_MIN,
        max=PORT_MAX,
        help="HTTP port, the first of 64; default from the configuration.",
        show_default=False,
    ),
]
ConfigOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="Deployment file (YAML); default configs/serve/local.yaml.",
        show_default=False,
        dir_okay=False,
        exists=True,
    ),
]
UrlOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Base URL of a mesh elsewhere; default: the running mesh called --name.",
        show_default=False,
        callback=_check_url,
    ),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="JSON on standard output instead of a table.")]
UserOption: TypeAlias = Annotated[str, typer.Option("--user", help="User id.")]
AtOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--at", help="Time: seconds since the epoch or ISO 8601 (UTC unless it says otherwise).", show_default=False
    ),
]


def own_command() -> str:
    """Return how this command is called from here: by name where the shell finds it, else by its path."""
    own = Path(sys.executable).parent / "rankmesh"
    found = shutil.which("rankmesh")
    if found is not None and os.path.realpath(found) == os.path.realpath(own):
        return "rankmesh"
    here = Path.cwd()
    return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) else own))


def parse_time(text: str | None, option: str = "--at") -> int | None:
    """Return seconds since the epoch.

    Args:
        text: Seconds or ISO 8601; None stays None.
        option: Named when it is neither.

    Raises:
        typer.BadParameter: the text is no time.
    """
    if text is None:
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise usage_error(f"{text!r} is neither seconds since the epoch nor an ISO 8601 time", option) from error
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def in_words(timestamp_s: int) -> str:
    """Return a time as people write it, UTC."""
    try:
        return datetime.fromtimestamp(timestamp_s, UTC).isoformat(sep=" ").removesuffix("+00:00")
    except (ValueError, OverflowError, OSError):  # far beyond the calendar
        return str(timestamp_s)


def parse_id(text: str) -> EntityId:
    """Return an id as the mesh knows it: decimal digits are an integer, everything else a string."""
    from shared.hashing import canonical_id

    return canonical_id(text)


def parse_ids(text: str, option: str) -> list[EntityId]:
    """Return the ids of a comma-separated list.

    Raises:
        typer.BadParameter: the list is empty or has an empty place.
    """
    from shared.hashing import canonical_id

    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise usage_error(f"{text!r} must be ids separated by commas, none empty", option)
    return [canonical_id(part) for part in parts]
