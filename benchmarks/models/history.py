"""Benchmark ``history``: encoding a user's events anew, extending a kept state, and what length and CompSkip cost.

One thread, random weights, with the kernels that this machine would choose, in bfloat16 where it can:

* ``append_speedup``: 8 events behind a kept state of 2,048, against encoding all of them; the events' part alone.
  ``request_speedup`` is the whole request side, which also turns all keys to the request's time and asks them.
* ``cached_request_ratio``: a request of 100 candidates with a kept state and 8 new events, over one without.
* ``length_exponent``: slope of time over length on a log scale, block attention; ``full_attention_exponent`` with one
  block as long as the history.
* ``compskip_flops_cut``: share of the encoder's FLOPs that taking turns saves, counted.
* ``long_history_bytes``: peak memory of encoding 25 times the default length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.harness import interleaved, measure
from benchmarks.models.sharing import peak_bytes
from benchmarks.models.subject import LARGE
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from models.config import EncoderConfig, RankerConfig
from models.execution import FusedNetwork, choose_execution
from models.execution_config import Execution
from models.flops import request_flops
from models.kunlun import Window
from models.layers.layout import CandidateLayout
from models.network import RankingNetwork
from models.random_request import RequestSide, random_candidates, random_requests
from models.sequence_encoder import Ages, EncodedLayer, Events
from shared.clock import SystemClock
from shared.config import load_config

LENGTH, NUM_NEW, NUM_CANDIDATES = 2_048, 8, 100
LENGTHS, QUICK_LENGTHS = (256, 512, 1_024, 2_048, 4_096, 8_192), (256, 1_024, 4_096)
BLOCK, WINDOW_BLOCKS = 128, 2
LONG_FACTOR = 25
ROUNDS, QUICK_ROUNDS, NUM_WARMUP = 15, 3, 2

CONFIG = RankerConfig(
    width=128,
    history_length=LENGTH * LONG_FACTOR,
    num_layers=4,
    encoder=EncoderConfig(
        num_events=LENGTH * LONG_FACTOR, block=BLOCK, window_blocks=WINDOW_BLOCKS, feed_forward_width=256
    ),
)
"""The encoder of the first parts: four layers of width 128."""


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Measure all parts."""
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        execution = choose_execution()
        if execution.backend == "reference":
            execution = Execution("torch", "float32", "")
        base: dict[str, Param] = {"execution": f"{execution.backend} {execution.precision}", "threads": 1}
        with torch.inference_mode():
            figures = [
                *_append(execution, options.seed, rounds, base),
                *_request(execution, options.seed, rounds, base),
                *_lengths(execution, options.seed, rounds, QUICK_LENGTHS if options.quick else LENGTHS, base),
                *_flops(),
                *_long(execution, options.seed, base),
            ]
    finally:
        torch.set_num_threads(threads)
    return BenchmarkReport(tuple(figures), CONFIG.digest())


def cut(request: RequestSide, first: int, last: int) -> tuple[Events, Ages]:
    """Return some of a request's events, and how long ago they are."""
    _, events, ages, _, _ = request
    columns = (events.items, events.weight_buckets, events.pause_buckets, events.clock)
    return Events(*(column[:, first:last] for column in columns)), Ages(ages.log_gaps[:, first:last], None)


