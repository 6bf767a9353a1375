"""Make targets: documented, real, and the only ones that documents name."""

from __future__ import annotations

import os
import re

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
