"""Peer caches on Ray: one named actor a node, and handles to all of them.

Actors and not a Serve deployment: a chunk has one owner among the nodes, so calls must reach a certain node, and Serve
sends each call to whichever replica is free. Names are made of the mesh and the node, so every replica finds the same
peers without asking anybody.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from fsspec.implementations.local import LocalFileSystem
from ray import ObjectRef
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import PeerCacheConfig
from cluster.failures import as_rankmesh_error
from shared.clock import Clock
from shared.errors import RankMeshError
from shared.handle import Handle
from shared.weights import ParallelLoader, WeightReader, WeightStore
from shared.weights.chunks import ChainSource, ChunkRequest, DiskCache, OriginSource
from shared.weights.loader import OnProgress
from shared.weights.peers import PeerCache, PeerSource


class PeerActor:
    """The peer cache of one node, as an actor.

    Args:
        weights_url: The origin store.
        folder: Where this node keeps chunks.
        config: Limits.
    """

    def __init__(self, weights_url: str, folder: Path, config: PeerCacheConfig) -> None:
        store = WeightStore(weights_url)
        pool = ThreadPoolExecutor(config.load.streams, thread_name_prefix="peer")
        cache = DiskCache(folder, config.cache_bytes_max, pool)
        source = ChainSource([cache, OriginSource(store.fs, store.root, pool)], cache)
        self._service = PeerCache(source, config.peers)

    async def chunk(self, wanted: ChunkRequest) -> bytes:
        """See ``PeerCache.chunk``."""
        return await self._service.chunk(wanted)

    async def status(self) -> dict[str, Any]:
        """See ``PeerCache.status``."""
        return self._service.status()


def peer_name(mesh: str, node_id: str) -> str:
    """Return the name of a node's peer cache."""
    return f"{mesh}-peer-{node_id}"


def start_peers(
    mesh: str, node_ids: Sequence[str], weights_url: str, folder: Path, config: PeerCacheConfig
) -> list[Handle]:
    """Start the peer caches of a mesh where they do not run yet; they live as long as their mesh's Ray does.

    Args:
        mesh: Name of the mesh, also its Ray namespace.
        node_ids: Ray's ids of the nodes.
        weights_url: The origin store.
        folder: Where each node keeps chunks, on its own disk.
        config: Limits.
    """
    actor_class: Any = ray.remote(PeerActor)
    handles: list[Handle] = []
    for node_id in node_ids:
        name = peer_name(mesh, node_id)
        options = actor_class.options(
            name=name,
            namespace=mesh,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=config.peers.calls_max + config.peers.waiting_max,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        # By node, too: nodes of one machine share a disk, and each must answer for its own chunks.
        handles.append(ActorHandle(name, options.remote(weights_url, folder / "chunks" / node_id[:12], config)))
    return handles


def find_peers(mesh: str, node_ids: Sequence[str]) -> list[Handle]:
    """Return the handles of the peer caches that run; a node without one is left out."""
    handles: list[Handle] = []
    for node_id in node_ids:
        name = peer_name(mesh, node_id)
        try:
            handles.append(ActorHandle(name, ray.get_actor(name, namespace=mesh)))
        except ValueError:  # what Ray raises for a name that it does not know
            continue
    return handles


async def load_on_node(
    store: WeightStore,
    version: str,
    folder: Path,
    peers: Sequence[Handle],
    config: PeerCacheConfig,
    progress: OnProgress | None = None,
    clock: Clock | None = None,
) -> WeightReader:
    """Bring a version to this node's disk: from the peers, from the origin where they cannot help.

    Args:
        store: The origin.
        version: The version.
        folder: This node's versions; its replicas map the same files.
        peers: Peer caches of all nodes.
        config: Limits.
        progress: Is told after each chunk and each file.
        clock: For waits between repeats.

    Raises:
        WeightsError: there is no such version, or a part of it cannot be had.
    """
    with ThreadPoolExecutor(config.load.streams, thread_name_prefix="weights") as pool:
        source = ChainSource([PeerSource(peers, config.peers), OriginSource(store.fs, store.root, pool)])
        loader = ParallelLoader(source, folder, pool, config.load, clock)
        return await loader.load(store.open(version).manifest, progress)


def live_nodes() -> list[str]:
    """Return Ray's ids of the nodes of this cluster that are alive."""
    nodes: Callable[[], list[dict[str, Any]]] = ray.nodes  # Ray does not annotate it
    return [node["NodeID"] for node in nodes() if node["Alive"]]


def open_on_node(store: WeightStore, version: str, mesh: str, folder: Path, config: PeerCacheConfig) -> WeightReader:
    """Open a version for a replica: where it is when that is this machine, else after bringing it to this node's disk.

    Blocks; replicas of one node that ask for the same version wait for the first one's load and map the same files.

    Args:
        store: The origin.
        version: The version.
        mesh: Name of the mesh.
        folder: This node's versions.
        config: Limits.

    Raises:
        WeightsError: there is no such version, or a part of it cannot be had.
    """
    if isinstance(store.fs, LocalFileSystem):
        return store.open(version)
    loading = load_on_node(store, version, folder, find_peers(mesh, live_nodes()), config)
    # A constructor of a replica runs on its event loop, so the load gets a thread and a loop of its own.
    with ThreadPoolExecutor(1, thread_name_prefix="load") as thread:
        return thread.submit(asyncio.run, loading).result()


class ActorHandle:
    """``shared.handle.Handle`` over an actor.

    Args:
        name: Name of the peer.
        actor: Its Ray handle.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self._name = name
        self._actor = actor

    @property
    def name(self) -> str:
        """Name of the peer."""
        return self._name

    def call(self, method: str, *args: object, payload_bytes: int | None = None, needed: bool = False) -> ActorCall:
        """Start a method of the actor; results come by reference, large ones through shared memory."""
        return ActorCall(self._name, getattr(self._actor, method).remote(*args))


class ActorCall:
    """A pending result of an actor."""

    def __init__(self, station: str, reference: ObjectRef[Any]) -> None:
        self._station = station
        self._reference = reference

    def __await__(self) -> Generator[Any, Any, Any]:
        """Fetch the value into this process.

        Raises:
            RankMeshError: the callee's, or why there was no answer.
        """
        return self._value().__await__()

    async def ready(self) -> None:
        """Wait until the call has ended, well or not."""
        await self.failure()

    async def failure(self) -> RankMeshError | None:
        """Return why the ended call failed, or None; fetches the value."""
        try:
            await self._value()
        except RankMeshError as error:
            return error
        return None

    def cancel(self) -> None:
        """Stop the work of the callee; harmless when the call has ended."""
        ray.cancel(self._reference)

    @property
    def patience_s(self) -> float:
        """Infinite: an actor has no replicas, and is not watched."""
        return math.inf

    async def _value(self) -> Any:
        try:
            return await self._reference
        except asyncio.CancelledError:
            self.cancel()
            raise
        except Exception as error:  # whatever Ray raised has a place in the error tree
            raise as_rankmesh_error(error, self._station) from error
