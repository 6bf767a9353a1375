"""A load generator in a process of its own: bodies made ahead, plain sockets, so that little of the machine is its own.

Real clients are on other machines, and what the generator is late by itself counts as the mesh's. So it is ahead of the
mesh in priority where it may (``benchmarks.ahead``), as a session of its own, which Linux schedules as one: in
another's it would wait for what others of that session have used. A client of a closed loop that is shed comes back
when it is told to.

``hammer`` is called through a pool of one process; what it takes and returns travels by pickle.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.ahead import ahead_of_the_mesh
from shared.clock import SystemClock
from shared.wire import MEDIA_TYPE

NO_ANSWER = 0
"""Status of a request whose connection broke or that had no answer in time."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Volley:
    """What to send.

    Args:
        host: Address of the mesh.
        port: Its port.
        bodies: Bodies of rank requests as columns, taken in turn.
        times_s: When each request is due, seconds from the start, ascending; empty: a closed loop.
        timeout_s: Longest wait for one answer.
        num_clients: Of a closed loop.
        duration_s: Of a closed loop.
    """

    host: str
    port: int
    bodies: tuple[bytes, ...]
    times_s: Floats
    timeout_s: float = 10.0
    num_clients: int = 8
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Hits:
    """What came back, by request.

    Args:
        due_s: When it was due, seconds from the start.
        latency_ms: From then to the last byte of the answer.
        late_ms: How late the generator itself was.
        status: HTTP status, ``NO_ANSWER`` without one.
        is_whole: Whether the answer is marked as made without nothing.
    """

    due_s: Floats
    latency_ms: Floats
    late_ms: Floats
    status: npt.NDArray[np.int64]
    is_whole: npt.NDArray[np.bool_]


def hammer(volley: Volley) -> Hits:
    """Send everything and return what came back."""
    with ahead_of_the_mesh():
        return asyncio.run(_run(volley))


async def _run(volley: Volley) -> Hits:
    clock, sender = SystemClock(), _Sender(volley)
    began_s = clock.monotonic_s()
    rows: list[tuple[float, float, float, int, bool]] = []

    async def one(number: int, due_s: float) -> float:
        """Send a request and return the seconds that a client that is shed is to wait."""
        sent_s = clock.monotonic_s() - began_s
        status, is_whole, retry_after_s = await sender.send(number)
        done_s = clock.monotonic_s() - began_s
        rows.append((due_s, (done_s - due_s) * 1e3, (sent_s - due_s) * 1e3, status, is_whole))
        return retry_after_s

    async def client(first: int) -> None:
        number = first
        while (due_s := clock.monotonic_s() - began_s) < volley.duration_s:
            await clock.sleep_s(await one(number, due_s))
            number += volley.num_clients

    async with asyncio.TaskGroup() as group:
        for number, due_s in enumerate(volley.times_s.tolist()):
            await clock.sleep_s(due_s - (clock.monotonic_s() - began_s))
            group.create_task(one(number, due_s))
        if not len(volley.times_s):
            for first in range(volley.num_clients):
                group.create_task(client(first))
    sender.close()
    rows.sort()
    columns = list(zip(*rows, strict=True))
    due, latency, late = (np.array(column, np.float64) for column in columns[:3])
    return Hits(due, latency, late, np.array(columns[3], np.int64), np.array(columns[4], np.bool_))


class _Sender:
    """Keeps connections open and uses the one that was used last."""

    def __init__(self, volley: Volley) -> None:
        self._volley = volley
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, number: int) -> tuple[int, bool, float]:
        """Return status of request ``number``, whether its answer is whole, and its ``Retry-After`` in seconds."""
        writer = None
        try:
            async with asyncio.timeout(self._volley.timeout_s):
                reader, writer = await self._connection()
                writer.write(self._request(self._volley.bodies[number % len(self._volley.bodies)]))
                head = await reader.readuntil(b"\r\n\r\n")
                content = await reader.readexactly(_number(head, b"content-length"))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            if writer is not None:
                writer.close()
            return NO_ANSWER, False, 0.0
        self._idle.append((reader, writer))
        status = int(head.split(b" ", 2)[1])
        return status, b'"degraded":[]' in content, float(_number(head, b"retry-after"))

    def close(self) -> None:
        """Close the connections."""
        for _, writer in self._idle:
            writer.close()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not (reader.at_eof() or writer.is_closing()):
                return reader, writer
        return await asyncio.open_connection(self._volley.host, self._volley.port, limit=2**20)

    def _request(self, body: bytes) -> bytes:
        lines = (
            "POST /v1/rank HTTP/1.1", f"Host: {self._volley.host}", f"Content-Type: {MEDIA_TYPE}",
            f"Content-Length: {len(body)}", "Accept: application/json", "", "",
        )  # fmt: skip
        return "\r\n".join(lines).encode() + body


def _number(head: bytes, header: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == header:
            return int(value)
    return 0
