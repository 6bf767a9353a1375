"""Serve's handles without Serve: responses and references that a test ends by hand, with Serve's own rules.

What is copied from Ray Serve 2.60: a reference exists once a replica has accepted the call; on one event loop
``cancel`` reaches the callee only through a response that was resolved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import DeploymentID, ReplicaID

from shared.breaker import Breakers, Trip


class FakeReference:
    """An object reference: ends with ``put`` or ``fail``."""

    def __init__(self) -> None:
        self.num_fetches = 0
        self.num_looks = 0
        self._done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._done.add_done_callback(lambda done: done.exception())

    def put(self, value: Any) -> None:
        self._done.set_result(value)

    def fail(self, error: BaseException) -> None:
        self._done.set_exception(error)

    async def _ready(self) -> FakeReference:
        self.num_looks += 1
        await asyncio.wait([self._done])
        return self

    def __await__(self) -> Generator[Any, Any, Any]:
        self.num_fetches += 1
        return asyncio.shield(self._done).__await__()


class FakeReplicaResult:
    """What a replica has accepted; knows whether its work was stopped."""

    def __init__(self, reference: FakeReference) -> None:
        self.reference = reference
        self.num_cancels = 0

    def cancel(self) -> None:
        self.num_cancels += 1


class FakeResponse:
    """A pending call; ``accept`` gives it a replica."""

    def __init__(self, args: tuple[Any, ...], by_reference: bool, session_id: str = "") -> None:
        self.args = args
        self.session_id = session_id
        self.by_reference = by_reference
        self.reference = FakeReference()
        self.result = FakeReplicaResult(self.reference)
        self._replica_result_future: asyncio.Future[FakeReplicaResult] = asyncio.get_running_loop().create_future()
        self._replica_result: FakeReplicaResult | None = None
        self._trip = Trip.current()  # Serve's task of the call inherits it

    def choose(self, replica: str) -> None:
        """Send it to a replica, which does nothing yet."""
        assert self._trip is not None
        self._trip.sent_to(replica)

    def accept(self) -> None:
        self._replica_result_future.set_result(self.result)

    def refuse(self, error: BaseException) -> None:
        self._replica_result_future.set_exception(error)

    def put(self, value: Any) -> None:
        """Accept and answer."""
        self.accept()
        self.reference.put(value)

    def fail(self, error: BaseException) -> None:
        """Accept and fail."""
        self.accept()
        self.reference.fail(error)

    async def _to_object_ref(self) -> FakeReference:
        assert self.by_reference, "Serve has no reference for a call by value"
        self._replica_result = await self._replica_result_future
        return self.reference

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._value().__await__()

    async def _value(self) -> Any:
        self._replica_result = await self._replica_result_future
        return await self.reference

    def cancel(self) -> None:
        self._replica_result_future.cancel()
        if self._replica_result is not None:
            self._replica_result.cancel()

    @property
    def was_stopped(self) -> bool:
        """Whether the callee was told to stop, or never got the call."""
        return self.result.num_cancels > 0 or self._replica_result_future.cancelled()


class _Method:
    def __init__(self, handle: FakeServeHandle, name: str, by_reference: bool, session_id: str) -> None:
        self._handle = handle
        self._name = name
        self._by_reference = by_reference
        self._session_id = session_id

    def remote(self, *args: Any) -> FakeResponse:
        response = FakeResponse(args, self._by_reference, self._session_id)
        self._handle.calls.append((self._name, response))
        return response


class _Bound:
    def __init__(self, handle: FakeServeHandle, by_reference: bool, session_id: str = "") -> None:
        self._given = handle, by_reference, session_id

    def options(self, *, session_id: str) -> _Bound:
        return _Bound(*self._given[:2], session_id)

    def __getattr__(self, name: str) -> _Method:
        handle, by_reference, session_id = self._given
        return _Method(handle, name, by_reference, session_id)


class FakeServeHandle:
    """A deployment handle; ``calls`` are the responses it gave.

    Args:
        num_replicas: Live replicas that its router knows; None: it has heard of none yet.
    """

    def __init__(self, num_replicas: int | None = 1) -> None:
        self.calls: list[tuple[str, FakeResponse]] = []
        self.breakers: Breakers | None = None
        station = DeploymentID("station", "rankmesh")
        names = [f"replica-{number}" for number in range(num_replicas or 0)]
        self.replicas = {ReplicaID(name, station): name for name in names}
        self._populated = num_replicas is not None
        self._router = SimpleNamespace(_asyncio_router=SimpleNamespace(request_router=self))

    @property
    def curr_replicas(self) -> dict[ReplicaID, str]:
        return self.replicas

    def running_replicas_populated(self) -> bool:
        return self._populated

    def options(self, *, _by_reference: bool, **serialization: str) -> Any:
        return _Bound(self, _by_reference)

    @property
    def last(self) -> FakeResponse:
        """The response of the latest call."""
        return self.calls[-1][1]
