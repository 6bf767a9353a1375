"""A TCP proxy as slow or dead as a test wants: outages and late answers of a store, without touching the store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self


class TcpProxy:
    """Forwards connections to a port of this machine.

    Args:
        target_port: Where to.
        reply_delay_s: Called for each chunk of an answer: how long it is held back.

    Attributes:
        target_port: Where it forwards to; connections that are open keep their target.
        port: Where it listens.
        up: False: open connections are cut and new ones dropped at once.
        num_connections: Connections made so far.
        num_replies: Chunks of answers forwarded; set it to 0 to count anew.
    """

    def __init__(self, target_port: int, reply_delay_s: Callable[[], float] = lambda: 0.0) -> None:
        self.target_port = target_port
        self.reply_delay_s = reply_delay_s
        self.port = 0
        self.up = True
        self.num_connections = 0
        self.num_replies = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()

    @property
    def num_open(self) -> int:
        """Connections that are open now."""
        return len(self._tasks)

    async def cut(self) -> None:
        """Cut all open connections."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: asyncio reports the cancellation of a handler as an error.
        task = asyncio.create_task(self._forward(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            if not self.up:
                return
            self.num_connections += 1
            target_reader, target_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            writers.append(target_writer)
            there = asyncio.create_task(self._pump(reader, target_writer, lambda: 0.0))
            back = asyncio.create_task(self._pump(target_reader, writer, self._next_reply_delay_s))
            try:
                await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                there.cancel()
                back.cancel()
                await asyncio.gather(there, back, return_exceptions=True)
        finally:
            for one in writers:
                one.transport.abort()

    def _next_reply_delay_s(self) -> float:
        self.num_replies += 1
        return self.reply_delay_s()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: Callable[[], float]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if (pause_s := delay_s()) > 0:
                    await asyncio.sleep(pause_s)
                writer.write(data)
                await writer.drain()
