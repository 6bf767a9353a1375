"""Which execution of a network is fastest on this machine: asked of the kernel search once, when weights are published.

The variants are the training modules and the packed stacks that the wanted precision allows. Each is held against the
modules in float32 before it is timed (``kernels.search``); the answer is kept on disk by the model's sizes, machine,
threads, native library and source, and replicas whose backend is ``auto`` take it from there. The golden request checks
every version's own weights again when a replica starts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.native import status
from kernels.search import Problem, SearchResult, SearchStore, UnavailableVariantError, Variant, search
from kernels.search.problem import Inputs, Solve
from models.config import RankerConfig
from models.execution import FusedNetwork, executed
from models.execution_config import REFERENCE, Execution, PrecisionChoice
from models.layers.layout import CandidateLayout
from models.network import RankingNetwork
from models.oracle import tolerance
from models.random_request import random_candidates, random_state
from shared.errors import ConfigError

NUM_CANDIDATES = 504
"""Candidates of the timed pass: a usual head, and a multiple of 8, to which stations pad."""

SCALE = 4.0
"""Of a logit's tolerance over a score's, which a sigmoid has damped: what passes here passes the golden request."""

_SOURCES = ("execution.py", "network.py", "wukong.py", "heads.py", "layers")
"""What the variants are made of beside the kernels: a change there asks for a new search."""


def executions_of(precision: PrecisionChoice) -> list[Execution]:
    """Return what may run a network in a precision, the modules first."""
    found = [REFERENCE, Execution("torch", "float32", "")]
    if precision != "float32":
        low = [Execution("torch", "bfloat16", ""), Execution("native", "bfloat16", "")]
        return [*found, *low] if precision == "auto" else low
    return found


def execution_problem(
    config: RankerConfig, precision: PrecisionChoice, network: RankingNetwork | None = None
) -> Problem:
    """Return the full pass of a model as a problem.

    Args:
        config: The model.
        precision: What is allowed.
        network: Its network; None: the problem can only be looked up, not searched.
    """
    sizes = hashlib.sha256(config.model_dump_json(exclude={"objective_weights", "tiers"}).encode()).hexdigest()

    def built(execution: Execution) -> Callable[[], Solve]:
        def build() -> Solve:
            if execution.backend == "native" and not (found := status()).available:
                raise UnavailableVariantError(found.reason)
            try:
                runs = executed(_given(network), execution)
            except ConfigError as error:
                raise UnavailableVariantError(error.message) from error
            return _full_pass(runs, _given(network))

        return build

    def inputs(seed: int) -> Inputs:
        return random_candidates(config, NUM_CANDIDATES, torch.Generator().manual_seed(seed))[:2]

    def truth(pooled: Tensor, counters: Tensor) -> Tensor:
        return _full_pass(_given(network), _given(network))(pooled, counters)

    allowed = "float32" if precision == "float32" else "bfloat16"
    variants = [Variant(each.name, built(each)) for each in executions_of(precision)]
    shape = {
        "candidates": NUM_CANDIDATES,
        "layers": config.num_layers,
        "width": config.width,
        "sizes": int(sizes[:8], 16),
        "source": int(_source_digest(), 16),
        "native": int(status().available),
    }
    return Problem("full_pass", shape, precision, inputs, truth, SCALE * tolerance(config, allowed), variants)


def tune(network: RankingNetwork, precision: PrecisionChoice, folder: Path) -> SearchResult:
    """Search for the fastest execution of a network, or read what an earlier search found.

    Args:
        network: The network, float32.
        precision: What is allowed.
        folder: Where results are kept.

    Raises:
        ValueError: nothing runs the network as its modules do.
    """
    with torch.inference_mode():
        return search(execution_problem(network.config, precision, network), SearchStore(folder))


def tuned_execution(config: RankerConfig, precision: PrecisionChoice, folder: Path) -> Execution | None:
    """Return what a search on this machine chose for a model; None when there was none.

    A later library, another number of threads or changed kernels count as another machine.
    """
    known = SearchStore(folder).read(execution_problem(config, precision))
    if known is None:
        return None
    times = {each.variant: each.time_us for each in known.outcomes if each.time_us is not None}
    others = ", ".join(f"{name} {time_us / 1e3:.2f}" for name, time_us in times.items() if name != known.winner)
    reason = f"search: {times[known.winner] / 1e3:.2f} ms for {NUM_CANDIDATES} candidates"
    for each in executions_of(precision):
        if each.name == known.winner:
            return Execution(each.backend, each.precision, f"{reason}; {others}" if others else reason)
    return None


@cache
def _source_digest() -> str:
    digest, folder = hashlib.sha256(), Path(__file__).parent
    for name in _SOURCES:
        path = folder / name
        for each in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(each.read_bytes())
    return digest.hexdigest()[:8]


def _given(network: RankingNetwork | None) -> RankingNetwork:
    if network is None:
        raise ValueError("network must be given to search; without it results can only be looked up")
    return network


def _full_pass(runs: RankingNetwork | FusedNetwork, network: RankingNetwork) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the full pass of candidates of one request with a full history, whose state is made once."""
    state = random_state(network, torch.Generator().manual_seed(0))
    layout = CandidateLayout.single(NUM_CANDIDATES)
    return lambda pooled, counters: runs.full_pass(state, pooled, counters, None, None, layout)
