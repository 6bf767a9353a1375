"""Network namespaces for the nodes of a mesh, so that one can be cut off, or lose a share of its packets.

The first node, the load and the store are in a namespace with a bridge, each further node is in one of its own with a
cable to that bridge; nothing of it is on the machine's own network, and nothing outside can reach it. Packets are lost
by a queue that gives a random share of them to a class without room (a classic BPF filter draws).

What is made has the process in its name: the next run removes what a killed one has left.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster.config import MeshConfig, NodePlace
from cluster.loopback import is_listening
from cluster.namespaces import FOLDER, enter
from cluster.processes import started_ticks, wait_until
from shared.clock import SystemClock
from shared.errors import ConfigError
from shared.userlog.embedded import find_server

PREFIX: Final = "rmchaos-"
STORE_PORT: Final = 6_379

_NETWORK: Final = "10.231.0"
_BRIDGE: Final = "bridge"
_PROGRAMS: Final = ("ip", "tc", "setpriv")
_MINE: Final = re.compile(rf"^{PREFIX}(\d+)-(\d+)-\d+$")
_COMMAND_S: Final = 10.0
_DRAWS: Final = 2**32
_STORE_WAIT_S: Final = 10.0

# Classic BPF: load a random word; at least so much: no match (the usual class); under it: match (the one without room).
_LOAD_RANDOM: Final = "32 0 0 4294963256"
_RETURN_NONE, _RETURN_MATCH = "6 0 0 0", "6 0 0 4294967295"


@dataclass(slots=True)
class Spaces:
    """The namespaces of one mesh.

    Args:
        num_nodes: Ray nodes, the first included.
    """

    num_nodes: int

    def name(self, number: int) -> str:
        """Return the name of a node's namespace."""
        return f"{PREFIX}{os.getpid()}-{started_ticks(os.getpid())}-{number}"

    def address(self, number: int) -> str:
        """Return the address of a node."""
        return f"{_NETWORK}.{number + 1}"

    @property
    def places(self) -> tuple[NodePlace, ...]:
        """Where the further nodes run."""
        return tuple(NodePlace(namespace=self.name(n), address=self.address(n)) for n in range(1, self.num_nodes))

    @property
    def store_url(self) -> str:
        """Where the store listens, which every node reaches."""
        return f"redis://{self.address(0)}:{STORE_PORT}/0"

    def make(self) -> None:
        """Make namespaces, bridge and cables.

        Raises:
            ConfigError: this machine does not allow it; names what is missing.
        """
        check_allowed()
        sweep()
        first = self.name(0)
        _ip("netns", "add", first)
        _ip("-n", first, "link", "set", "lo", "up")
        _ip("-n", first, "link", "add", _BRIDGE, "type", "bridge")
        _ip("-n", first, "addr", "add", f"{self.address(0)}/24", "dev", _BRIDGE)
        _ip("-n", first, "link", "set", _BRIDGE, "up")
        for number in range(1, self.num_nodes):
            own, cable = self.name(number), _cable(number)
            _ip("netns", "add", own)
            _ip("-n", own, "link", "set", "lo", "up")
            _ip("-n", first, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", own)
            _ip("-n", own, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", own, "link", "set", "eth0", "up")
            _ip("-n", first, "link", "set", cable, "master", _BRIDGE, "up")

    def remove(self) -> None:
        """Remove all of it; what still runs inside keeps a network that leads nowhere."""
        for number in range(self.num_nodes):
            delete(self.name(number))

    def cut(self, number: int) -> None:
        """Unplug a node's cable."""
        _ip("-n", self.name(0), "link", "set", _cable(number), "down")

    def mend(self, number: int) -> None:
        """Plug it in again."""
        _ip("-n", self.name(0), "link", "set", _cable(number), "up")

    def lose(self, number: int, share: float) -> None:
        """Lose a share of the packets of a node, in either direction."""
        jump = f"53 0 1 {int(share * _DRAWS)}"  # at least this much
        program = f"4,{_LOAD_RANDOM},{jump},{_RETURN_NONE},{_RETURN_MATCH}"
        for space, device in self._ends(number):
            tc = ("netns", "exec", space, "tc")
            _ip(*tc, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "1")
            rate = ("htb", "rate", "40gbit", "quantum", "60000")
            for usual_or_lost in ("1:1", "1:2"):
                _ip(*tc, "class", "add", "dev", device, "parent", "1:", "classid", usual_or_lost, *rate)
            no_room = ("tbf", "rate", "8bit", "burst", "1", "limit", "1")
            _ip(*tc, "qdisc", "add", "dev", device, "parent", "1:2", "handle", "2:", *no_room)
            _ip(*tc, "filter", "add", "dev", device, "parent", "1:", "protocol", "all", "prio", "1", "bpf", "bytecode",
                program, "flowid", "1:2")  # fmt: skip

    def lose_no_more(self, number: int) -> float:
        """Stop losing packets; returns the share that was lost."""
        sent = lost = 0
        for space, device in self._ends(number):
            told = json.loads(_ip("netns", "exec", space, "tc", "-s", "-j", "qdisc", "show", "dev", device))
            root: Mapping[str, Any] = next((each for each in told if each.get("root") and each["kind"] == "htb"), {})
            sent, lost = sent + root.get("packets", 0), lost + root.get("drops", 0)
            _ip("netns", "exec", space, "tc", "qdisc", "delete", "dev", device, "root")
        return lost / (sent + lost) if sent + lost else 0.0

    def _ends(self, number: int) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.name(number), "eth0"), (self.name(0), _cable(number))


def check_allowed() -> None:
    """Check that this machine and this user can have network namespaces with lossy cables.

    Raises:
        ConfigError: names what is missing.
    """
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        what = f"the programs {' and '.join(missing)} (packages iproute2, util-linux)"
    elif os.geteuid() != 0:
        what = f"root, this is user {os.geteuid()}"
    else:
        return
    raise ConfigError(f"nodes in network namespaces need {what}", field="network", value="namespaces")


def sweep() -> list[str]:
    """Remove the namespaces of runs that are gone, and end what still runs in them; returns their names."""
    left = [path for path in FOLDER.iterdir() if _is_left(path.name)] if FOLDER.is_dir() else []
    for path in left:
        for pid in inside(path.name):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        delete(path.name)
    return [path.name for path in left]


def inside(name: str) -> list[int]:
    """Return the processes in a namespace."""
    told = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [int(pid) for pid in told.stdout.split()]


def delete(name: str) -> None:
    """Remove a namespace if it is there; its cables go with it."""
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextmanager
def networked(config: MeshConfig) -> Iterator[tuple[MeshConfig, Spaces]]:
    """Yield a mesh whose nodes have a namespace each, with this thread and its store in the first one's.

    Raises:
        ConfigError: this machine does not allow it; names what is missing.
    """
    spaces = Spaces(config.ray.num_nodes)
    try:
        spaces.make()
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        enter(FOLDER / spaces.name(0))
        try:
            with _store(spaces.address(0)):
                ray = config.ray.model_copy(update={"address": spaces.address(0), "places": spaces.places})
                client = config.store.client.model_copy(update={"url": spaces.store_url})
                store = config.store.model_copy(update={"kind": "redis", "client": client})
                yield config.model_copy(update={"ray": ray, "store": store}), spaces
        finally:
            enter(Path(f"/proc/self/fd/{before}"))
            os.close(before)
    finally:
        spaces.remove()


@contextmanager
def _store(address: str) -> Iterator[None]:
    """Run a store that the other namespaces reach, and nobody else."""
    options = ("--bind", f"127.0.0.1 {address}", "--port", str(STORE_PORT), "--protected-mode", "no", "--save", "")
    child = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", str(find_server()), *options, "--maxmemory-policy", "volatile-lru"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        if not wait_until(lambda: is_listening(STORE_PORT), SystemClock(), _STORE_WAIT_S):
            raise ConfigError(f"the store does not listen on {address}", field="network", value=address)
        yield
    finally:
        child.terminate()
        child.wait()


def _cable(number: int) -> str:
    return f"node{number}"


def _is_left(name: str) -> bool:
    found = _MINE.match(name)
    return found is not None and started_ticks(int(found[1])) != int(found[2])


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=_COMMAND_S)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise ConfigError(f"`ip {' '.join(words)}`: {reason[0]}", field="network", value="namespaces")
    return done.stdout
