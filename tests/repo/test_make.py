"""Make targets: documented, real, and the only ones that documents name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.helpers.repository import ROOT, files, text

TARGET = re.compile(r"^([a-z][a-z-]*):(?!=)(.*)$", re.MULTILINE)
# In a code span or a code block of a document: `make run ONCE=1`, or a line that begins with "make run".
NAMED = re.compile(r"(?:`|^\s+(?:\$ )?|^(?:\$ )?)make((?: [a-z][a-z-]*)+)", re.MULTILINE)
PROMISED = {
    *("setup", "lock", "run", "up", "down", "bench", "clean"),
    *("fmt", "lint", "types", "imports", "unit", "kernels", "integration", "chaos", "chaos-lab", "test", "ci"),
}


def targets() -> set[str]:
    return {match[1] for match in TARGET.finditer(text("Makefile"))}


def test_promised_targets_exist() -> None:
    assert targets() >= PROMISED


def test_every_target_is_documented_and_phony() -> None:
    makefile = text("Makefile")
    for match in TARGET.finditer(makefile):
        assert "## " in match[2], f"make {match[1]} has no ## text, so `make` does not show it"
        assert f".PHONY: {match[1]}\n" in makefile


def test_documents_name_real_targets() -> None:
    unknown = [
        f"{name}: make {target}"
        for name in files()
        if name.endswith(".md")
        for match in NAMED.finditer(text(name))
        for target in match[1].split()
        if target not in targets()
    ]
    assert not unknown


def test_hooks_call_real_targets() -> None:
    config = yaml.safe_load(text(".pre-commit-config.yaml"))
    entries = [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]
    assert entries
    for entry in entries:
        command, target = entry.split()[:2]
        assert command == "make"
        assert target in targets()


def test_scripts_can_be_run() -> None:
    for name in [".ci/run", *(name for name in files() if name.startswith("scripts/"))]:
        assert text(name).startswith("#!/usr/bin/env bash\n")
        assert os.access(ROOT / name, os.X_OK), f"{name} is not executable"


@pytest.mark.parametrize("origin", ["command line", "environment"])
def test_a_python_that_is_asked_for_is_looked_at_also_when_there_is_a_venv(origin: str) -> None:
    """What ``make setup`` would run, with every stamp there."""
    stamps = [".venv/.run-cpu", ".venv/.dev-cpu", ".venv/.package", "var/native/.built"]
    old = [argument for stamp in stamps for argument in ("-o", stamp)]
    asked = "PYTHON=/no/such/python"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS")}
    command = ["make", "-n", *old, "setup"]
    plain = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "setup.sh check" not in plain.stdout
    if origin == "environment":
        environment["PYTHON"] = "/no/such/python"
    else:
        command.append(asked)
    told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "setup.sh check" in told.stdout


@pytest.mark.parametrize("target", ["run", "up", "down"])
@pytest.mark.parametrize("name", ["my mesh", "a'b", '"; exit 3; "'])
def test_a_name_reaches_the_command_as_one_word_whatever_it_is(target: str, name: str) -> None:
    stamps = [".venv/.run-cpu", ".venv/.dev-cpu", ".venv/.package", "var/native/.built"]
    old = [argument for stamp in stamps for argument in ("-o", stamp)]
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHON", "MAKEFLAGS", "PORT")}
    command = ["make", "-s", *old, target, f"NAME={name}", r"RANKMESH=printf '<%s>'"]
    told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.endswith(f"<{target}><--name><{name}>")


def test_another_python_than_that_of_the_venv_is_refused(tmp_path: Path) -> None:
    """The script in a folder of its own, with pythons that say what they are asked."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    for name, base in (("asked", "/pythons/asked"), (".venv/bin/python", "/pythons/built")):
        python = tmp_path / name
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f'#!/bin/sh\ncase "$2" in *version*) echo 3.11;; *) echo {base};; esac\n')
        python.chmod(0o755)

    def check(python: Path | str) -> tuple[int, str]:
        environment = {**os.environ, "PYTHON": str(python)}
        command = [str(tmp_path / "scripts" / "setup.sh"), "check"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    status, words = check(tmp_path / "asked")
    assert status == 1
    assert "PYTHON is /pythons/asked, .venv is of /pythons/built" in words
    status, words = check("/no/such/python")
    assert status == 1
    assert "'/no/such/python' not found" in words
    assert check(tmp_path / ".venv" / "bin" / "python") == (0, "")
