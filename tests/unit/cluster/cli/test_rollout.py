"""``rankmesh rollout`` and ``rollback``: what they accept, and how a roll-out reads."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.cli.client import Client
from cluster.cli.group import EXIT_FAILED, EXIT_USAGE
from cluster.cli.rollout import _follow
from cluster.cli.status_view import rollout_text, status_table
from cluster.desk import RolloutRequest
from services.ingress.directory import RolloutBody, StatusBody, UpdatesBody
from tests.helpers.mesh_answers import status_body
from tests.helpers.terminal import lines


@pytest.mark.parametrize("share", ["100%", "1", "-1", "five", "5 %%", ""])
def test_a_share_that_is_none(share: str) -> None:
    result = CliRunner().invoke(app, ["rollout", "v", f"--canary={share}"])
    assert result.exit_code == EXIT_USAGE
    assert "share below 100%" in result.output


@pytest.mark.parametrize("arguments", [["rollout", "v", "--canary", "0.05"], ["rollback"]])
def test_a_mesh_that_does_not_run(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [*arguments, "--name", "no-such-mesh"])
    assert result.exit_code == EXIT_FAILED


def test_a_request_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    request = RolloutRequest(id="a1", action="rollout", version="v", share=0.05, watch_s=3)
    request.write(tmp_path)
    (path,) = tmp_path.iterdir()
    assert RolloutRequest.model_validate_json(path.read_bytes()) == request


class Told:
    """A client to whom a mesh says one thing after the other."""

    def __init__(self, *bodies: RolloutBody) -> None:
        self.bodies = list(bodies)

    def fetch(self, kind: object, path: str) -> StatusBody:
        return StatusBody.model_validate(status_body()).model_copy(update={"rollout": self.bodies.pop(0)})


def test_who_waits_for_a_roll_out_hears_that_somebody_else_has_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.cli.rollout._PERIOD_S", 0.0)
    before = RolloutBody(id="old", phase="rolled_back", version="u")
    own = RolloutBody(id="own", phase="canary", version="w", share=0.5)
    other = RolloutBody(id="two", phase="refused", version="x", reason="w is being rolled out; roll it back first")
    back = RolloutBody(id="three", phase="rolled_back", version="w", reason="asked for")
    client = Told(before, own, other, back)
    request = RolloutRequest(id="own", action="rollout", version="w", share=0.5)
    assert _follow(cast(Client, client), request, quiet=True) == back
    assert client.bodies == []


def test_how_it_reads() -> None:
    canary = RolloutBody(
        id="a1",
        phase="canary",
        version="w",
        share=0.05,
        figures={"canary_answers": 40, "canary_bad": 1, "canary_ne": 0.81, "base_ne": 0.8, "labels": 60},
    )
    assert rollout_text(canary).plain == (
        "canary  w to 5.0% of the users (40 answers, 1 of them degraded or failed; "
        "NE 0.8100, before 0.8000, on 60 labelled events)"
    )
    refused = RolloutBody(id="a1", phase="refused", version="w", reason="embedding:0: row differs")
    assert rollout_text(refused).plain == "refused  w: embedding:0: row differs"
    served = RolloutBody(id="a1", phase="served", version="w", previous="v+3")
    assert rollout_text(served).plain == "served  w, v+3 is ready for a roll-back"


def test_status_says_what_is_wrong_with_weights() -> None:
    body = StatusBody.model_validate(status_body()).model_copy(
        update={"updates": UpdatesBody(newest=9, served=7, reason="sequence: delta 8 of v is missing")}
    )
    text = " ".join("\n".join(lines(status_table(body, "http://x", 120), 120)).split())
    assert "delta 9 is not served: sequence: delta 8 of v is missing" in text
    assert "roll-out" not in text
