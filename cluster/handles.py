"""``shared.handle`` over Ray Serve: pending results that can be passed on, watched, asked why they failed, cancelled.

A call travels by reference (actor RPC: the result stays with Ray, and only who awaits it gets it) or by value (gRPC: a
third of the processor time for small messages), as its edge says or as the size of its messages asks. Read in the
source of Ray 2.60 and confirmed by experiment, see docs/decisions/0003-transport.md:

* ``ObjectRef._ready`` tells that a result exists without moving it here, but not whether it is an error. An error
  report is a few kilobytes and always travels inside Ray's messages; a result that went to shared memory is a value.
  So ``failure`` fetches small results only.
* Serve would wait for each pending argument of each call by itself, and each wait is a hop between threads. Here all
  calls that need one result share one wait, and then pass its reference on.
* With everything on one event loop, ``DeploymentResponse.cancel`` reaches the callee only after the response was
  resolved once. A call therefore resolves itself as soon as it has a replica.
* Serve lets a call wait for ever while a deployment has no replica. Its router does know: it drops a replica on the
  first call that finds it dead. So a call is refused at once then, and the caller goes on without that station.
* Which replica a call goes to is decided here, in the process of the caller: every ingress has a router of its own. A
  deployment that routes by key (``cluster.affinity``) hashes it onto the replicas, whose names all routers know: so
  they agree, in every ingress mode and without talking.
* A replica that answers nobody is left out by the routers (``cluster.routers``); where all of a station are, a call
  that is not needed is refused at once as well. What a call's end says of its replica, the call tells the breakers, and
  copies of calls try the silent ones.
* A by-value call with a pending argument whose replica died keeps the caller's router busy for ever. So by-value calls
  never see pending arguments: they are awaited here first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeAlias

import ray.experimental
from ray import ObjectRef
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from cluster.config import Transport
from cluster.failures import as_rankmesh_error
from shared.breaker import Breakers, Trip
from shared.errors import RankMeshError, StageUnavailableError
from shared.handle import TRIES

ERROR_BYTES_MAX = 65_536
"""A larger result is a value: an error report with its traceback has about 3 KB."""

BytesOf: TypeAlias = Callable[[ObjectRef[Any]], int]
KeyOf: TypeAlias = Callable[..., str]
"""Arguments of a call -> what decides which replica it goes to, where the deployment routes by it."""
_Response: TypeAlias = DeploymentResponse[Any]


class RayHandle:
    """One deployment, called by method name.

    Args:
        name: Deployment name as the stations know it, e.g. ``embedding:1``.
        handle: Its Serve handle.
        transports: Method -> how it travels; a method that is not named goes by value.
        value_bytes_max: Largest payload of a ``by_size`` call that goes by value; one of unknown size does not.
        breakers: Of its replicas.
        bytes_of: Tells the size of a result without fetching it.
        keys: Method -> the key of a call; calls of one key go to one replica while it lives and has room.
        waits_for_first: Whether a call waits for a replica where there is none, as long as its caller does: the call
            that waits is what makes a deployment that scaled to zero come back.
    """

    def __init__(
        self,
        name: str,
        handle: DeploymentHandle[Any],
        transports: Mapping[str, Transport],
        value_bytes_max: int,
        breakers: Breakers,
        bytes_of: BytesOf | None = None,
        keys: Mapping[str, KeyOf] | None = None,
        waits_for_first: bool = False,
    ) -> None:
        self._name = name
        self._handle = handle
        # The messages are dataclasses of arrays: pickle writes them in half the time of Serve's default, cloudpickle.
        by_value = handle.options(_by_reference=False, request_serialization="pickle", response_serialization="pickle")
        self._methods = {True: handle.options(_by_reference=True), False: by_value}
        self._transports = transports
        self._value_bytes_max = value_bytes_max
        self._breakers = breakers
        self._bytes_of = bytes_of or object_bytes
        self._keys = keys or {}
        self._waits_for_first = waits_for_first

    @property
    def name(self) -> str:
        """Name of the deployment."""
        return self._name

    def call(self, method: str, *args: object, payload_bytes: int | None = None, needed: bool = False) -> RayCall:
        """Start ``method`` on one live replica; needs a running event loop.

        Pending results among the arguments are passed on unawaited when they and this call travel by reference.

        Raises:
            StageSilentError: no replica has answered of late, and the answer is not needed.
        """
        by_reference = self._goes_by_reference(method, payload_bytes)
        refusal = None
        router = request_router(self._handle)
        if router is not None:
            router.breakers = self._breakers
            if not router.curr_replicas and not self._waits_for_first:
                refusal = StageUnavailableError(f"{self._name} has no live replica", stage=self._name)
            if method in TRIES:
                self._breakers.try_silent(lambda name: self._start(method, args, by_reference, only=name))
            if not needed:
                self._breakers.check([replica.unique_id for replica in router.curr_replicas])
        return self._start(method, args, by_reference, refusal)

    def _start(
        self,
        method: str,
        args: tuple[object, ...],
        by_reference: bool,
        refusal: RankMeshError | None = None,
        only: str | None = None,
    ) -> RayCall:
        served = self._methods[by_reference]
        if (key := self._keys.get(method)) is not None:
            served = served.options(session_id=key(*args))
        trip = Trip(self._breakers, only, may_stay=only is None and method in TRIES)
        return RayCall(self._name, getattr(served, method), args, by_reference, self._bytes_of, trip, refusal)

    def _goes_by_reference(self, method: str, payload_bytes: int | None) -> bool:
        transport = self._transports.get(method, "value")
        if transport == "by_size":
            return payload_bytes is None or payload_bytes > self._value_bytes_max
        return transport == "reference"


class RayCall:
    """A pending result of another station.

    Args:
        station: Deployment that is called.
        method: Bound method of a Serve handle.
        args: Arguments; ``RayCall`` ones stand for their results.
        by_reference: How the call travels.
        bytes_of: Tells the size of a result without fetching it.
        trip: Told which replica has the call, and how it ended.
        refusal: Why the call is not made at all; None: it is made.
    """

    def __init__(
        self,
        station: str,
        method: Any,
        args: tuple[object, ...],
        by_reference: bool,
        bytes_of: BytesOf,
        trip: Trip,
        refusal: RankMeshError | None = None,
    ) -> None:
        self.station = station
        self.by_reference = by_reference
        self._method = method
        self._bytes_of = bytes_of
        self._trip = trip
        self._response: _Response | None = None
        self._ending: asyncio.Task[Any] | None = None
        if refusal is not None:
            work = _refuse(refusal)
        elif all(_is_at_hand(arg, by_reference) for arg in args):
            self._send([arg._reference() if isinstance(arg, RayCall) else arg for arg in args])
            work = self._resolve()
        else:
            work = self._await_args_then_resolve(args)
        # Holds the reference (by reference) or the value (by value).
        self._resolving: asyncio.Task[Any] = asyncio.get_running_loop().create_task(work, name=station)
        # A failure that nobody asks for must not be reported as never retrieved: the caller may have moved on.
        self._resolving.add_done_callback(self._on_resolved)

    def __await__(self) -> Generator[Any, Any, Any]:
        """Fetch the value into this process.

        Raises:
            RankMeshError: the callee's, or why there was no answer.
        """
        return self._value().__await__()

    async def ready(self) -> None:
        """Wait until the call has ended, well or not, without moving its value into this process."""
        await asyncio.wait([self._resolving])
        reference = self._reference()
        if reference is not None:
            # Once for all who wait: each look is a hop between threads, and up to five calls wait for the features.
            if self._ending is None:
                self._ending = asyncio.get_running_loop().create_task(reference._ready(), name=self.station)
                self._ending.add_done_callback(lambda done: self._trip.ended())
            await asyncio.wait([self._ending])

    @property
    def _has_ended(self) -> bool:
        return self._ending is not None and self._ending.done()

    async def failure(self) -> RankMeshError | None:
        """Return why the ended call failed, or None."""
        await self.ready()
        reference = self._reference()
        if reference is not None and self._bytes_of(reference) > ERROR_BYTES_MAX:
            self._trip.answered()
            return None
        try:
            await self._value()
        except RankMeshError as error:
            return error
        return None

    def cancel(self) -> None:
        """Stop the callee's work, and what it called; harmless when it has ended; may leave it to try."""
        self._trip.given_up(self, self._stop)

    def _stop(self) -> None:
        if self._response is not None:
            _stop(self._response)
        self._resolving.cancel()

    @property
    def patience_s(self) -> float:
        """Seconds until waiting for the call is in vain; see ``shared.handle.Call``."""
        return self._trip.patience_s

    def _on_resolved(self, done: asyncio.Task[Any]) -> None:
        """Tell the trip of a value or failure; a reference says only that a replica has accepted the call."""
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            self._note_failure(error)
        elif not self.by_reference:
            self._trip.answered()

    def _note_failure(self, error: BaseException) -> None:
        if isinstance(as_rankmesh_error(error, self.station), StageUnavailableError):
            self._trip.lost()
        else:
            self._trip.answered()

    def _reference(self) -> ObjectRef[Any] | None:
        done = self._resolving
        if not self.by_reference or not done.done() or done.cancelled() or done.exception() is not None:
            return None
        reference: ObjectRef[Any] = done.result()
        return reference

    def _send(self, args: list[object]) -> None:
        with self._trip.being_made():  # the task that Serve makes of the call inherits it
            self._response = self._method.remote(*args)

    async def _await_args_then_resolve(self, args: tuple[object, ...]) -> Any:
        self._send([await _argument(arg, self.by_reference) for arg in args])
        return await self._resolve()

    async def _resolve(self) -> Any:
        """Return the reference as soon as a replica has accepted the call, or the value when it is there."""
        response = self._response
        assert response is not None  # sent before
        return await (response._to_object_ref() if self.by_reference else response)

    async def _value(self) -> Any:
        await asyncio.wait([self._resolving])
        if self._resolving.cancelled():
            raise as_rankmesh_error(asyncio.CancelledError(), self.station)
        try:
            value = self._resolving.result()
            if self.by_reference:
                value = await value
                self._trip.answered()
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # it is the caller that is cancelled
            raise as_rankmesh_error(error, self.station) from error
        except Exception as error:  # whatever Ray raised has a place in the error tree
            self._note_failure(error)
            raise as_rankmesh_error(error, self.station) from error
        return value


