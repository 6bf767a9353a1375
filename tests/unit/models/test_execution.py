"""Packed execution answers as the modules do, within what its dtype allows, and says what it is."""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from kernels import native
from models.config import EncoderConfig, GroupConfig, RankerConfig, TierConfig
from models.execution import FusedNetwork, choose_execution, executed
from models.execution_config import REFERENCE, Execution, ExecutionConfig
from models.inputs import COUNTER_FEATURES
from models.layers.layout import CandidateLayout
from models.network import NUM_LEVELS, RankingNetwork, State
from models.oracle import tolerance
from models.random_request import RequestSide, random_requests
from models.simplify import simplify
from models.wukong import InteractionLayer
from shared.errors import ConfigError

NUM_CANDIDATES = 56
CONFIG = RankerConfig(
    width=32,
    history_length=21,
    num_layers=3,
    encoder=EncoderConfig(num_events=21, block=4, num_summaries=3, num_heads=2, feed_forward_width=24),
    request_group=GroupConfig(num_queries=2, num_mixtures=5, num_mlp_tokens=3, num_linear_tokens=2, hidden_width=17),
    candidate_group=GroupConfig(num_queries=2, num_mixtures=7, num_mlp_tokens=4, num_linear_tokens=3, hidden_width=41),
    head_width=19,
    tiers={
        "light": TierConfig(head_max=0),
        "standard": TierConfig(head_max=100, num_layers=1),
        "full": TierConfig(head_max=100),
    },
)
EXECUTIONS = [
    Execution("torch", "float32", ""),
    Execution("torch", "bfloat16", ""),
    pytest.param(
        Execution("native", "bfloat16", ""),
        marks=pytest.mark.skipif(not native.status().available, reason=native.status().reason or "native"),
    ),
]


@pytest.fixture(scope="module")
def network() -> RankingNetwork:
    torch.manual_seed(3)
    network = RankingNetwork(CONFIG).requires_grad_(False).eval()
    for parameter in network.parameters():
        parameter.data += 0.3 * parameter.shape[-1] ** -0.5 * torch.randn(parameter.shape)
    return network


@dataclasses.dataclass(frozen=True)
class Inputs:
    requests: RequestSide
    pooled: Tensor
    counters: Tensor
    speculative: Tensor
    levels: Tensor

    def encode(self, network: RankingNetwork | FusedNetwork) -> State:
        return network.encode(*self.requests)

    def rank(
        self,
        network: RankingNetwork | FusedNetwork,
        state: State,
        layout: CandidateLayout,
        depth: int,
        chosen: slice,
        first: Tensor | None = None,
    ) -> Tensor:
        return network.full_pass(
            state,
            self.pooled[chosen],
            self.counters[chosen],
            self.speculative[chosen],
            self.levels[chosen],
            layout,
            depth,
            None if first is None else first[chosen],
        )


def inputs(num_requests: int, seed: int = 0) -> Inputs:
    torch.manual_seed(seed)
    length, levels = CONFIG.encoder.num_events, torch.randint(0, NUM_LEVELS, (NUM_CANDIDATES,))
    mask = None if num_requests == 1 else torch.arange(length) < torch.randint(0, length + 1, (num_requests, 1))
    return Inputs(
        random_requests(CONFIG, batch=num_requests, mask=mask),
        torch.randn(NUM_CANDIDATES, len(CONFIG.candidate_features), CONFIG.width),
        torch.randn(NUM_CANDIDATES, len(COUNTER_FEATURES)),
        torch.randn(NUM_CANDIDATES, CONFIG.speculative_width) * (levels > 0)[:, None],
        levels,
    )


def limit(execution: Execution, expected: Tensor) -> float:
    """Return the oracle's tolerance of probabilities, which a sigmoid has damped by 4, on the scale of these logits."""
    return 4 * tolerance(CONFIG, execution.precision) * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("depth", CONFIG.exits)
