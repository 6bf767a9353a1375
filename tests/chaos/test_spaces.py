"""Real network namespaces: what a cut and a lossy cable do to packets, and that nothing of them stays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.chaos.spaces import PREFIX, Spaces, check_allowed, sweep
from cluster.namespaces import FOLDER
from shared.errors import ConfigError

NUM_PACKETS = 20_000

COUNT = """
import socket
packets = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
packets.setsockopt(socket.SOL_SOCKET, 33, 2**26)  # SO_RCVBUFFORCE
packets.bind(("0.0.0.0", 5000))
print("listening", flush=True)
packets.settimeout(1.5)
count = 0
try:
    while True:
        packets.recv(200)
        count += 1
except TimeoutError:
    print(count)
"""

SEND = """
import socket
import sys
packets = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[1])):
    packets.sendto(bytes(100), ("10.231.0.1", 5000))
"""

LEAVE = """
import sys
from benchmarks.chaos.spaces import Spaces
spaces = Spaces(2)
spaces.make()
print(spaces.name(1), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def spaces() -> Iterator[Spaces]:
    try:
        check_allowed()
    except ConfigError as refusal:
        pytest.skip(refusal.message)
    made = Spaces(2)
    made.make()
    yield made
    made.remove()


def arriving(spaces: Spaces, num_sent: int = NUM_PACKETS) -> int:
    """Send packets from the second node to the first; return how many arrive."""
    inside = [("ip", "netns", "exec", spaces.name(number), sys.executable, "-S", "-c") for number in range(2)]
    with subprocess.Popen([*inside[0], COUNT], stdout=subprocess.PIPE, text=True) as counter:
        assert counter.stdout is not None
        assert counter.stdout.readline() == "listening\n"
        subprocess.run([*inside[1], SEND, str(num_sent)], check=False, stderr=subprocess.DEVNULL)
        return int(counter.stdout.readline())


def test_a_lossy_cable_loses_the_share_that_was_asked_for_and_then_none(spaces: Spaces) -> None:
    assert arriving(spaces) == NUM_PACKETS
    spaces.lose(1, 0.2)
    assert arriving(spaces) == pytest.approx(0.8 * NUM_PACKETS, abs=400)  # seven standard deviations
    assert spaces.lose_no_more(1) == pytest.approx(0.2, abs=0.02)
    assert arriving(spaces) == NUM_PACKETS


def test_a_cut_cable_carries_nothing_until_it_is_mended(spaces: Spaces) -> None:
    spaces.cut(1)
    assert arriving(spaces, 3) == 0
    spaces.mend(1)
    assert arriving(spaces) == NUM_PACKETS


def test_what_a_killed_run_has_left_the_next_one_removes(spaces: Spaces) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEAVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        name = killed.stdout.readline().strip()
        assert (FOLDER / name).exists()
        assert sweep() == [], "it runs"
        killed.kill()
    assert name in sweep()
    assert not (FOLDER / name).exists()
    assert {path.name for path in FOLDER.glob(f"{PREFIX}*")} == {spaces.name(0), spaces.name(1)}
