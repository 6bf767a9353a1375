"""A Ray cluster of two nodes on one machine, whose replicas load one version by way of the peer caches.

``python -m tests.helpers.two_nodes URL VERSION FOLDER``; a process of its own, since Ray's settings are read at import.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import PeerCacheConfig
from cluster.peer_cache import live_nodes, open_on_node, start_peers
from shared.handle import Handle
from shared.weights import WeightStore

MESH = "peers"
REPLICAS_A_NODE = 2
CONFIG = PeerCacheConfig()
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


class Replica:
    """Loads a version as a station does; each on a disk of its own."""

    def load(self, url: str, version: str, folder: Path) -> int:
        """Return the bytes of the version, every file checked."""
        reader = open_on_node(WeightStore(url), version, MESH, folder, CONFIG)
        reader.verify()
        return sum(entry.bytes for entry in reader.manifest.entries())


async def _given(peers: Sequence[Handle]) -> list[int]:
    return [(await peer.call("status"))["given"] for peer in peers]


def main(url: str, version: str, folder: Path) -> dict[str, Any]:
    """Load a version into four replicas of two nodes; returns what they and the peers say."""
    # Ray's trial cluster notes its address here, and relies on another Ray having made the folder.
    default_folder: Callable[[], str] = get_default_ray_temp_dir  # Ray does not annotate it
    Path(default_folder()).mkdir(exist_ok=True)
    # Sockets below it must have short names.
    with tempfile.TemporaryDirectory(prefix="rm") as temporary:
        head = {**NODE, "include_dashboard": False, "temp_dir": temporary}
        cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(**NODE)
        ray.init(address=cluster.address, namespace=MESH, log_to_driver=False)
        try:
            nodes = live_nodes()
            peers = start_peers(MESH, nodes, url, folder, CONFIG)
            actor: Any = ray.remote(Replica)
            where = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
            replicas = [
                actor.options(num_cpus=0, scheduling_strategy=each).remote() for each in where * REPLICAS_A_NODE
            ]
            loads = [each.load.remote(url, version, folder / str(index)) for index, each in enumerate(replicas)]
            num_bytes = ray.get(loads, timeout=100)
            given = asyncio.run(_given(peers))
            return {"nodes": len(nodes), "bytes": num_bytes, "given": given}
        finally:
            shut_down: Callable[[], None] = ray.shutdown  # Ray does not annotate it
            shut_down()
            cluster.shutdown()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