@torch.inference_mode()
def test_packed_execution_equals_the_modules(
    network: RankingNetwork, execution: Execution, num_requests: int, depth: int
) -> None:
    given = inputs(num_requests)
    layout = CandidateLayout.of(torch.arange(NUM_CANDIDATES) % num_requests, num_requests)
    fused = executed(network, execution)
    expected = given.rank(network, given.encode(network), layout, depth, slice(None))
    found = given.rank(fused, given.encode(fused), layout, depth, slice(None))
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) <= limit(execution, expected)


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
@torch.no_grad()
def test_a_simplified_network_runs_packed_too(network: RankingNetwork, execution: Execution) -> None:
    """Its layers differ in size, some of its tokens are residuals alone, and its norms count products that are gone."""
    planted = RankingNetwork(CONFIG)
    planted.load_state_dict(network.state_dict())
    for layer in planted.layers:
        block = cast(InteractionLayer, layer).candidate
        block.mixtures[2] = 0.0
        cast(InteractionLayer, layer).cross_mixtures[2] = 0.0
        block.down.weight[: CONFIG.width] = 0.0
    given, layout = inputs(1), CandidateLayout.single(NUM_CANDIDATES)

    def run(each: RankingNetwork) -> None:
        each.all_depths(given.encode(each), given.pooled, given.counters, given.speculative, given.levels, layout)

    smaller = simplify(planted.eval(), run).network.eval()
    own = [sizes.candidate for sizes in smaller.config.layer_sizes]
    assert any(each.num_products_counted > each.num_products for each in own)
    fused = executed(smaller, execution)
    expected = given.rank(smaller, given.encode(smaller), layout, CONFIG.num_layers, slice(None))
    found = given.rank(fused, given.encode(fused), layout, CONFIG.num_layers, slice(None))
    assert float((found - expected).abs().max()) <= limit(execution, expected)


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
@torch.inference_mode()
def test_speculative_embeddings_too(network: RankingNetwork, execution: Execution) -> None:
    given, layout = inputs(1), CandidateLayout.single(NUM_CANDIDATES)
    fused = executed(network, execution)
    expected = network.embed(given.encode(network), given.pooled, given.counters, layout)
    found = fused.embed(given.encode(fused), given.pooled, given.counters, layout)
    assert float((found - expected).abs().max()) <= limit(execution, expected)


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
@torch.inference_mode()
def test_scores_have_the_same_bits_in_any_batch_and_with_any_threads(
    network: RankingNetwork, execution: Execution
) -> None:
    given, fused = inputs(1), executed(network, execution)
    state, layout = given.encode(fused), CandidateLayout.single(NUM_CANDIDATES)
    # As the stations do: the first pass has run over all candidates before some of them get the full one.
    first = fused.first_pass(state, given.pooled, given.counters, layout)
    whole = given.rank(fused, state, layout, 3, slice(None), first)
    # In float32, stock torch's products need row counts that are multiples of 8; the stations pad to that.
    parts = [(0, 8), (8, 32), (32, 56)] if execution.precision == "float32" else [(0, 1), (7, 8), (3, 24), (24, 53)]
    for begin, end in parts:
        part = given.rank(fused, state, CandidateLayout.single(end - begin), 3, slice(begin, end), first)
        assert torch.equal(part, whole[begin:end]), (begin, end)
    if execution.precision == "float32":
        return  # MKL's float32 sums differ in the last bit between one thread and two
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(given.rank(fused, state, layout, 3, slice(None), first), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("execution", [REFERENCE, *EXECUTIONS], ids=str)
@pytest.mark.parametrize("num_requests", [1, 3])
@torch.inference_mode()
def test_an_exit_adds_to_the_first_pass(network: RankingNetwork, execution: Execution, num_requests: int) -> None:
    given, runs = inputs(num_requests), executed(network, execution)
    layout = CandidateLayout.of(torch.arange(NUM_CANDIDATES) % num_requests, num_requests)
    state = given.encode(runs)
    first = runs.first_pass(state, given.pooled, given.counters, layout)
    for depth in CONFIG.exits:
        alone = given.rank(runs, state, layout, depth, slice(None))
        assert torch.equal(given.rank(runs, state, layout, depth, slice(None), first), alone)
        assert float((alone - first).abs().max()) > 0.1
        own = given.rank(runs, state, layout, depth, slice(None), torch.zeros_like(first))
        assert torch.equal(first + own, alone)


@torch.inference_mode()
def test_all_depths_at_once_are_the_passes_one_by_one(network: RankingNetwork) -> None:
    given = inputs(3)
    layout = CandidateLayout.of(torch.arange(NUM_CANDIDATES) % 3, 3)
    state = given.encode(network)
    both = (given.pooled, given.counters)
    found, _ = network.all_depths(state, *both, given.speculative, given.levels, layout)
    assert list(found) == list(CONFIG.depths)
    assert torch.equal(found[0], network.first_pass(state, *both, layout))
    for depth in CONFIG.exits:
        assert torch.equal(found[depth], given.rank(network, state, layout, depth, slice(None)))


@torch.inference_mode()
def test_scores_in_float32_are_finer_than_bfloat16(network: RankingNetwork) -> None:
    """A thousand candidates must not fall into a few hundred distinct scores."""
    given, fused = inputs(1), executed(network, Execution("torch", "bfloat16", ""))
    logits = given.rank(fused, given.encode(fused), CandidateLayout.single(NUM_CANDIDATES), 3, slice(None))
    assert len(np.unique(logits.numpy())) > len(np.unique(logits.bfloat16().float().numpy()))


def test_a_choice_is_kept_or_refused() -> None:
    assert choose_execution("reference", "float32") == REFERENCE
    assert choose_execution("torch", "bfloat16") == Execution("torch", "bfloat16", "as configured")
    with pytest.raises(ConfigError, match="float32 only"):
        choose_execution("reference", "bfloat16")


@pytest.mark.parametrize(("backend", "only"), [("native", "bfloat16"), ("reference", "float32")])
def test_a_configuration_that_nothing_can_run_is_refused_when_read(backend: str, only: str) -> None:
    other = "float32" if only == "bfloat16" else "bfloat16"
    with pytest.raises(ValidationError, match=f"precision of backend {backend} must be {only} or auto, is {other}"):
        ExecutionConfig.model_validate({"backend": backend, "precision": other})
    for precision in (only, "auto"):
        assert ExecutionConfig.model_validate({"backend": backend, "precision": precision}).precision == precision


def test_without_the_library_auto_is_torch_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = native.NativeStatus(False, "the processor or the system lacks avx512_bf16", None)
    monkeypatch.setattr("models.execution.status", lambda: lacking)
    chosen = choose_execution("auto", "float32")
    assert (chosen.backend, chosen.precision) == ("torch", "float32")
    assert "lacks avx512_bf16" in chosen.reason
    with pytest.raises(ConfigError, match="lacks avx512_bf16"):
        choose_execution("native", "auto")


@pytest.mark.parametrize(("bf16", "fp32", "precision"), [(1.0, 200.0, "float32"), (400.0, 200.0, "bfloat16")])
def test_the_probe_decides_the_dtype(monkeypatch: pytest.MonkeyPatch, bf16: float, fp32: float, precision: str) -> None:
    from kernels.packed_linear import DtypeProbe

    monkeypatch.setattr("models.execution.probe_dtypes", lambda: DtypeProbe(bf16, fp32))
    chosen = choose_execution("auto", "auto")
    assert chosen.precision == precision
    assert f"bfloat16 {bf16:.0f}" in chosen.reason


def test_a_network_with_biases_is_refused() -> None:
    network = RankingNetwork(CONFIG.model_copy(update={"bias": True}))
    with pytest.raises(ConfigError, match="biases"):
        executed(network, Execution("torch", "float32", ""))
