"""The command as a whole: its verbs, its exit status, and what it does not import."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cluster.cli import app
from cluster.cli.group import VerbGroup
from shared.errors import ConfigError, StageUnavailableError

VERBS = {
    *("run", "up", "down", "status", "rank", "events", "train", "evaluate", "publish", "delta", "simplify", "tables"),
    *("rollout", "rollback", "weights", "recalibrate"),
    *("quantize", "tune", "frontier", "plan", "bench", "compare", "verify", "chaos"),
}


def test_the_verbs() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert commands | {group.name for group in app.registered_groups} == VERBS
    assert all(verb in result.output for verb in VERBS)


def test_the_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"rankmesh {version('rankmesh')}\n")


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_explains_itself(verb: str) -> None:
    result = CliRunner().invoke(app, [verb, "-h"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from cluster.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'ray', 'torch', 'numpy', 'httpx', 'fastapi', 'redis'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.splitlines()[-1] == "[]"


def verbs() -> typer.Typer:
    small = typer.Typer(cls=VerbGroup, pretty_exceptions_enable=False)

    @small.command()
    def known() -> None:
        raise StageUnavailableError("no mesh\nanswers [here]")

    @small.command()
    def config() -> None:
        raise ConfigError("tiers must be 1 to 8, are 9")

    @small.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    @small.command()
    def broken() -> None:
        raise ZeroDivisionError("a defect")

    return small


@pytest.mark.parametrize(
    ("verb", "status", "words"),
    [
        ("known", 1, "error no mesh answers [here]"),
        ("config", 1, "error tiers must be 1 to 8, are 9"),
        ("interrupted", 130, ""),
        ("unknown", 2, "No such command"),
    ],
)
def test_expected_errors_are_one_line_and_a_status(verb: str, status: int, words: str) -> None:
    result = CliRunner().invoke(verbs(), [verb])
    assert result.exit_code == status
    assert words in result.output
    assert "Traceback" not in result.output


def test_a_defect_is_not_hidden() -> None:
    assert isinstance(CliRunner().invoke(verbs(), ["broken"]).exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rank"], "Missing option"),
        (["rank", "--user", "1", "--url", "http://x", "--at", "then"], "neither seconds since the epoch nor"),
        (["rank", "--user", "1", "--url", "http://x", "--candidates", "1,,2"], "separated by commas"),
        (["status", "--url", "localhost:8461"], "'--url': must begin with http:// or https://, is 'localhost:8461'"),
        (["bench", "mesh", "--name", "b", "--port", "9"], "mesh b does not run here, not at port 9"),
        (["verify", "--name", "b", "--port", "9"], "mesh b does not run here, not at port 9"),
        (["bench", "mesh", "--url", "ftp://x"], "'--url': must begin with http:// or https://, is 'ftp://x'"),
        (["up", "--port", "22"], "'--port': must be at least 1024, is 22"),
        (["run", "--port", "65500"], "'--port': must be at most 65471, is 65500"),
        (["up", "--name", "a b/../c"], "'--name': must be 1 to 32 of a-z, 0-9, _ and -"),
        (["down", "--name", "../c"], "'--name': must be 1 to 32 of a-z, 0-9, _ and -"),
        (
            ["rank", "--user", "1", "--url", "http://x", "--at", "3000-01-01"],
            "3000-01-01 is in the future: at most a day",
        ),
        (["events", "--user", "1"], "--file"),
        (["events", "--user", "1", "--item", "2", "--file", "x"], "--file"),
        (["events", "--url", "http://127.0.0.1:9", "--file", "no/such/file"], "cannot read no/such/file"),
        (["status", "--port", "70000"], "'--port': must be at most 65535, is 70000"),
        (["rank", "--user", "1", "--num", "0"], "'--num': must be at least 1, is 0"),
    ],
)
def test_a_wrong_command_line_is_status_2(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("verb", [["status"], ["rank", "--user", "1"], ["events", "--user", "1", "--item", "2"]])
def test_no_mesh_is_one_line_that_says_how_to_start_one(verb: list[str]) -> None:
    result = CliRunner().invoke(app, [*verb, "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "rankmesh up" in result.output
    assert len(result.output.strip().splitlines()) == 1


def run_program(program: str, output: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=30, check=False)


@pytest.mark.parametrize("arguments", [["--version"], ["bench", "--json"], ["bench"]])
def test_a_disk_that_is_full_is_one_line_and_status_1(arguments: list[str]) -> None:
    program = f"from cluster.cli import app; app({arguments!r})"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, timeout=30
        )
    assert (done.returncode, done.stderr) == (1, "error cannot write the output: No space left on device\n")


def test_a_reader_that_has_gone_is_no_error() -> None:
    program = "from cluster.cli import app; app(['bench', '--json'])"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=30
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
