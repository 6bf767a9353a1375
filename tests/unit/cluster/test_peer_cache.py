"""Peer caches behind actor handles, with Ray's side played by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from cluster.config import PeerCacheConfig
from cluster.peer_cache import ActorHandle, PeerActor, find_peers, load_on_node, peer_name, start_peers
from shared.errors import OverloadedError, StageUnavailableError
from shared.handle import Handle
from shared.weights import LoadConfig, WeightStore
from tests.helpers.faulty_store import FaultyStore

CONFIG = PeerCacheConfig(load=LoadConfig(backoff_s=0))


class FakeActor:
    """An actor's handle: each method has ``remote``, whose result can be awaited."""

    def __init__(self, target: object) -> None:
        self._target = target

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(getattr(self._target, method)(*args)))


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    store = WeightStore(tmp_path / "origin")
    with store.writer("v", chunk_bytes=1000) as writer:
        writer.add_tensors("tables/item", {"weight": np.random.default_rng(0).random((2000, 4), np.float32)})
        writer.commit()
    return store


async def test_nodes_load_through_one_another(
    store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = FaultyStore(store.fs)
    monkeypatch.setattr(WeightStore, "fs", property(lambda self: counted))
    peers: list[Handle] = [
        ActorHandle(name, FakeActor(PeerActor(store.root, tmp_path / f"{name}-chunks", CONFIG))) for name in "abc"
    ]
    loads = (load_on_node(store, "v", tmp_path / name, peers, CONFIG) for name in "abc")
    for reader in await asyncio.gather(*loads):
        reader.verify()
    chunk_reads = [count for (name, _), count in counted.reads.items() if name == "item.safetensors"]
    assert len(chunk_reads) > 30
    assert set(chunk_reads) == {1}
    assert sum([(await peer.call("status"))["given"] for peer in peers]) == 3 * len(chunk_reads)


async def test_what_ray_raises_becomes_ours() -> None:
    class Dying:
        async def chunk(self) -> bytes:
            raise ActorDiedError

        async def busy(self) -> bytes:
            raise OverloadedError("full")

    handle = ActorHandle("node", FakeActor(Dying()))
    with pytest.raises(StageUnavailableError, match="node: its replica died"):
        await handle.call("chunk")
    assert isinstance(await handle.call("busy").failure(), OverloadedError)
    await handle.call("busy").ready()


async def test_a_caller_that_gives_up_stops_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        async def chunk(self) -> bytes:
            await asyncio.Event().wait()
            return b""

    cancelled: list[object] = []
    monkeypatch.setattr("ray.cancel", cancelled.append)
    handle = ActorHandle("node", FakeActor(Slow()))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await handle.call("chunk")
    assert len(cancelled) == 1


def test_one_actor_a_node_found_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, gone, second = (digit * 56 for digit in "abc")  # Ray's ids are 28 bytes in hex
    started: dict[str, dict[str, Any]] = {}

    def options(**given: Any) -> Any:
        started[given["name"]] = given
        return SimpleNamespace(remote=lambda *args: args)

    def get_actor(name: str, namespace: str) -> object:
        if name not in started:
            raise ValueError(name)
        return object()

    monkeypatch.setattr("ray.remote", lambda _: SimpleNamespace(options=options))
    monkeypatch.setattr("ray.get_actor", get_actor)
    handles = start_peers("mesh", [first, second], "file:///weights", tmp_path, CONFIG)
    assert [handle.name for handle in handles] == [peer_name("mesh", first), peer_name("mesh", second)]
    assert all(given["get_if_exists"] and given["num_cpus"] == 0 for given in started.values())
    assert [given["scheduling_strategy"].node_id for given in started.values()] == [first, second]
    found = find_peers("mesh", [first, gone, second])
    assert [handle.name for handle in found] == [handle.name for handle in handles]
