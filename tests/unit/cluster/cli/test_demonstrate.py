"""What the demonstration says about the answers it got."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from cluster.cli.catalogue import Catalogue
from cluster.cli.client import Client
from cluster.cli.demonstrate import Summary, demonstrate, direct, next_places
from cluster.cli.options import own_command
from cluster.cli.steps import Steps
from cluster.config import HttpConfig
from shared.schema.api import RankRequest
from tests.helpers.certificate import write_certificate
from tests.helpers.mesh_answers import answer, catalogue, response


class StillClock:
    """A clock that stands still and counts the waits."""

    def __init__(self) -> None:
        self.waits = 0

    def monotonic_s(self) -> float:
        return 0.0

    def block_s(self, duration_s: float) -> None:
        self.waits += 1


def client(respond: Callable[[httpx.Request], httpx.Response]) -> Client:
    return Client("http://mesh.test", transport=httpx.MockTransport(respond))


def shown(steps: Steps) -> str:
    file = steps.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def new_steps(clock: StillClock | None = None) -> Steps:
    return Steps(Console(file=io.StringIO(), width=80), clock or StillClock())


def test_summary_counts_the_head_chance_and_what_is_beaten() -> None:
    sample = catalogue().samples[0]
    summary = Summary.of([sample, sample], [response(), response(total_ms=40.0, degraded=["sequence"])])
    assert (summary.num_requests, summary.num_next, summary.num_in_head) == (2, 4, 2)
    assert summary.by_chance == pytest.approx(4 * 20 / 40)
    assert summary.beaten == pytest.approx(1 - ((4 - 1) + (33 - 1)) / 2 / 39)
    assert (summary.total_ms, summary.num_degraded) == (30.0, 1)
    assert summary.in_words() == "2 held-out users, 30.0 ms each (median), 1 degraded"


def test_a_true_next_item_beyond_the_list_counts_as_last() -> None:
    short = response(candidates=answer()["candidates"][:5])
    assert next_places(catalogue().samples[0], short) == [4, 40]


def test_the_first_user_is_asked_again_until_there_are_new_exact_hits() -> None:
    requests: list[RankRequest] = []

    def respond(request: httpx.Request) -> httpx.Response:
        requests.append(RankRequest.model_validate_json(request.content))
        body = answer()
        if len(requests) == 4:
            for candidate in body["candidates"]:
                candidate["speculative"] = "exact"
        return httpx.Response(200, json=body)

    clock = StillClock()
    steps = new_steps(clock)
    with client(respond) as mesh:
        assert demonstrate(mesh, catalogue(), steps) == 6040
    assert len(requests) == 4
    assert len({request.model_dump_json() for request in requests}) == 1
    assert clock.waits == 2
    assert "exact hits: 3 the first time, 40 now" in shown(steps)
    assert "Film 1 (1901)" in shown(steps)


def test_it_does_not_wait_for_ever() -> None:
    clock = StillClock()
    steps = new_steps(clock)
    with client(lambda _: httpx.Response(200, json=answer())) as mesh:
        demonstrate(mesh, catalogue(), steps)
    assert clock.waits == 20
    assert "exact hits: 3 the first time, 3 now" in shown(steps)


def test_weights_without_samples_show_nothing_and_say_so() -> None:
    steps = new_steps()
    with client(lambda _: httpx.Response(500)) as mesh:
        assert demonstrate(mesh, Catalogue(), steps) is None
    assert "no sample requests" in shown(steps)


@pytest.mark.parametrize(("name", "detached", "end"), [("rankmesh", False, None), ("b", True, "down --name b")])
def test_directions_can_be_copied_whole(name: str, detached: bool, end: str | None) -> None:
    steps = new_steps()
    direct(steps.console, "http://127.0.0.1:8341", 6040, name, 12.3, detached=detached)
    text = shown(steps)
    assert f"end    {f'{own_command()} {end}' if end else 'Ctrl-C'}" in text.splitlines()
    command = next(line for line in text.splitlines() if "curl" in line)
    body = shlex.split(command)[-1]
    assert RankRequest.model_validate(json.loads(body)).user_id == 6040


def test_directions_to_a_mesh_that_asks_for_a_token_carry_one_and_to_one_with_tls_are_its_verbs(tmp_path: Path) -> None:
    steps = new_steps()
    direct(steps.console, "http://127.0.0.1:8341", 1, "a", 1.0, http=HttpConfig(tokens_file=tmp_path / "tokens.yaml"))
    command = next(line for line in shown(steps).splitlines() if "curl" in line)
    assert "authorization: Bearer $RANKMESH_TOKEN" in shlex.split(command)
    assert json.loads(shlex.split(command)[-1])["user_id"] == 1
    steps = new_steps()
    direct(steps.console, "https://127.0.0.1:8341", 1, "a", 1.0, http=HttpConfig(tls=write_certificate(tmp_path)))
    assert "curl" not in shown(steps)


def test_the_command_is_one_that_this_shell_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(sys.executable).parent
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(own.parents[1])
    assert own_command() == f"{own.parent.name}/bin/rankmesh"
    monkeypatch.chdir("/")
    assert (Path("/") / own_command()).parent == own
    monkeypatch.setenv("PATH", str(own))
    assert own_command() == "rankmesh"