async def _refuse(error: RankMeshError) -> Any:
    raise error


def has_lost_all_replicas(handle: DeploymentHandle[Any]) -> bool:
    """Return whether a deployment that had replicas has none now, as far as this process knows."""
    router = request_router(handle)
    return router is not None and not router.curr_replicas


def request_router(handle: DeploymentHandle[Any]) -> Any:
    """Return what chooses the replicas of a deployment in this process; None: it has not heard of any replica yet."""
    if not handle.running_replicas_populated():
        return None  # the call waits for the news
    outer: Any = handle._router
    return outer._asyncio_router.request_router


def _is_at_hand(arg: object, by_reference: bool) -> bool:
    if not isinstance(arg, RayCall):
        return True
    return by_reference and arg._has_ended and arg._reference() is not None


async def _argument(arg: object, by_reference: bool) -> object:
    """Return what to send for an argument: the reference of a result that exists, or a value.

    Raises:
        RankMeshError: the argument is a call that failed, and it is known here already.
    """
    if not isinstance(arg, RayCall):
        return arg
    if by_reference and arg.by_reference:
        await arg.ready()
        if (reference := arg._reference()) is not None:
            return reference
    return await arg


def _stop(response: _Response) -> None:
    """Cancel a response, also in the moment between its acceptance by a replica and our learning of it."""
    response.cancel()  # type: ignore[no-untyped-call]
    assigned = response._replica_result_future
    if response._replica_result is None and assigned.done() and not assigned.cancelled() and not assigned.exception():
        assigned.result().cancel()  # type: ignore[no-untyped-call]


def object_bytes(reference: ObjectRef[Any]) -> int:
    """Return the size of an object that this process owns, 0 when it is not known; takes 0.3 ms."""
    location = ray.experimental.get_object_locations([reference]).get(reference, {})
    return int(location.get("object_size") or 0)