def next_window(encoded: list[EncodedLayer], count: int, config: EncoderConfig) -> list[Window]:
    """Return what events behind the first ``count`` see in each layer's self-attention."""
    first = max(count // config.block - config.window_blocks + 1, 0) * config.block
    return [None if each.window is None else (each.window[0][:, first:], each.window[1][:, first:]) for each in encoded]


class Kept:
    """A network, a request, and the state of its first events.

    Args:
        network: Encodes.
        request: One request.
        length: Events whose state is kept.
    """

    def __init__(self, network: FusedNetwork, request: RequestSide, length: int) -> None:
        self.network = network
        self.features, _, _, self.dense, self.taste = request
        self._all, self._ages = cut(request, 0, length + NUM_NEW)
        known, _ = cut(request, 0, length)
        self._new, _ = cut(request, length, length + NUM_NEW)
        self._length = length
        encoded = network.encode_events(self.features, known, None, 0)
        self._before = next_window(encoded, length, network.config.encoder)
        self._personal = [each.personal for each in encoded]
        # Rows with room behind, as a kept state has.
        self._rows = [
            tuple(torch.cat([rows, rows[:, :NUM_NEW]], dim=1) for rows in (each.keys, each.values)) for each in encoded
        ]

    def anew(self) -> list[tuple[Tensor, Tensor]]:
        """Encode all events."""
        encoded = self.network.encode_events(self.features, self._all, None, 0)
        return [(each.keys, each.values) for each in encoded]

    def appended(self) -> list[tuple[Tensor, Tensor]]:
        """Encode the new events alone, and put them behind the others."""
        encoded = self.network.encode_events(self.features, self._new, self._before, self._length, self._personal)
        for (keys, values), made in zip(self._rows, encoded, strict=True):
            keys[:, self._length :] = made.keys
            values[:, self._length :] = made.values
        return [(keys, values) for keys, values in self._rows]

    def request(self, events: Callable[[], list[tuple[Tensor, Tensor]]]) -> dict[str, Tensor]:
        """Compute the whole request side."""
        return self.network.finish(self.features, events(), self._ages, self.dense, self.taste)


def _network(config: RankerConfig, execution: Execution, seed: int) -> FusedNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FusedNetwork(RankingNetwork(config).requires_grad_(False).eval(), execution)


def _kept(config: RankerConfig, execution: Execution, seed: int) -> Kept:
    request = random_requests(config, torch.Generator().manual_seed(seed), length=LENGTH + NUM_NEW)
    return Kept(_network(config, execution, seed), request, LENGTH)


def _append(execution: Execution, seed: int, rounds: int, base: dict[str, Param]) -> list[Measurement]:
    kept = _kept(CONFIG, execution, seed)
    calls: dict[str, Callable[[], object]] = {
        "anew": kept.anew,
        "append": kept.appended,
        "request_anew": partial(kept.request, kept.anew),
        "request_append": partial(kept.request, kept.appended),
    }
    found = interleaved(calls, rounds, NUM_WARMUP, seed, SystemClock())
    params: dict[str, Param] = {**base, "events": LENGTH, "new": NUM_NEW, "layers": CONFIG.num_layers, "width": 128}
    return [
        measure("append_speedup", found["anew"] / found["append"], "p50", "1", **params),
        measure("request_speedup", found["request_anew"] / found["request_append"], "p50", "1", **params),
        *(measure(f"{name}_ms", values, "p50", "ms", **params) for name, values in found.items()),
    ]


def _request(execution: Execution, seed: int, rounds: int, base: dict[str, Param]) -> list[Measurement]:
    config = load_config(RankerConfig, LARGE, {})
    kept = _kept(config, execution, seed)
    pooled, counters, _ = random_candidates(config, NUM_CANDIDATES, torch.Generator().manual_seed(seed))
    layout = CandidateLayout.single(NUM_CANDIDATES)

    def rank(events: Callable[[], list[tuple[Tensor, Tensor]]]) -> Tensor:
        state = kept.request(events)
        return kept.network.full_pass(state, pooled, counters, None, None, layout)

    calls: dict[str, Callable[[], object]] = {"anew": partial(rank, kept.anew), "cached": partial(rank, kept.appended)}
    found = interleaved(calls, rounds, NUM_WARMUP, seed, SystemClock())
    params: dict[str, Param] = {
        **base,
        "events": LENGTH,
        "new": NUM_NEW,
        "candidates": NUM_CANDIDATES,
        "model": "large",
    }
    return [
        measure("cached_request_ratio", found["cached"] / found["anew"], "p50", "1", **params),
        *(measure(f"rank_{name}_ms", values, "p50", "ms", **params) for name, values in found.items()),
    ]


def _lengths(
    execution: Execution, seed: int, rounds: int, lengths: tuple[int, ...], base: dict[str, Param]
) -> list[Measurement]:
    request = random_requests(CONFIG, torch.Generator().manual_seed(seed), length=max(lengths))
    calls: dict[str, Callable[[], object]] = {}
    for length in lengths:
        whole = CONFIG.encoder.model_copy(update={"block": length, "window_blocks": 1})
        for name, encoder in (("block", CONFIG.encoder), ("full", whole)):
            network = _network(CONFIG.model_copy(update={"encoder": encoder}), execution, seed)
            events, _ = cut(request, 0, length)
            calls[f"{name}/{length}"] = partial(network.encode_events, request[0], events, None, 0)
    found = interleaved(calls, max(rounds // 3, 2), 1, seed, SystemClock())
    params: dict[str, Param] = {**base, "lengths": ",".join(map(str, lengths)), "block": BLOCK, "window": WINDOW_BLOCKS}
    figures = []
    for metric, name in (("length_exponent", "block"), ("full_attention_exponent", "full")):
        times = [float(np.median(found[f"{name}/{length}"])) for length in lengths]
        figures.append(Measurement(metric, round(_slope(lengths, times), 4), "1", params=params))
    return figures + [
        measure(f"encode_ms_{name.replace('/', '_')}", x, "p50", "ms", **base) for name, x in found.items()
    ]


def _slope(lengths: tuple[int, ...], times: list[float]) -> float:
    logs: npt.NDArray[np.float64] = np.log(np.array([lengths, times], np.float64))
    return float(np.polyfit(logs[0], logs[1], 1)[0])


def _flops() -> list[Measurement]:
    config = load_config(RankerConfig, LARGE, {})
    every = config.model_copy(update={"encoder": config.encoder.model_copy(update={"comp_skip": False})})
    with_turns, without = (request_flops(each, each.encoder.num_tokens)["encoder"] for each in (config, every))
    params: dict[str, Param] = {"model": "large", "flops": with_turns, "flops_without": without}
    return [Measurement("compskip_flops_cut", round(1 - with_turns / without, 4), "1", params=params)]


def _long(execution: Execution, seed: int, base: dict[str, Param]) -> list[Measurement]:
    length = LENGTH * LONG_FACTOR
    network = _network(CONFIG, execution, seed)
    features, events, ages, dense, taste = random_requests(CONFIG, torch.Generator().manual_seed(seed), length=length)
    encode = partial(network.encode, features, events, ages, dense, taste)
    kept_bytes = sum(value.nbytes for value in encode().values())
    params: dict[str, Param] = {**base, "events": length, "state_bytes": kept_bytes}
    return [Measurement("long_history_bytes", float(peak_bytes(encode)), "B", params=params)]
