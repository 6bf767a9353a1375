"""Benchmark ``sharing``: a user's part computed once a request, against copying it to candidates or computing it anew.

One run, the same weights, one history of 2,048 events. Forms of the same ranking:

* ``shared``: what is served: request side once, candidate side indexing into it, with the kernels that this machine
  would choose; with the encoding (``uncached``) and without (``cached``);
* ``shared_eager``: the same with the plain modules in the same dtype, so that sharing and kernels can be told apart;
* ``expanded``: the history encoded once, its keys, values and other contributions copied to every candidate;
* ``per_pair``: everything once a candidate; measured on a few and multiplied.

The first layer alone, act(W [u; c]), is measured beside it: split by linearity against the concatenated product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.harness import interleaved, measure, quantiles
from benchmarks.models.subject import Subject
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from kernels.backends import Backend
from kernels.broadcast_gemm import BroadcastGemm
from kernels.native import BroadcastLinear
from kernels.packed_linear import PackedLinear
from models.execution import choose_execution, executed
from models.execution_config import Execution
from models.flops import candidate_flops, ranking_flops
from models.layers.layout import CandidateLayout
from models.network import RankingNetwork, State
from models.wukong import Contributions, InteractionLayer
from shared.clock import SystemClock
from shared.errors import ConfigError

COUNTS = (1, 20, 100, 500, 1_000, 2_000, 4_000)
EXPANDED_COUNTS = (100, 500)
NUM_PAIRS = 8
"""Pairs that the per-pair form is measured on; its time is theirs, multiplied."""

NUM_ROUNDS, NUM_WARMUP = 7, 1
QUICK_ROUNDS, QUICK_COUNTS = 1, (1, 100, 500, 1_000, 2_000)
FIRST_LAYER = {"user": 1_024, "candidate": 256, "hidden": 1_024}
FIRST_LAYER_ROUNDS = 30

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Measure all forms."""
    counts = QUICK_COUNTS if options.quick else COUNTS
    rounds = QUICK_ROUNDS if options.quick else NUM_ROUNDS
    subject = Subject.of(max(counts), options.seed)
    execution = choose_execution()
    forms = Forms(subject, execution)
    base: dict[str, Param] = {
        "execution": f"{execution.backend} {execution.precision}",
        "threads": torch.get_num_threads(),
        "history": subject.config.encoder.num_events,
        "model": "large",
    }
    with torch.inference_mode():
        samples = interleaved(forms.variants(counts), rounds, NUM_WARMUP, options.seed, SystemClock())
        memory = {name: peak_bytes(call) for name, call in forms.memory_variants().items()}
        first = first_layer(options.seed, FIRST_LAYER_ROUNDS if not options.quick else 3)
    figures = [
        *(_line(name, values, base) for name, values in samples.items()),
        *_ratios(samples, base, subject),
        Measurement(
            "peak_memory_ratio", round(memory["shared"] / memory["expanded"], 4), "1",
            params={**base, "candidates": 500, **{f"{name}_bytes": size for name, size in memory.items()}},
        ),
        *first,
    ]  # fmt: skip
    return BenchmarkReport(tuple(figures), subject.config.digest())


class Forms:
    """The forms, ready to be called.

    Args:
        subject: Network and inputs.
        execution: What is served.
    """

    def __init__(self, subject: Subject, execution: Execution) -> None:
        self._subject = subject
        self._dtype = _DTYPES[execution.precision]
        self._served = executed(subject.network, execution)
        self._eager = subject.lowered(self._dtype)
        with torch.inference_mode():
            self._state = self._encode()
            self._eager_state = subject.encode(self._eager, self._dtype)

    def variants(self, counts: tuple[int, ...]) -> dict[str, Callable[[], object]]:
        """Return everything that is timed: ``<form>/<candidates>``."""
        found: dict[str, Callable[[], object]] = {"encode/0": self._encode}
        for number in counts:
            found[f"shared_cached/{number}"] = partial(self._cached, number)
            found[f"shared_uncached/{number}"] = partial(self._uncached, number)
        for number in EXPANDED_COUNTS:
            found[f"shared_eager/{number}"] = partial(self._shared_eager, number)
            found[f"expanded/{number}"] = partial(self._expanded, number)
        found[f"per_pair/{NUM_PAIRS}"] = self._pairs
        return found

    def memory_variants(self) -> dict[str, Callable[[], object]]:
        """Return what memory is measured of, at 500 candidates."""
        return {"shared": lambda: self._cached(500), "expanded": lambda: self._expanded(500, encode=False)}

    def _encode(self) -> State:
        return self._served.encode(*self._subject.request)

    def _cached(self, number: int) -> Tensor:
        pooled, counters, layout = self._subject.candidates(number)
        return self._served.full_pass(self._state, pooled, counters, None, None, layout)

    def _uncached(self, number: int) -> Tensor:
        pooled, counters, layout = self._subject.candidates(number)
        return self._served.full_pass(self._encode(), pooled, counters, None, None, layout)

    def _shared_eager(self, number: int) -> Tensor:
        state = self._subject.encode(self._eager, self._dtype)
        pooled, counters, layout = self._subject.candidates(number, self._dtype)
        return self._eager.full_pass(state, pooled, counters, None, None, layout)

    def _expanded(self, number: int, *, encode: bool = True) -> Tensor:
        state = self._subject.encode(self._eager, self._dtype) if encode else self._eager_state
        pooled, counters, _ = self._subject.candidates(number, self._dtype)
        return expanded_pass(self._eager, state, pooled, counters)

    def _pairs(self) -> None:
        for index in range(NUM_PAIRS):
            state = self._subject.encode(self._eager, self._dtype)
            pooled, counters, _ = self._subject.candidates(index + 1, self._dtype)
            self._eager.full_pass(state, pooled[-1:], counters[-1:], None, None, CandidateLayout.single(1))


