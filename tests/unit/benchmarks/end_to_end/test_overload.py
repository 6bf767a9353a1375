"""Arrivals, the load generator against a real socket, and the figures from made-up outcomes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from benchmarks.arrivals import ARRIVALS, Kind, Times
from benchmarks.end_to_end.hammer import NO_ANSWER, Hits, Volley, hammer
from benchmarks.end_to_end.overload import (
    DEADLINE_MS,
    QUICK,
    goodput,
    load_figures,
    outcome_counts,
    recovery_figures,
    recovery_s,
)
from shared.errors import StageUnavailableError
from shared.wire import MEDIA_TYPE


def hits(rows: list[tuple[float, float, int]]) -> Hits:
    """Return outcomes given as due time, latency in milliseconds, and status."""
    due, latency, status = (np.array(column) for column in zip(*rows, strict=True))
    count = len(rows)
    return Hits(
        due.astype(float), latency.astype(float), np.zeros(count), status.astype(np.int64), np.ones(count, bool)
    )


@pytest.mark.parametrize("kind", ARRIVALS)
def test_arrivals_have_their_rate_and_order(kind: Kind) -> None:
    times = ARRIVALS[kind](50.0, 200.0, 1)
    assert len(times) == pytest.approx(50 * 200, rel=0.1)
    assert bool((np.diff(times) >= 0).all())
    assert (times.min() >= 0, times.max() <= 200) == (True, True)
    np.testing.assert_array_equal(times, ARRIVALS[kind](50.0, 200.0, 1))


def test_bursts_vary_more_than_chance() -> None:
    spread = {kind: np.histogram(make(50.0, 200.0, 2), 400)[0].var() for kind, make in ARRIVALS.items()}
    assert spread["bursty"] > 4 * spread["poisson"]


@dataclass
class Server:
    """Answers like a mesh: every third request is shed, every fourth connection is cut."""

    port: int = 0
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                number = len(self.requests)
                if number % 4 == 0:
                    break
                status = b"429 Shed" if number % 3 == 0 else b"200 OK"
                content = b'{"degraded":[]}' if number % 2 else b'{"degraded":["sequence"]}'
                writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(content), content))
        except asyncio.IncompleteReadError:
            pass
        writer.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server, loop, ready = Server(), asyncio.new_event_loop(), threading.Event()

    async def main() -> None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.port = listener.sockets[0].getsockname()[1]
        ready.set()
        async with listener:
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert ready.wait(5)
    yield server
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def test_the_generator_sends_what_is_due_and_tells_what_came_back(server: Server) -> None:
    times = np.arange(12, dtype=np.float64) * 0.005
    found = hammer(Volley("127.0.0.1", server.port, (b"one", b"three"), times))
    np.testing.assert_array_equal(found.due_s, times)
    assert sorted(found.status.tolist()) == [NO_ANSWER] * 3 + [200] * 6 + [429] * 3
    assert bool((found.latency_ms > 0).all())
    assert int((found.is_whole & (found.status == 200)).sum()) == 4
    assert {request.rpartition(b"\r\n\r\n")[2] for request in server.requests} == {b"one", b"three"}
    assert all(f"Content-Type: {MEDIA_TYPE}".encode() in request for request in server.requests)
    assert server.connections < len(times), "connections are used again"


def test_a_closed_loop_sends_again_when_it_is_answered(server: Server) -> None:
    found = hammer(Volley("127.0.0.1", server.port, (b"x",), np.zeros(0), num_clients=2, duration_s=0.05))
    assert len(found.status) == len(server.requests) > 2


def test_a_mesh_that_is_not_there_is_no_answer() -> None:
    found = hammer(Volley("127.0.0.1", 9, (b"x",), np.zeros(2), timeout_s=1.0))
    assert found.status.tolist() == [NO_ANSWER] * 2


def test_goodput_counts_answers_in_time() -> None:
    some = hits([(0, 10, 200), (0, DEADLINE_MS + 500, 200), (1, 5, 429), (1, 9, 503), (1, 900, 200)])
    assert goodput(some, 2.0) == 1.0
    counts = outcome_counts(some)
    assert (counts["sent"], counts["shed"], counts["late"], counts["failed"]) == (5, 1, 1, 1)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ([(4.0, 30, 200), (5.0, 30, 200)], 0.0),
        ([(4.5, 900, 200), (5.0, 30, 200)], 0.5),
        ([(4.5, 900, 200), (5.5, 2, 429), (6.0, 30, 200)], 1.5),
        ([(4.5, 46, 200)], 0.5),
        ([(4.5, 44, 200)], 0.0),
    ],
)
def test_recovery_ends_with_the_last_slow_or_failed_request(
    after: list[tuple[float, float, int]], expected: float
) -> None:
    before = [(0.0, 20, 200), (1.0, 30, 200), (1.5, 5_000, 503)]
    burst = [(2.5, 2, 429), (3.0, 800, 200)]
    assert recovery_s(hits(before + burst + after), 2.0, 4.0) == pytest.approx(expected)


def test_recovery_needs_something_to_compare_with() -> None:
    with pytest.raises(StageUnavailableError):
        recovery_s(hits([(1.0, 3, 429)]), 2.0, 4.0)


def fire(times: Times) -> Hits:
    """Answer up to 10 a second within 40 ms and shed the rest within 2 ms."""
    count = len(times)
    shed = np.arange(count) % max(round(count / 15), 1) > 0
    return Hits(times, np.where(shed, 2.0, 40.0), np.full(count, 0.5), np.where(shed, 429, 200), ~shed)


@pytest.mark.parametrize("kind", ["poisson", "bursty"])
def test_each_load_gives_its_figures(kind: Kind) -> None:
    found = {figure.metric: figure.value for figure in load_figures(kind, 10.0, QUICK, fire, 0)}
    suffix = "" if kind == "poisson" else "_bursty"
    assert 0.5 < found[f"goodput_ratio_4x{suffix}"] <= 1.0
    assert found[f"reject_p99_ms{suffix}"] == 2.0
    assert found[f"reject_from_sent_p99_ms{suffix}"] == 1.5
    assert found[f"p99_ms_4x{suffix}"] == 40.0
    assert f"goodput_per_s_0_5x{suffix}" in found


def test_the_burst_gives_its_figure() -> None:
    [figure] = recovery_figures(10.0, QUICK, fire, 0)
    assert (figure.metric, figure.unit) == ("recovery_s", "s")
