"""``rankmesh recalibrate`` on a real store: answers too young, a dry run, a delta, and nothing new after it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from cluster.cli import recalibrate
from cluster.cli.group import VerbGroup
from cluster.config import MeshConfig
from models.random_weights import TINY
from models.routing import SIGNALS
from shared.clock import SystemClock
from shared.errors import StageUnavailableError
from shared.schema.api import Event
from shared.schema.explored import ExploredAnswer
from shared.userlog import EmbeddedStore, EmbeddedStoreConfig, RedisUserLog, StoreConfig, connect
from shared.userlog.explored import RedisExploredLog
from shared.weights import WeightStore
from shared.weights.delta_log import DeltaLog
from tests.helpers.updated_mesh import publish_source
from tests.helpers.weights import random_weights

MESH = MeshConfig(name="one")
NUM_USERS, NUM_ITEMS = 20, 25


async def _fill(store: StoreConfig, weight: float = 5.0) -> None:
    """Write answers of an hour ago, each candidate of which has an event of this weight: from 4 on a click."""
    client, now_s = connect(store), int(SystemClock().now_s())
    explored = RedisExploredLog(client, "one", MESH.store.explored)
    items = np.arange(1, NUM_ITEMS + 1)
    events = []
    for user in range(1, NUM_USERS + 1):
        exits = np.random.default_rng(user).normal(size=(NUM_ITEMS, len(TINY.depths), 2)).astype(np.float32)
        signals = np.zeros(len(SIGNALS), np.float32)
        at_s = now_s - 3_600
        await explored.add(ExploredAnswer(user, "v", "ml-1m", at_s, at_s, TINY.depths, items, exits, signals))
        events += [
            Event(event_id=f"{user}-{item}", user_id=user, item_id=int(item), weight=weight, timestamp_s=at_s + 1)
            for item in items
        ]
    await RedisUserLog(client, MESH.user_log()).append(events)
    await client.aclose()


def _call(*args: str, status: int = 0) -> str:
    app = typer.Typer(cls=VerbGroup, pretty_exceptions_enable=False)
    app.registered_commands += recalibrate.app.registered_commands
    app.command()(lambda: None)
    result = CliRunner().invoke(app, ["recalibrate", "--name", "one", *args])
    assert result.exit_code == status, result.output
    return result.output


def _document(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_call("--json", *args))
    return found


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightStore:
    store = WeightStore(tmp_path / "weights")
    publish_source(store, random_weights(TINY, version="v"))
    monkeypatch.setattr(recalibrate, "_serving", lambda name: "v")
    return store


def test_outcomes_become_a_delta_once(tmp_path: Path, weights: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedStore(tmp_path / "store", EmbeddedStoreConfig(die_with_parent=True, fsync="no")) as server:
        store = StoreConfig(url=server.url)
        monkeypatch.setattr(recalibrate, "_place", lambda name, path: (MESH, store, weights))
        asyncio.run(_fill(store))
        young = _document()
        assert young["counts"]["answers_too_young"] == NUM_USERS
        assert young["delta"] is None
        assert "a dry run" in _call("--delay", "60", "--dry-run")
        assert DeltaLog(weights, "v").sequences() == []
        found = _document("--delay", "60")
        assert found["delta"] == "v+1"
        for each in found["calibration"].values():
            assert each["published"] < each["refitted"] <= 1.0, "everything was clicked"
        assert "published" in _call("--delay", "60"), "not published, as nothing is new"
        assert DeltaLog(weights, "v").sequences() == [1]


def test_where_nothing_was_clicked_it_says_so(
    tmp_path: Path, weights: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedStore(tmp_path / "store", EmbeddedStoreConfig(die_with_parent=True, fsync="no")) as server:
        store = StoreConfig(url=server.url)
        monkeypatch.setattr(recalibrate, "_place", lambda name, path: (MESH, store, weights))
        asyncio.run(_fill(store, weight=1.0))
        assert _call("--delay", "60", "--dry-run").count("no click") == 2 * len(TINY.depths)
        assert _document("--delay", "60", "--dry-run")["calibration"] == {}


@pytest.mark.parametrize("value", ["inf", "1e300", "nan", "-1"])
@pytest.mark.parametrize("option", ["--delay", "--window", "--every"])
def test_times_that_no_answer_is_kept_for_are_refused(option: str, value: str) -> None:
    assert "must be at" in _call(option, value, status=2)


def test_a_store_that_is_away_ends_the_verb_with_its_reason(
    weights: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = StoreConfig(url="redis://127.0.0.1:1/0")
    monkeypatch.setattr(recalibrate, "_place", lambda name, path: (MESH, away, weights))
    assert "list explored answers" in _call(status=1)


def test_without_a_mesh_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKMESH_VAR_DIR", str(tmp_path))
    with pytest.raises(StageUnavailableError, match="no mesh called one"):
        recalibrate._place("one", None)