def expanded_pass(network: RankingNetwork, state: State, pooled: Tensor, counters: Tensor) -> Tensor:
    """Score C candidates of one request with the request's tensors copied to each of them, layer by layer."""
    number = len(pooled)
    layout = CandidateLayout.of(torch.arange(number), number)
    tokens = network.candidate_tokens(pooled, counters, None, None)
    for index, module in enumerate(network.layers):
        own = Contributions.of(state, index)
        copies = Contributions(**{
            field.name: _copied(getattr(own, field.name), number) for field in fields(Contributions)
        })  # fmt: skip
        tokens = cast(InteractionLayer, module).rank(tokens, copies, None, layout)
    depth = network.config.num_layers
    first = network.first_pass({"first": _copied(state["first"], number)}, pooled, counters, layout)
    return first + network.heads.exit(depth).rank(tokens, _copied(state[f"head{depth}"], number), layout)[0]


def _copied(one: Tensor, number: int) -> Tensor:
    return one.expand(number, *one.shape[1:]).contiguous()


def peak_bytes(call: Callable[[], object]) -> int:
    """Return how much resident memory a call adds at its highest point, bytes.

    Raises:
        ConfigError: the system does not let a process reset its own high-water mark (Linux does).
    """
    call()  # what is allocated once is not what is asked
    ctypes.CDLL(None).malloc_trim(0)  # nor may the call live on what an earlier one gave back to the allocator
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        raise ConfigError(f"peak memory cannot be measured: {error}", field="clear_refs") from error
    before = _status_bytes("VmRSS")
    call()
    return max(_status_bytes("VmHWM") - before, 1)


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1_024
    raise ConfigError(f"/proc/self/status has no {name}", field=name)


def first_layer(seed: int, rounds: int) -> list[Measurement]:
    """Measure relu(W [u; c]) split by linearity against the product with the user copied to each candidate.

    The copied side is the product that is faster here: oneDNN's, or the native one where that runs.
    """
    user, candidate, hidden = FIRST_LAYER["user"], FIRST_LAYER["candidate"], FIRST_LAYER["hidden"]
    execution = choose_execution()
    dtype = _DTYPES[execution.precision]
    weight = torch.randn(hidden, user + candidate).to(dtype)
    backend: Backend = "native" if execution.backend == "native" else "torch"
    gemm = BroadcastGemm(weight[:, user:], weight[:, :user], activation="relu", backend=backend)
    onednn = PackedLinear(weight)
    products: dict[str, Callable[[Tensor], Tensor]] = {"onednn": lambda x: onednn(x, None, "relu")}
    if backend == "native":
        native = BroadcastLinear(weight)
        products["native"] = lambda x: native(x, relu=True)
    x_user = torch.randn(1, user).to(dtype)
    found = []
    for number in (500, 1_000, 2_000):
        x = torch.randn(number, candidate).to(dtype)
        copied = torch.cat([x_user.expand(number, -1), x], dim=1).contiguous()
        calls: dict[str, Callable[[], object]] = {name: partial(call, copied) for name, call in products.items()}
        times = interleaved({"split": partial(gemm.both, x, x_user), **calls}, rounds, 3, seed, SystemClock())
        whole = min(products, key=lambda name: float(np.median(times[name])))
        flop_ratio = number * (user + candidate) / (user + number * candidate)
        found.append(
            measure(
                f"first_layer_flop_share_n{number}",
                times[whole] / times["split"] / flop_ratio,
                "p50",
                "1",
                **FIRST_LAYER,
                flop_ratio=round(flop_ratio, 3),
                backend=backend,
                whole=whole,
                threads=torch.get_num_threads(),
            )
        )
    return found


def _line(name: str, samples: npt.NDArray[np.float64], base: dict[str, Param]) -> Measurement:
    form, _, number = name.partition("/")
    return measure(f"{form}_ms_n{number}", samples, "p50", "ms", **base, candidates=int(number))


def _ratios(samples: dict[str, npt.NDArray[np.float64]], base: dict[str, Param], subject: Subject) -> list[Measurement]:
    def paired(metric: str, over: str, under: str, factor: float = 1.0, **params: Param) -> Measurement:
        """Return the median of the ratios within rounds: both sides of each were measured moments apart."""
        ratios = factor * samples[over] / samples[under]
        spread = quantiles(ratios)
        return Measurement(metric, spread["p50"], "1", spread, len(ratios), {**base, **params})

    config, tokens = subject.config, subject.num_tokens
    flops = ranking_flops(config, config.num_layers, tokens, 1_000)
    return [
        paired("speedup_n500_expanded", "expanded/500", "shared_uncached/500"),
        paired("speedup_n500_expanded_eager", "expanded/500", "shared_eager/500"),
        paired(
            "speedup_n1000_per_pair", f"per_pair/{NUM_PAIRS}", "shared_uncached/1000", 1_000 / NUM_PAIRS,
            pairs_measured=NUM_PAIRS, flop_ratio=round(flops.per_pair / flops.shared, 1),
        ),
        paired("growth_2000_over_100", "shared_uncached/2000", "shared_uncached/100"),
        paired("growth_2000_over_100_cached", "shared_cached/2000", "shared_cached/100"),
        Measurement(
            "candidate_flops", float(sum(candidate_flops(config, config.num_layers, tokens).values())), "FLOP",
            params=base,
        ),
    ]  # fmt: skip
