"""A benchmark row: one figure with its spread and everything needed to ask "measured how, on what?".

Rows are appended to ``benchmarks/results/<benchmark>.jsonl``, one JSON object a line, and never rewritten.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.clock import Clock
from shared.errors import DataUnavailableError

Param: TypeAlias = bool | int | float | str

RESULTS_DIR = Path(__file__).parent / "results"

VERSIONED = ("ray", "torch", "numpy", "fbgemm-gpu-cpu", "fbgemm-gpu", "fastapi", "httpx", "redis")
"""Distributions whose version may move a figure; those not installed are left out of the row."""

_NAME = r"^[a-z0-9][a-z0-9_.-]*$"


class BenchmarkRow(BaseModel):
    """One measured figure.

    Args:
        benchmark: Name in the registry.
        metric: What was measured, with its unit last (``p50_ms_500``).
        value: The figure.
        unit: Its unit, e.g. ``ms``.
        quantiles: Spread of the samples in the same unit: min, p50, p90, p99, max; empty for a single observation.
        num_samples: Samples behind the figure.
        params: What the figure depends on, e.g. ``{"candidates": 500, "loop": "closed"}``.
        config_hash: Digest of the resolved deployment configuration.
        seed: Seed of everything random in the run.
        commit: Commit of the code, with ``-dirty`` when the tree had changes.
        device: The machine.
        started: Start of the run, ISO 8601 in UTC.
        versions: Distribution -> version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    benchmark: str = Field(pattern=_NAME)
    metric: str = Field(pattern=_NAME)
    value: float
    unit: str
    quantiles: dict[str, float]
    num_samples: int = Field(ge=1)
    params: dict[str, Param]
    config_hash: str
    seed: int
    commit: str
    device: str
    started: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a benchmark function hands back for one metric; the harness makes a row of it.

    Args:
        metric: Name with the unit last.
        value: The figure.
        unit: Its unit.
        quantiles: Spread, see ``BenchmarkRow``.
        num_samples: Samples behind it.
        params: What it depends on.
    """

    metric: str
    value: float
    unit: str
    quantiles: dict[str, float] = field(default_factory=dict)
    num_samples: int = 1
    params: dict[str, Param] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunContext:
    """What all rows of one run share."""

    seed: int
    commit: str
    device: str
    started: str
    versions: dict[str, str]

    @classmethod
    def capture(cls, seed: int, clock: Clock) -> RunContext:
        """Describe this process, machine and checkout."""
        started = datetime.fromtimestamp(clock.now_s(), UTC).isoformat(timespec="seconds")
        return cls(seed=seed, commit=commit_id(), device=device_name(), started=started, versions=installed_versions())

    def row(self, benchmark: str, config_hash: str, measurement: Measurement) -> BenchmarkRow:
        """Make the row of one measurement."""
        return BenchmarkRow(
            benchmark=benchmark,
            metric=measurement.metric,
            value=measurement.value,
            unit=measurement.unit,
            quantiles=measurement.quantiles,
            num_samples=measurement.num_samples,
            params=measurement.params,
            config_hash=config_hash,
            seed=self.seed,
            commit=self.commit,
            device=self.device,
            started=self.started,
            versions=self.versions,
        )


def append_rows(rows: Sequence[BenchmarkRow], folder: Path = RESULTS_DIR) -> None:
    """Append rows to ``<folder>/<benchmark>.jsonl``; the folder is made when it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        with (folder / f"{row.benchmark}.jsonl").open("a", encoding="utf-8") as file:
            file.write(row.model_dump_json() + "\n")


def read_rows(path: Path) -> list[BenchmarkRow]:
    """Read a result file, oldest row first; blank lines are skipped.

    Raises:
        DataUnavailableError: the file cannot be read or a line is not a row; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataUnavailableError(f"cannot read {path}: {error.strerror}", field="path", value=str(path)) from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(BenchmarkRow.model_validate_json(line))
        except ValidationError as error:
            raise DataUnavailableError(
                f"{path} line {number} is not a benchmark row: {error.errors()[0]['msg']}", field="line", value=number
            ) from error
    return rows


def device_name() -> str:
    """Return the machine in words: processor, cores this process may use, accelerators that torch sees."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux: the platform's own words have to do
    parts = [f"{os.cpu_count()} x {model}", *_accelerators()]
    return " + ".join(parts)


def _accelerators() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of those ``VERSIONED`` distributions that are installed."""
    versions = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def commit_id(folder: Path = Path(__file__).parent) -> str:
    """Return the commit of the checkout that holds ``folder`` (12 digits, ``-dirty`` with changes), or ``unknown``."""
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    # Result rows that this very run appends must not make the next row of the same run look changed.
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/benchmarks/results")
    return f"{commit}-dirty" if changed else commit


def _git(folder: Path, *args: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
