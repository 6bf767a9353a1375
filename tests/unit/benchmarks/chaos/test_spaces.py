from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.chaos import spaces
from benchmarks.chaos.spaces import Spaces, check_allowed, sweep
from cluster.namespaces import enter
from cluster.processes import started_ticks
from shared.errors import ConfigError


def test_every_further_node_has_a_namespace_and_an_address_of_its_own() -> None:
    three = Spaces(3)
    assert [place.address for place in three.places] == ["10.231.0.2", "10.231.0.3"]
    names = {three.name(number) for number in range(3)}
    assert len(names) == 3
    assert {place.namespace for place in three.places} < names
    assert three.store_url == "redis://10.231.0.1:6379/0"


def test_only_what_a_process_that_is_gone_has_made_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = started_ticks(os.getpid())
    mine, gone = Spaces(2).name(1), f"rmchaos-{os.getpid()}-{(ticks or 0) + 1}-0"
    for name in (mine, gone, "rmchaos-4194305-7-2", "rmchaos-notes", "vpn"):
        (tmp_path / name).touch()
    asked: list[str] = []
    monkeypatch.setattr(spaces, "FOLDER", tmp_path)
    monkeypatch.setattr(spaces, "inside", lambda name: [])
    monkeypatch.setattr(spaces, "delete", asked.append)
    assert sorted(sweep()) == sorted([gone, "rmchaos-4194305-7-2"])
    assert sorted(asked) == sorted([gone, "rmchaos-4194305-7-2"])


@pytest.mark.parametrize(
    ("programs", "user", "says"),
    [
        ({"ip", "setpriv"}, 0, "need the programs tc "),
        ({"ip", "tc", "setpriv"}, 1_000, "need root, this is user 1000"),
    ],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, programs: set[str], user: int, says: str) -> None:
    monkeypatch.setattr("shutil.which", lambda program: program if program in programs else None)
    monkeypatch.setattr("os.geteuid", lambda: user)
    with pytest.raises(ConfigError, match=says):
        check_allowed()


def test_a_namespace_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot enter the network namespace /run/netns/no-such"):
        enter(Path("/run/netns/no-such"))
