"""How the verbs end: one clear line and a status, never a traceback, for everything that is expected to go wrong."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperGroup

from shared.errors import RankMeshError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


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
            try:
                return super().main(args, prog_name, complete_var, standalone_mode, windows_expand_args, **extra)
            finally:
                sys.stdout.flush()  # here, where a full disk can still be told of
        except RankMeshError as error:
            _explain(error.message)
            sys.exit(EXIT_FAILED)
        except _validation_errors() as error:
            _explain(_broken(error))
            sys.exit(EXIT_FAILED)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            # Whoever reads our output has gone (`rankmesh status | head -1`); there is nobody left to tell.
            _drop_output()
            sys.exit(EXIT_FAILED)
        except OSError as error:
            if error.filename is None and error.errno not in _NOT_WRITTEN:
                raise
            what = "cannot write the output" if error.filename is None else f"cannot use {error.filename}"
            _drop_output()
            _explain(f"{what}: {error.strerror}")
            sys.exit(EXIT_FAILED)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; a value that an option refuses is told in plain words, with the value."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if isinstance(error.__cause__, _validation_errors()):
                error.message = _broken(error.__cause__, of_option=True)
            raise


def usage_error(message: str, option: str) -> typer.BadParameter:
    """Return the error of a wrong command line: exit status 2, the message names the option."""
    return typer.BadParameter(message, param_hint=f"'{option}'")


def _validation_errors() -> tuple[type[Any], ...]:
    # Only code that has imported pydantic can raise its error; importing it here would slow every `--help` down.
    pydantic = sys.modules.get("pydantic")
    return () if pydantic is None else (pydantic.ValidationError,)


def _broken(error: Any, *, of_option: bool = False) -> str:
    from shared.rules import VALUE_CHARS_MAX, broken, short

    first = error.errors()[0]
    if of_option:
        return broken("", [first], str(first["input"])[:VALUE_CHARS_MAX])
    return broken(".".join(str(part) for part in first["loc"]) or error.title, [first], short(first["input"]))


def _drop_output() -> None:
    """Send what is still buffered nowhere: the interpreter would try again to write it, and fail loudly."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explain(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble(("error ", "bold red"), " ".join(message.split()))
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)
