"""How a station calls another without knowing Ray: pending results that can be passed on unawaited.

``Handle.call`` starts a call at once and returns a ``Call``. A ``Call`` given as a top-level argument to another call
is not awaited by the caller: the callee receives its value, which never enters the caller's process (the Ray binding
passes an object reference). ``LocalHandle`` gives the same semantics inside one process, for tests and simulation.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator
from typing import Any, Protocol, TypeVar

from shared.errors import RankMeshError, StageUnavailableError

ResultT = TypeVar("ResultT", covariant=True)


TRIES = frozenset(("extract", "encode", "lookup", "rank", "precompute"))
"""Methods that change nothing: a copy of such a call may try a silent replica."""


class Call(Protocol[ResultT]):
    """A pending result of another station."""

    def __await__(self) -> Generator[Any, Any, ResultT]:
        """Fetch the value into this process; raises the callee's ``RankMeshError``."""
        ...

    async def ready(self) -> None:
        """Wait until the call has ended, well or not, without moving its value into this process."""
        ...

    async def failure(self) -> RankMeshError | None:
        """Return why the ended call failed, or None; may fetch the value, so only the failure path asks."""
        ...

    def cancel(self) -> None:
        """Stop the work of the callee, and of what it called; harmless when the call has ended."""
        ...

    @property
    def patience_s(self) -> float:
        """Seconds until waiting for the call is in vain, since its replica answers nobody; 0 or less where it is.

        Infinite where no replica has the call, or no longer, or that is not known.
        """
        ...


class Handle(Protocol):
    """One deployment, called by method name."""

    @property
    def name(self) -> str:
        """Name of the deployment."""
        ...

    def call(self, method: str, *args: object, payload_bytes: int | None = None, needed: bool = False) -> Call[Any]:
        """Start ``method`` on one live replica; ``Call`` arguments are passed on unawaited.

        Args:
            method: Name of the method.
            args: Arguments; a ``Call`` stands for its result.
            payload_bytes: A bound on the largest message that this call takes or gives; None: not known. It may
                decide how the call travels, never what it means.
            needed: Whether nothing can replace the answer: the call is made though no replica has answered of late.

        Raises:
            StageSilentError: no replica has answered of late, and the answer is not needed.
        """
        ...


class LocalCall:
    """A call inside one process."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        # A failure that nobody asks for must not be reported as never retrieved: the caller may have moved on.
        task.add_done_callback(lambda done: None if done.cancelled() else done.exception())

    def __await__(self) -> Generator[Any, Any, Any]:
        """Wait for the value.

        Raises:
            RankMeshError: the callee's; a bug of the callee or a cancelled call is ``StageUnavailableError``.
        """
        return self._value().__await__()

    async def ready(self) -> None:
        """Wait until the task has ended."""
        await asyncio.wait([self._task])  # a caller that is cancelled here leaves the task alone

    async def failure(self) -> RankMeshError | None:
        """Return the task's error, mapped to the error tree."""
        await self.ready()
        if self._task.cancelled():
            return StageUnavailableError("the call was cancelled")
        error = self._task.exception()
        if error is None or isinstance(error, RankMeshError):
            return error
        return StageUnavailableError(f"{type(error).__name__}: {error}")

    def cancel(self) -> None:
        """Cancel the task."""
        self._task.cancel()

    @property
    def patience_s(self) -> float:
        """Infinite: there are no replicas in one process."""
        return math.inf

    async def _value(self) -> Any:
        error = await self.failure()
        if error is None:
            return self._task.result()
        if self._task.cancelled() or error is self._task.exception():
            raise error
        raise error from self._task.exception()


class LocalHandle:
    """Calls a service object in this process, with the same passing-on of pending results as the mesh.

    Args:
        name: Deployment name.
        service: The plain service object.
    """

    def __init__(self, name: str, service: object) -> None:
        self._name = name
        self._service = service

    @property
    def name(self) -> str:
        """Name of the deployment."""
        return self._name

    def call(self, method: str, *args: object, payload_bytes: int | None = None, needed: bool = False) -> LocalCall:
        """Start the method as a task; pending arguments are awaited by the callee's task, not by the caller."""
        return LocalCall(asyncio.get_running_loop().create_task(self._run(method, args), name=f"{self._name}.{method}"))

    async def _run(self, method: str, args: tuple[object, ...]) -> object:
        values = [await arg if isinstance(arg, LocalCall) else arg for arg in args]
        return await getattr(self._service, method)(*values)
