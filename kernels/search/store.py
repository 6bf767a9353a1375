"""Results of searches on disk: one JSON file a problem, named by everything that the answer depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
import stat
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kernels.search.problem import Problem
    from kernels.search.run import SearchResult

SOURCES = ("*.py", "*.cpp", "*.h")

RESULT_BYTES_MAX = 1 << 20
"""Largest file that is read as a result: some hundred bytes a variant are usual."""


class SearchStore:
    """A folder of results.

    Args:
        folder: Made when the first result is written.
        device: The machine in words; default its processor or CUDA device, and the threads of torch.
    """

    def __init__(self, folder: Path, device: str | None = None) -> None:
        self._folder = folder
        self._device = device or device_name()

    def path(self, problem: Problem) -> Path:
        """Return the file of a problem."""
        return self._folder / f"{problem.op}-{problem.key(self._device, versions())}.json"

    def read(self, problem: Problem) -> SearchResult | None:
        """Return what an earlier search found; None when there was none or its file is damaged."""
        try:
            return _result(_document(self.path(problem)), problem)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return None

    def write(self, problem: Problem, result: SearchResult) -> None:
        """Keep a result, whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        held: dict[str, Any] = {**dataclasses.asdict(result), "device": self._device, "versions": versions()}
        del held["cached"], held["beside_us"]
        with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(held, file, indent=1, sort_keys=True)
        Path(file.name).chmod(0o644)  # a temporary file is its maker's alone
        Path(file.name).replace(self.path(problem))


def _document(path: Path) -> dict[str, Any]:
    status = path.stat()
    # A pipe or a device would be read for ever.
    if not stat.S_ISREG(status.st_mode) or status.st_size > RESULT_BYTES_MAX:
        raise ValueError(f"{path} must be a regular file of at most {RESULT_BYTES_MAX} bytes")
    held = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(held, dict):
        raise TypeError(f"{path} must hold an object, holds {type(held).__name__}")
    return held


def _result(held: dict[str, Any], problem: Problem) -> SearchResult:
    """Return the result in a document.

    Raises:
        ValueError: it is not one that ``search`` writes for this problem.
        KeyError: a part is missing.
        TypeError: a part is of another kind.
        OverflowError: a number is too large for a float.
    """
    from kernels.search.run import Outcome, SearchResult

    outcomes = tuple(Outcome(**each) for each in held["outcomes"])
    for each in outcomes:
        if not all(isinstance(text, str) for text in (each.variant, each.fate, each.detail)):
            raise TypeError("variant, fate and detail must be text")
        if (each.time_us is not None and not 0 < _number(each.time_us) < math.inf) or (
            each.error is not None and not _number(each.error) >= 0
        ):
            raise ValueError(f"{each.variant} must have a finite time above 0 and an error of at least 0")
    chosen = [each for each in outcomes if each.fate == "chosen"]
    if (held["op"], held["shape"], held["dtype"]) != (problem.op, problem.shape, problem.dtype):
        raise ValueError("it is of another problem")
    if [each.variant for each in outcomes] != [variant.name for variant in problem.variants]:
        raise ValueError("it has other variants")
    if [each.variant for each in chosen] != [held["winner"]] or chosen[0].time_us is None:
        raise ValueError("it has no winner, or several")
    if not _number(chosen[0].error) <= problem.tolerance:
        raise ValueError("its winner is wrong")
    return SearchResult(problem.op, dict(problem.shape), problem.dtype, held["winner"], outcomes, cached=True)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"must be a number, is {type(value).__name__}")
    return float(value)


def device_name() -> str:
    """Return the machine in words: processor, threads of torch, and the GPU where there is one."""
    model = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    wanted = {"model name": "", "cpu family": "", "model": ""}
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in wanted and not wanted[name.strip()]:
            wanted[name.strip()] = value.strip()
    if wanted["model name"]:
        model = f"{wanted['model name']} (family {wanted['cpu family']} model {wanted['model']})"
    devices = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return ", ".join([model, f"{torch.get_num_threads()} threads", *devices])


@cache
def versions() -> dict[str, str]:
    """Return what else decides a result: the libraries, and a digest of this package's own source."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for pattern in SOURCES:
        for path in sorted(root.rglob(pattern)):
            digest.update(path.read_bytes())
    return {"torch": torch.__version__, "kernels": digest.hexdigest()[:16]}
