"""The rooflines of all kernels: which shapes, on which device, and the figures in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kernels.gpu_check.cases import all_checks
from kernels.gpu_check.check import Check
from kernels.roofline import counts
from kernels.roofline.model import EPYC_CORE, H200_SXM, Device, Precision, Work
from kernels.search.spaces import standard_problems

KERNELS = Path(__file__).parents[1]
FOLDERS = {"broadcast_token_gemm": "broadcast_gemm"}
"""Operators that live in a folder of another name."""

COLUMNS = ("GFLOP", "MB", "FLOP/B", "bound", "least us", "rate at best")


@dataclass(frozen=True, slots=True)
class Table:
    """What one kernel asks of one device.

    Args:
        device: H200 for kernels with a Triton form, a CPU core for those that have none.
        works: Shape in words -> its work, in the order of the table.
    """

    device: Device
    works: Mapping[str, Work]


def all_tables(checks: Iterable[Check] | None = None, folder: Path = KERNELS) -> dict[str, Table]:
    """Return the table of every kernel that has a README, by folder.

    Args:
        checks: Of the GPU; None: all of ``kernels.gpu_check``. Those that are timed have real shapes and are taken.
        folder: Of the kernels.

    Raises:
        ValueError: a kernel has no shape here, or shapes belong to no README.
    """
    on_gpu: dict[str, dict[str, Work]] = {}
    for check in all_checks() if checks is None else checks:
        if check.is_timed:
            name = FOLDERS.get(check.op, check.op)
            shape = check.shape if name == check.op else f"{check.op} {check.shape}"
            on_gpu.setdefault(name, {})[shape] = check.work
    tables = {name: Table(H200_SXM, works) for name, works in on_gpu.items()}
    tables |= {name: Table(EPYC_CORE, works) for name, works in _on_cpu().items()}
    readmes = {path.parent.name for path in folder.glob("*/README.md")}
    if missing := sorted(readmes - tables.keys()):
        raise ValueError(f"every kernel needs shapes for its roofline, {', '.join(missing)} has none")
    if unknown := sorted(tables.keys() - readmes):
        raise ValueError(f"every roofline needs kernels/<folder>/README.md, {', '.join(unknown)} has none")
    return {name: tables[name] for name in sorted(tables)}


def _on_cpu() -> dict[str, dict[str, Work]]:
    """Return the shapes of kernels that only a CPU runs: those of ``rankmesh bench kernels`` and ``mfu``."""
    events = (2_048,)
    stack = counts.StackSizes(layers=6, tokens=32, width=64, mixtures=16, hidden=512, mlp_tokens=16, linear_tokens=16)
    reading = counts.StackSizes(
        layers=6, tokens=32, width=64, mixtures=16, hidden=512, mlp_tokens=16, linear_tokens=16, queries=2, keys=2_048
    )
    return {
        "block_attention": {
            f"{'causal' if causal else 'whole blocks'} T2048 B128 W2 H{h} K{k}": counts.block_attention(
                events, h, k, block=128, window_blocks=2, causal=causal
            )
            for causal in (True, False)
            for h, k in ((4, 64), (2, 128))
        },
        "event_layer": {
            f"4 layers in turns n{n} D128 m256 w{window}": counts.event_layers(
                n, 128, 256, window, feed_forward=2, attention=2, layers=4
            )
            for n, window in ((1, 128), (8, 128), (32, 128), (8, 248))
        },
        "native": {
            "BroadcastLinear M1000 N1024 K1024": counts.linear(1_000, 1_024, 1_024),
            "BroadcastLinear M100 N1024 K1024": counts.linear(100, 1_024, 1_024),
            "Int8Linear M1000 N1024 K1024": counts.linear(1_000, 1_024, 1_024, "int8"),
            "broadcast_attention C1000 Q2 H2 K64 T2048": counts.broadcast_attention(1_000, 2, 2, 64, events),
            "segmented_topk N1000000 k1000": counts.segmented_topk((1_000_000,), 1_000, with_tie_keys=False),
        },
        "search": {
            f"{problem.op} {' '.join(f'{name} {size}' for name, size in problem.shape.items())}": problem.work
            for problem in standard_problems()
            if problem.work is not None
        },
        "wukong_layer": {
            f"{name} C{c}": counts.wukong_stack(c, sizes)
            for name, sizes in (("6 layers, no queries", stack), ("6 layers, 2 queries to T2048", reading))
            for c in (100, 1_000)
        },
    }


def lines(tables: Mapping[str, Table]) -> Iterator[str]:
    """Yield the tables for a terminal."""
    for device in (H200_SXM, EPYC_CORE):
        works = [
            (f"{folder} {shape}", work)
            for folder, table in tables.items()
            if table.device is device
            for shape, work in table.works.items()
        ]
        if works:
            width = max(len(name) for name, _ in works)
            yield f"{device.name}: {roofs(device)}"
            yield f"{'shape':<{width}} {' '.join(f'{column:>13}' for column in COLUMNS)}"
            for name, work in works:
                yield f"{name:<{width}} {' '.join(f'{cell:>13}' for cell in cells(work, device))}"


def roofs(device: Device, precisions: Collection[Precision] | None = None) -> str:
    """Return the roofs of a device in words; of some precisions, None: of all."""
    rates = [
        f"{precision} {_rate(rate)} (from {device.ridge(precision):.3g} FLOP/B on)"
        for precision, rate in device.flops_per_s.items()
        if precisions is None or precision in precisions
    ]
    return ", ".join([*rates, f"memory {_bytes(device.bytes_per_s)}"])


def cells(work: Work, device: Device) -> tuple[str, ...]:
    """Return the figures of one shape in words, in the order of ``COLUMNS``."""
    point = device.point(work)
    return (
        _digits(work.flops * 1e-9),
        _digits(work.num_bytes * 1e-6),
        _digits(work.intensity),
        point.bound,
        _digits(point.least_s * 1e6),
        _rate(point.flops_per_s) if work.flops else "-",
    )


def _digits(value: float) -> str:
    """Return three significant digits, whole numbers from 100 on."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _rate(flops_per_s: float) -> str:
    is_large = flops_per_s >= 1e12
    return f"{_digits(flops_per_s * (1e-12 if is_large else 1e-9))} {'T' if is_large else 'G'}FLOP/s"


def _bytes(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 1e-12:g} TB/s" if bytes_per_s >= 1e12 else f"{bytes_per_s * 1e-9:g} GB/s"
