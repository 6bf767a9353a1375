"""Maps what Ray, Ray Serve and gRPC raise to the error tree of rankmesh; no other file knows their exceptions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from grpc import RpcError as GrpcError
from ray import exceptions as ray_errors
from ray.serve import exceptions as serve_errors

from shared.errors import OverloadedError, RankMeshError, StageUnavailableError
from shared.log import redact_text

_RETRY_AFTER_S = 1.0
_REASON_CHARS_MAX = 300
_START_CHARS_MAX = 500
_ERROR_LINE = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b(: |$)")

_REASONS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
    # Before RayError: a request that was cancelled is both.
    ((asyncio.CancelledError, ray_errors.TaskCancelledError), "the call was cancelled"),
    (ray_errors.ActorDiedError, "its replica died under the call"),
    (ray_errors.ActorUnavailableError, "its replica cannot be reached"),
    ((ray_errors.RayActorError, ray_errors.WorkerCrashedError, ray_errors.AsyncioActorExit), "its replica ended"),
    ((ray_errors.NodeDiedError, ray_errors.LocalRayletDiedError), "its machine is gone"),
    ((ray_errors.ObjectLostError, ray_errors.PlasmaObjectNotAvailable), "an input of the call is lost"),
    (
        (ray_errors.ObjectStoreFullError, ray_errors.OutOfDiskError, ray_errors.OutOfMemoryError),
        "its machine is out of memory",
    ),
    ((ray_errors.GetTimeoutError, TimeoutError), "it did not answer in time"),
    (serve_errors.DeploymentUnavailableError, "it has no replica: the last deployment of it failed"),
    (serve_errors.ReplicaUnavailableError, "its replica is gone"),
    (GrpcError, "the connection to its replica broke"),
    (serve_errors.RayServeException, "Ray Serve refused the call"),
    (ray_errors.RayError, "Ray could not carry the call"),
)
"""First match wins. All of these end as StageUnavailableError: asking again, or another replica, may help."""


def as_rankmesh_error(error: BaseException, station: str) -> RankMeshError:
    """Return what a failed call means to its caller.

    An error of ours that a station raised comes back as it was raised, however often Ray wrapped it on its way through
    chained calls. An exception that a station did not mean to raise is a fault of that station: it counts as
    unavailable, so that the caller may do without it, and the message says what it was.

    Args:
        error: What awaiting the call, or its reference, raised.
        station: Deployment that was called.
    """
    root = _root(error)
    if isinstance(root, RankMeshError):
        return root
    if isinstance(root, serve_errors.BackPressureError):
        return OverloadedError(
            f"{station}: {root.message}", stage=station, retry_after_s=root.retry_after_s or _RETRY_AFTER_S
        )
    reason = reason_of(type(root)) or "it failed"
    text = str(root).strip().partition("\n")[0][:_REASON_CHARS_MAX]
    return StageUnavailableError(
        f"{station}: {reason} ({type(root).__name__}{f': {text}' if text else ''})",
        stage=station,
        cause=type(root).__name__,
    )


def reason_of(kind: type[BaseException]) -> str | None:
    """Return what an exception class of Ray, Serve or gRPC means, None for a class of somebody else."""
    return next((text for kinds, text in _REASONS if issubclass(kind, kinds)), None)


def _root(error: BaseException) -> BaseException:
    """Return the exception at the bottom: what a task error or Serve's note about an upstream call wraps."""
    for _ in range(8):  # bounded: an exception may be its own cause
        inner = error.cause if isinstance(error, ray_errors.RayTaskError) else None
        if inner is None and type(error) is serve_errors.RayServeException:
            inner = error.__cause__
        if inner is None or inner is error:
            return error
        error = inner
    return error


def start_failure(message: str) -> str:
    """Return what a station's constructor raised, out of the nested tracebacks that Serve makes of it; else nothing.

    Args:
        message: What Serve says about a deployment.
    """
    lines = [line.strip() for line in message.splitlines()]
    errors = [line for line in lines if _ERROR_LINE.match(line) and not line.startswith("RuntimeError: Traceback")]
    return redact_text(errors[-1])[:_START_CHARS_MAX] if errors else ""


def why_not(messages: Mapping[str, str]) -> str:
    """Return why stations did not start.

    Args:
        messages: Station -> what Serve says about it. Stations that only wait for others are left out when any failed.
    """
    errors = {name: reason for name, message in messages.items() if (reason := start_failure(message))}
    last = {name: (message.strip().splitlines() or ["not ready"])[-1] for name, message in messages.items()}
    return "; ".join(f"{name}: {words.strip()[:_START_CHARS_MAX]}" for name, words in (errors or last).items())
