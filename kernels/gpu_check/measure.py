"""Timing by CUDA events, kernel and torch form in turns, and the run over all checks within a limit of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.gpu_check.check import Check, Prepared
from kernels.gpu_check.rows import Row, quantiles, raised, rates
from kernels.roofline import device_called
from kernels.tolerance import largest_error

ROUNDS = 20
ROUND_MS = 2.0
CALLS_MAX = 200

Samples = tuple[list[float], list[float]]
Timer = Callable[[Prepared], Samples]


def time_on_gpu(prepared: Prepared) -> Samples:
    """Time both forms in turns: microseconds of one call, a sample a round.

    A round repeats the call until it takes about 2 ms, so that the events' resolution does not matter. Inputs stay in
    the L2 cache between calls where they fit, for both forms.
    """
    forms = (prepared.fused, prepared.unfused)
    counts = [_calls_a_round(form) for form in forms]
    samples: Samples = ([], [])
    for _ in range(ROUNDS):
        for form, count, into in zip(forms, counts, samples, strict=True):
            into.append(_event_ms(form, count) * 1e3 / count)
    return samples


def _calls_a_round(form: Callable[[], Tensor]) -> int:
    form()
    once_ms = _event_ms(form, 3) / 3
    return max(1, min(CALLS_MAX, round(ROUND_MS / max(once_ms, 1e-3))))


def _event_ms(form: Callable[[], Tensor], count: int) -> float:
    event: Any = torch.cuda.Event  # its constructor has no types
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        form()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def run_checks(
    checks: Iterable[Check],
    device: torch.device,
    *,
    device_name: str,
    versions: str,
    seed: int,
    limit_s: float,
    timer: Timer = time_on_gpu,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Row]:
    """Check all, time those that are right, yield a row each.

    Args:
        checks: In the order in which they run.
        device: Where.
        device_name: For the rows.
        versions: For the rows.
        seed: Set before each check's inputs are made.
        limit_s: After so many seconds the checks that remain are no longer timed; all are still checked.
        timer: Returns the samples of both forms.
        clock: Seconds.
    """
    failures = _failures()
    begin = clock()
    for check in checks:
        torch.manual_seed(seed)
        try:
            prepared = check.make(device)
            truth, magnitude = prepared.expected()
            error = largest_error(prepared.fused(), truth, magnitude)
            del truth, magnitude
            times = None
            if error <= prepared.tolerance and check.is_timed and clock() - begin < limit_s:
                times = timer(prepared)
        except failures as failure:
            yield raised(check, failure, device_name, versions, seed)
            continue
        yield _row(check, prepared, error, times, device_name, versions, seed)


def _failures() -> tuple[type[Exception], ...]:
    """Return what a kernel that cannot be compiled or launched raises: one must not hide the others."""
    from triton.errors import TritonError

    return (TritonError, RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError)


def _row(
    check: Check, prepared: Prepared, error: float, times: Samples | None, device: str, versions: str, seed: int
) -> Row:
    fused = unfused = tflops = gbytes = bound = share = None
    if times is not None:
        fused, unfused = quantiles(times[0]), quantiles(times[1])
        tflops, gbytes = rates(check.work, fused[1])
        if (roofs := device_called(device)) is not None:
            point = roofs.point(check.work)
            bound, share = point.bound, point.share(fused[1] * 1e-6)
    return Row(
        check.op,
        check.shape,
        device,
        versions,
        seed,
        ok=error <= prepared.tolerance,
        error=error,
        tolerance=prepared.tolerance,
        fused_us=fused,
        unfused_us=unfused,
        tflops=tflops,
        gbytes_per_s=gbytes,
        bound=bound,
        roofline_share=share,
    )
