"""Benchmark ``loading``: a version over one stream and over eight, and four replicas that load the same version.

The store is a local folder behind a limit of 20 MB/s a stream (``CappedStore``), which stands for an object store: what
is measured is the loader, checksums and disk writes included, not this machine's disk.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.harness import measure, turns
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from benchmarks.weights.capped import CappedStore
from shared.clock import SystemClock
from shared.handle import Handle, LocalHandle
from shared.weights import LoadConfig, ParallelLoader, WeightStore
from shared.weights.chunks import ChainSource, ChunkSource, DiskCache, OriginSource
from shared.weights.peers import PeerCache, PeerConfig, PeerSource

STREAM_BYTES_PER_S: Final = 20e6
TOTAL_BYTES, QUICK_BYTES = 1_000_000_000, 40_000_000
CHUNK_BYTES, QUICK_CHUNK_BYTES = 8 * 2**20, 2**19
NUM_STREAMS: Final = 8
NUM_REPLICAS: Final = 4
VERSION: Final = "bench"


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Load with one stream and with eight in one run, then with four replicas that share."""
    num_bytes, chunk_bytes = (QUICK_BYTES, QUICK_CHUNK_BYTES) if options.quick else (TOTAL_BYTES, CHUNK_BYTES)
    config = LoadConfig(streams=NUM_STREAMS)
    with tempfile.TemporaryDirectory(prefix="rankmesh-loading-") as name:
        site = Site.prepare(Path(name), num_bytes, chunk_bytes, options.seed)
        taken_s: dict[str, list[float]] = {"1": [], str(NUM_STREAMS): []}
        for turn in turns(list(taken_s), 1, 0, options.seed):
            taken_s[turn.variant].append(site.load_alone(int(turn.variant)))
        origin_reads, shared_s, peer_share = site.load_together()
    params: dict[str, Param] = {
        "version_bytes": site.num_bytes,
        "chunk_bytes": chunk_bytes,
        "stream_bytes_per_s": STREAM_BYTES_PER_S,
    }
    one, many = (float(np.median(values)) for values in taken_s.values())
    return BenchmarkReport(
        (
            Measurement("speedup_8_streams", one / many, "x", params=params),
            measure("load_s_1", taken_s["1"], "p50", "s", **params),
            measure("load_s_8", taken_s[str(NUM_STREAMS)], "p50", "s", **params),
            Measurement("origin_reads_4_replicas", origin_reads, "versions", params=params),
            Measurement("load_s_4_replicas", shared_s, "s", params=params),
            Measurement("peer_bytes_share", peer_share, "of bytes", params=params),
        ),
        config.digest(),
    )


@dataclass(frozen=True, slots=True)
class Site:
    """A version in a capped store, and room for replicas.

    Args:
        folder: Where everything lies.
        store: The store, uncapped.
        num_bytes: Bytes of the version.
    """

    folder: Path
    store: WeightStore
    num_bytes: int

    @classmethod
    def prepare(cls, folder: Path, num_bytes: int, chunk_bytes: int, seed: int) -> Site:
        """Write a version: a dense group of a hundredth of it, and two tables."""
        rng = np.random.default_rng(seed)
        store = WeightStore(folder / "origin")
        shares = {"dense": 0.01, "tables/user": 0.33, "tables/item": 0.66}
        with store.writer(VERSION, chunk_bytes) as writer:
            for group, share in shares.items():
                rows = int(num_bytes * share) // 256
                writer.add_tensors(group, {"weight": rng.integers(0, 255, (rows, 256), np.uint8)})
            writer.commit()
        manifest = store.open(VERSION).manifest
        return cls(folder, store, sum(entry.bytes for entry in manifest.entries()))

    def load_alone(self, streams: int) -> float:
        """Load from the origin into an empty folder; return seconds."""
        with _scratch(self.folder) as root, ThreadPoolExecutor(streams) as pool:
            source = ChainSource([OriginSource(self._capped(), self.store.root, pool)])
            loader = ParallelLoader(source, root, pool, LoadConfig(streams=streams))
            clock = SystemClock()
            began_s = clock.monotonic_s()
            asyncio.run(self._load(loader))
            return clock.monotonic_s() - began_s

    def load_together(self) -> tuple[float, float, float]:
        """Load four replicas at once, each with its own disk, behind one peer cache each.

        Returns:
            Versions read from the origin, seconds until the last was done, share of their bytes that peers gave.
        """
        with _scratch(self.folder) as root, ThreadPoolExecutor(4 * NUM_STREAMS) as pool:
            return asyncio.run(self._together(root, pool))

    async def _together(self, root: Path, pool: ThreadPoolExecutor) -> tuple[float, float, float]:
        origin, peers, chains = self._capped(), list[Handle](), list[ChainSource]()
        for number in range(NUM_REPLICAS):
            cache = DiskCache(root / f"chunks-{number}", 2 * self.num_bytes, pool)
            source = OriginSource(origin, self.store.root, pool)
            peers.append(LocalHandle(f"node-{number}", PeerCache(ChainSource([cache, source], cache), PeerConfig())))
        for _ in range(NUM_REPLICAS):
            sources: list[ChunkSource] = [
                PeerSource(peers, PeerConfig(timeout_s=600)),
                OriginSource(origin, self.store.root, pool),
            ]
            chains.append(ChainSource(sources))
        clock = SystemClock()
        began_s = clock.monotonic_s()
        await asyncio.gather(
            *(
                self._load(ParallelLoader(chain, root / f"replica-{number}", pool, LoadConfig(streams=NUM_STREAMS)))
                for number, chain in enumerate(chains)
            )
        )
        taken_s = clock.monotonic_s() - began_s
        from_peers = sum(chain.bytes_by_source["peer"] for chain in chains)
        return origin.bytes_read / self.num_bytes, taken_s, from_peers / (NUM_REPLICAS * self.num_bytes)

    async def _load(self, loader: ParallelLoader) -> None:
        await loader.load(self.store.open(VERSION).manifest)

    def _capped(self) -> CappedStore:
        return CappedStore(self.store.fs, STREAM_BYTES_PER_S)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        yield Path(name)
