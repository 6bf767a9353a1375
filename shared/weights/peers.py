"""Chunks from other nodes: each chunk has an owner among the peers, who alone reads it from the origin.

Every node runs one ``PeerCache``. Whoever needs a chunk asks the peer that rendezvous hashing names for it; that peer
answers from its disk or reads the origin, once, however many ask at the same time. So N nodes that load one version
cost one read of it, and no peer has to know what another holds. A peer that is gone is replaced by the next of the
chunk's order, and then by the origin: slower, never wrong.

Source: rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from shared.config import Config
from shared.errors import OverloadedError, RankMeshError
from shared.handle import Handle
from shared.hashing import hash64
from shared.weights.chunks import ChunkRequest, ChunkSource


class PeerConfig(Config):
    """Limits of the peer cache.

    Args:
        calls_max: Chunks that one peer gives at once; more wait.
        waiting_max: Calls that wait; more are refused, and whoever asked goes on to the next source.
        tries_max: Peers that are asked for one chunk before the origin is.
        timeout_s: How long one peer may take for one chunk, its own read of the origin included.
    """

    calls_max: int = Field(16, ge=1, le=1024)
    waiting_max: int = Field(1024, ge=0, le=65_536)
    tries_max: int = Field(2, ge=1, le=16)
    timeout_s: float = Field(30.0, gt=0, le=3600)


class PeerCache:
    """The service of one node; a plain class, bound to the mesh in ``cluster.peer_cache``.

    Args:
        source: What this node reads from: its disk, then the origin (a ``ChainSource``, for its single flight).
        config: Limits.
    """

    def __init__(self, source: ChunkSource, config: PeerConfig) -> None:
        self._source = source
        self._config = config
        self._slots = asyncio.Semaphore(config.calls_max)
        self._num_held = 0
        self._num_given = 0
        self._bytes_given = 0
        self._num_failed = 0

    async def chunk(self, wanted: ChunkRequest) -> bytes:
        """Return a chunk.

        Raises:
            InvalidRequestError: the request is not a chunk of a version.
            OverloadedError: too many calls wait.
            WeightsError: the chunk cannot be had.
        """
        wanted = wanted.validated()
        limit = self._config.calls_max + self._config.waiting_max
        if self._num_held >= limit:
            raise OverloadedError(
                f"the peer cache holds {self._num_held} calls, limit {limit}",
                stage="peer_cache",
                limit=limit,
                value=self._num_held,
                retry_after_s=1.0,
            )
        self._num_held += 1
        try:
            async with self._slots:
                data = await self._source.fetch(wanted)
        except RankMeshError:
            self._num_failed += 1
            raise
        finally:
            self._num_held -= 1
        if data is None:
            raise wanted.error("no source of this peer has it", f"{wanted.chunk.length} bytes", "nothing")
        self._num_given += 1
        self._bytes_given += len(data)
        return data

    def status(self) -> dict[str, Any]:
        """Return counters: chunks and bytes given, calls that failed, calls held now."""
        return {
            "given": self._num_given,
            "given_bytes": self._bytes_given,
            "failed": self._num_failed,
            "held": self._num_held,
        }


class PeerSource:
    """Asks the peers of a chunk, its owner first.

    Args:
        peers: Handles of all ``PeerCache`` of the mesh, with distinct names; this node's own may be among them.
        config: Limits.
    """

    name = "peer"

    def __init__(self, peers: Sequence[Handle], config: PeerConfig) -> None:
        self._peers = tuple(peers)
        self._config = config
        self.num_failed = 0

    def order(self, sha256: str) -> list[Handle]:
        """Return the peers in the order in which they are asked for a chunk: the same in every process."""
        return sorted(self._peers, key=lambda peer: hash64(f"{peer.name} {sha256}".encode()), reverse=True)

    async def fetch(self, wanted: ChunkRequest) -> bytes | None:
        """Return a chunk that a peer gave, checked, or None when none of those asked could give it."""
        for peer in self.order(wanted.chunk.sha256)[: self._config.tries_max]:
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    data: bytes = await peer.call("chunk", wanted, payload_bytes=wanted.chunk.length)
                return await asyncio.to_thread(wanted.check, data, f"peer {peer.name}")
            except (RankMeshError, TimeoutError):
                self.num_failed += 1
        return None
