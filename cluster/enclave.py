"""One more Ray node, in a network namespace of its own: ``python -m cluster.enclave REQUEST``, started by the owner.

A process of its own, because a thread that visits a namespace leaves threads of Ray's libraries behind in it, and the
owner's own calls would then be cut off together with the node. It ends when its input closes or its raylet dies.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from cluster.config import NodePlace, RayConfig
from cluster.namespaces import FOLDER, enter
from shared.errors import StageUnavailableError

_READY = b"ready\n"
_WATCH_PERIOD_S = 0.25
_ROOT = Path(__file__).parents[1]


class EnclaveRequest(BaseModel):
    """What to start.

    Args:
        config: What the node has.
        place: Where it runs.
        gcs_address: Of the mesh's first node.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: RayConfig
    place: NodePlace
    gcs_address: str


class Enclave:
    """The node as its mesh holds it; speaks as Ray's own node object does.

    Args:
        request: What to start.

    Raises:
        StageUnavailableError: it did not start.
    """

    def __init__(self, request: EnclaveRequest) -> None:
        self._stop_s = request.config.stop_timeout_s
        self._child = subprocess.Popen(
            [sys.executable, "-m", "cluster.enclave", request.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=_ROOT,
        )
        assert self._child.stdout is not None
        readable, _, _ = select.select([self._child.stdout], [], [], request.config.start_timeout_s)
        if not readable or self._child.stdout.readline() != _READY:
            self.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
            raise StageUnavailableError(f"no Ray node started in {request.place.namespace}", stage="ray")

    def dead_processes(self) -> list[tuple[str, object]]:
        """Return the raylet if it has died: the process beside it ends with it."""
        return [] if self._child.poll() is None else [("raylet", self._child)]

    def kill_all_processes(self, *, check_alive: bool, allow_graceful: bool, wait: bool) -> None:
        """End the node.

        Args:
            check_alive: Complain about one that has ended; nobody asks for it.
            allow_graceful: Let it end what it runs; otherwise it is killed, and what is left ends with its raylet.
            wait: Until it has ended.
        """
        assert not check_alive
        assert wait
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(self._stop_s if allow_graceful else _WATCH_PERIOD_S * 8)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()


def main(arguments: list[str]) -> int:
    """Start the node, wait for its end or that of the input.

    Args:
        arguments: The request.
    """
    request = EnclaveRequest.model_validate_json(arguments[0])
    enter(FOLDER / request.place.namespace)
    from cluster.raylets import start_beside  # imports Ray, whose threads must be born in the namespace

    node = start_beside(request.config, request.gcs_address, request.place.address)
    os.write(sys.stdout.fileno(), _READY)
    while not any(kind == "raylet" for kind, _ in node.dead_processes()):
        readable, _, _ = select.select([sys.stdin], [], [], _WATCH_PERIOD_S)
        if readable and not os.read(sys.stdin.fileno(), 4_096):
            break
    node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
