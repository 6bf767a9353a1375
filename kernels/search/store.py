"""Results of searches on disk: one JSON file a problem, named by everything that the answer depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kernels.search.problem import Problem
    from kernels.search.run import SearchResult

SOURCES = ("*.py", "*.cpp", "*.h")


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
        from kernels.search.run import Outcome, SearchResult

        try:
            held = json.loads(self.path(problem).read_text(encoding="utf-8"))
            outcomes = tuple(Outcome(**each) for each in held["outcomes"])
            result = SearchResult(held["op"], held["shape"], held["dtype"], held["winner"], outcomes, cached=True)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        chosen = [
            each.variant
            for each in outcomes
            if each.fate == "chosen" and isinstance(each.time_us, (int, float)) and each.time_us > 0
        ]
        known = {variant.name for variant in problem.variants}
        return result if chosen == [result.winner] and result.winner in known else None

    def write(self, problem: Problem, result: SearchResult) -> None:
        """Keep a result, whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        held: dict[str, Any] = {**dataclasses.asdict(result), "device": self._device, "versions": versions()}
        del held["cached"], held["beside_us"]
        with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(held, file, indent=1, sort_keys=True)
        Path(file.name).chmod(0o644)  # a temporary file is its maker's alone
        Path(file.name).replace(self.path(problem))


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
