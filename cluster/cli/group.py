"""How the verbs end: one clear line and a status, never a traceback, for everything that is expected to go wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from shared.errors import RankMeshError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class VerbGroup(TyperGroup):
    """A command group that turns ``RankMeshError`` into one line on standard error and exit status 1."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a verb; errors of rankmesh end the process with their message."""
        try:
            return super().main(args, prog_name, complete_var, standalone_mode, windows_expand_args, **extra)
        except RankMeshError as error:
            _explain(error.message)
            sys.exit(EXIT_FAILED)
        except _validation_errors() as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or error.title
            _explain(f"{where}: {first['msg']} (value {first['input']!r})")
            sys.exit(EXIT_FAILED)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            # Whoever reads our output has gone (`rankmesh status | head -1`); there is nobody left to tell.
            sys.stderr.close()
            sys.exit(EXIT_FAILED)


def usage_error(message: str, option: str) -> typer.BadParameter:
    """Return the error of a wrong command line: exit status 2, the message names the option."""
    return typer.BadParameter(message, param_hint=f"'{option}'")


def _validation_errors() -> tuple[type[Any], ...]:
    # Only code that has imported pydantic can raise its error; importing it here would slow every `--help` down.
    pydantic = sys.modules.get("pydantic")
    return () if pydantic is None else (pydantic.ValidationError,)


def _explain(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble(("error ", "bold red"), " ".join(message.split()))
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)
