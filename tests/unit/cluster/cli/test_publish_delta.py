"""``publish`` and ``delta`` on real stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from cluster.cli import delta, publish
from cluster.cli.group import VerbGroup
from shared.weights import WeightStore


def write(folder: Path, version: str, value: float) -> None:
    with WeightStore(folder).writer(version) as writer:
        weight = np.arange(20, dtype=np.float32).reshape(5, 4)
        weight[2] = value
        writer.add_tensors("tables/item", {"weight": weight})
        writer.add_json("golden", {"of": version})
        writer.commit()


def verbs() -> typer.Typer:
    app = typer.Typer(cls=VerbGroup, pretty_exceptions_enable=False)
    app.registered_commands += publish.app.registered_commands + delta.app.registered_commands
    return app


def call(*args: str, status: int = 0) -> str:
    result = CliRunner().invoke(verbs(), args)
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.output


def documents(*args: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in call(*args, "--json").splitlines()]


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Path, Path]:
    """A store with the versions ``a`` and ``b``, and an empty one."""
    write(tmp_path / "there", "a", 1.0)
    write(tmp_path / "there", "b", 2.0)
    return tmp_path / "there", tmp_path / "here"


def test_publish_brings_a_version_over(stores: tuple[Path, Path]) -> None:
    there, here = map(str, stores)
    [told] = documents("publish", there, "--version", "a", "--store", here)
    assert told["version"] == "a"
    assert told["bytes"] == told["bytes_read"] > 0
    assert WeightStore(here).versions() == ["a"]
    [told] = documents("publish", there, "--version", "a", "--store", here)
    assert told["bytes_read"] == 0
    assert "published weights b" in call("publish", there, "--store", here)
    assert WeightStore(here).latest() == "b"


def test_publish_says_what_is_wrong_in_one_line(stores: tuple[Path, Path]) -> None:
    there, here = map(str, stores)
    path = stores[0] / "a" / "tables" / "item.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    found = call("publish", there, "--version", "a", "--store", here, status=1)
    assert "item.safetensors has" in found
    assert len(found.splitlines()) == 1
    assert WeightStore(here).versions() == []
    assert "does not exist" in call("publish", there, "--version", "c", "--store", here, status=1)
    assert "no complete version" in call("publish", str(stores[0].parent / "nowhere"), "--store", here, status=1)


def test_delta_makes_lists_and_takes_back(stores: tuple[Path, Path]) -> None:
    there = str(stores[0])
    assert "none so far" in call("delta", "a", "--store", there)
    [made] = documents("delta", "a", "--to", "b", "--store", there)
    assert made["stamp"] == "a+1"
    assert made["rows"] == {"tables/item/weight": 1}
    assert made["documents"] == ["golden"]
    [inverse] = documents("delta", "a", "--back-to", "0", "--store", there)
    assert (inverse["stamp"], inverse["previous"]) == ("a+2", made["crc"])
    listed = documents("delta", "a", "--store", there)
    assert listed == [made, inverse]
    shown = call("delta", "a", "--store", there)
    assert "a+1" in shown
    assert "a+2" in shown


def test_delta_refuses_what_cannot_be(stores: tuple[Path, Path]) -> None:
    there = str(stores[0])
    assert "does not exist" in call("delta", "c", "--store", there, status=1)
    assert call("delta", "a", "--store", there) == "deltas of a: none so far\n"
    assert "no earlier state 0" in call("delta", "a", "--back-to", "0", "--store", there, status=1)
    assert "not both" in call("delta", "a", "--to", "b", "--back-to", "0", "--store", there, status=2)
