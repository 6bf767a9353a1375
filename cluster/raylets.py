"""More Ray nodes on this machine, beside the one that ``ray.init`` starts: for trials of what the death of one does.

The owner of the mesh holds them as children, like the first, and puts a new one in the place of one that has died. They
share the first one's address, or have a network namespace and an address each, so that one can be cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray._private.node import Node as RayNode
from ray._private.parameter import RayParams

from cluster.config import RayConfig
from cluster.enclave import Enclave, EnclaveRequest
from shared.log import JsonLogger


def start_node(config: RayConfig, number: int) -> Any:
    """Start one more node; the first must run, and this process be connected to it.

    Args:
        config: What it has.
        number: Which of the further nodes, from 0.
    """
    gcs_address = ray.get_runtime_context().gcs_address
    if config.places:
        return Enclave(EnclaveRequest(config=config, place=config.places[number], gcs_address=gcs_address))
    return start_beside(config, gcs_address)


def start_beside(config: RayConfig, gcs_address: str, address: str | None = None) -> Any:
    """Start one more node in the network namespace of this process.

    Args:
        config: What it has.
        gcs_address: Of the first node.
        address: Its own; None: that of this process's Ray.
    """
    arguments: dict[str, Any] = {  # as Ray's own cluster of several nodes for tests has them
        "gcs_address": gcs_address,
        "num_cpus": config.num_cpus,
        "object_store_memory": config.object_store_bytes,
        "include_log_monitor": False,  # one a machine is enough
        "node_manager_port": 0,
        "min_worker_port": 0,
        "max_worker_port": 0,
        "dashboard_agent_listen_port": None,
    }
    if address is not None:
        arguments["node_ip_address"] = address
    return RayNode(RayParams(**arguments), head=False, shutdown_at_exit=False, spawn_reaper=False)


class Raylets:
    """The nodes of a mesh after the first.

    Args:
        config: How many, and what each has.
        start: Starts one, by its number.
    """

    def __init__(self, config: RayConfig, start: Callable[[RayConfig, int], Any] = start_node) -> None:
        self._config = config
        self._start = start
        self._nodes: list[Any] = []  # None: it died, and its successor has not started yet

    def start(self) -> None:
        """Start them."""
        self._nodes = [self._start(self._config, number) for number in range(self._config.num_nodes - 1)]

    def replace_dead(self, logger: JsonLogger) -> None:
        """Put a new node in the place of each whose raylet has died; what is left of the old one is killed.

        One that does not start is tried again by the next call: the mesh goes on with the nodes that it has.
        """
        for number, node in enumerate(self._nodes):
            if node is not None and any(kind == "raylet" for kind, _ in node.dead_processes()):
                logger.error("node_ended", node=number + 1)
                self._nodes[number] = None
                node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
            if self._nodes[number] is None:
                self._nodes[number] = self._successor(number, logger)

    def _successor(self, number: int, logger: JsonLogger) -> Any:
        with ThreadPoolExecutor(1, thread_name_prefix="node") as thread:
            started = thread.submit(self._start, self._config, number)
        if failure := started.exception():  # Ray raises bare exceptions here
            logger.error("node_start_failed", node=number + 1, error=failure)
            return None
        return started.result()

    def stop(self) -> None:
        """End them."""
        for node in filter(None, self._nodes):
            node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
        self._nodes = []
