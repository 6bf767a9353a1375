"""Every exception of Ray, Serve and gRPC has a place in our error tree."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from typing import Any

import grpc
import pytest
from ray import exceptions as ray_errors
from ray.serve import exceptions as serve_errors

from cluster.failures import as_rankmesh_error, reason_of
from shared.errors import OverloadedError, RankMeshError, StageUnavailableError, VersionMismatchError


def foreign_classes() -> list[type[BaseException]]:
    found = [grpc.RpcError, grpc.aio.AioRpcError]
    for module in (ray_errors, serve_errors):
        found += [
            each
            for _, each in inspect.getmembers(module, inspect.isclass)
            if issubclass(each, BaseException) and each.__module__ == module.__name__
        ]
    return found


def task_error(cause: BaseException) -> ray_errors.RayTaskError:
    """Return what Ray makes of an exception in a remote method."""
    make: Any = ray_errors.RayTaskError
    error: ray_errors.RayTaskError = make("rank", "Traceback ...", cause, proctitle="ray::x", pid=1, ip="127.0.0.1")
    return error


def dual_error(cause: BaseException) -> BaseException:
    """Return what awaiting a reference raises: an instance of both classes."""
    error: Any = task_error(cause)
    dual: BaseException = error.as_instanceof_cause()
    return dual


@pytest.mark.parametrize("kind", foreign_classes(), ids=lambda kind: kind.__name__)
def test_every_foreign_class_has_a_meaning(kind: type[BaseException]) -> None:
    assert reason_of(kind) is not None


def test_there_are_foreign_classes_to_check() -> None:
    assert len(foreign_classes()) > 30


@pytest.mark.parametrize("wrap", [task_error, dual_error])
def test_our_own_error_comes_back_as_it_was_raised(wrap: Any) -> None:
    error = VersionMismatchError("holds b", asked="a", held="b")
    found = as_rankmesh_error(wrap(error), "ranking:full")
    assert type(found) is VersionMismatchError
    assert found.context == {"asked": "a", "held": "b"}


def test_our_own_error_from_far_upstream_comes_back_too() -> None:
    error = VersionMismatchError("holds b")
    assert as_rankmesh_error(task_error(task_error(task_error(error))), "ranking:full") is error


def test_backpressure_is_overload_with_a_time_to_wait() -> None:
    found = as_rankmesh_error(task_error(serve_errors.BackPressureError(5, 4)), "sequence")
    assert isinstance(found, OverloadedError)
    assert found.context["retry_after_s"] == 1.0
    assert found.context["stage"] == "sequence"


def test_a_replica_that_died_is_a_stage_to_try_again() -> None:
    found = as_rankmesh_error(ray_errors.ActorDiedError(), "embedding:1")
    assert isinstance(found, StageUnavailableError)
    assert found.retryable
    assert found.context == {"stage": "embedding:1", "cause": "ActorDiedError"}


def test_serves_note_about_a_dead_upstream_names_the_death() -> None:
    note = serve_errors.RayServeException("an upstream actor died")
    note.__cause__ = ray_errors.ActorDiedError()
    assert as_rankmesh_error(note, "ranking:full").context["cause"] == "ActorDiedError"


def test_an_exception_that_no_station_means_to_raise_is_unavailability_that_says_what_it_was() -> None:
    found = as_rankmesh_error(task_error(ZeroDivisionError("division by zero")), "ranking:full")
    assert isinstance(found, StageUnavailableError)
    assert found.context["cause"] == "ZeroDivisionError"
    assert "division by zero" in found.message


@pytest.mark.parametrize("error", [asyncio.CancelledError(), serve_errors.RequestCancelledError("id")])
def test_cancelled(error: BaseException) -> None:
    assert "cancelled" in as_rankmesh_error(error, "x").message


def test_an_exception_that_is_its_own_cause_ends() -> None:
    error = serve_errors.RayServeException("loop")
    error.__cause__ = error
    assert isinstance(as_rankmesh_error(error, "x"), StageUnavailableError)


def test_long_messages_are_cut_to_one_line() -> None:
    found = as_rankmesh_error(RuntimeError("x" * 5_000 + "\nsecond"), "x")
    assert len(found.message) < 400
    assert "second" not in found.message


def test_results_survive_pickling() -> None:
    error: RankMeshError = as_rankmesh_error(ray_errors.ActorDiedError(), "x")
    assert pickle.loads(pickle.dumps(error)).body() == error.body()
