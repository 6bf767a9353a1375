"""The packed stack gives what the network gives: to rounding in float32, to its precision in bfloat16."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.native import status
from kernels.tolerance import largest_error, tolerance
from kernels.wukong_layer import Backend
from models.candidate_stack import CandidateStack
from models.config import GroupConfig, RankerConfig
from models.inputs import COUNTER_FEATURES, DENSE_FEATURES, NUM_GAP_BUCKETS, NUM_WEIGHT_BUCKETS
from models.layers.layout import CandidateLayout
from models.network import RankingNetwork, State
from models.random_weights import TINY
from models.simplify import simplify

_CONFIG = TINY.model_copy(
    update={
        "width": 16,
        "candidate_group": GroupConfig(
            num_queries=2, num_mixtures=4, num_mlp_tokens=3, num_linear_tokens=3, hidden_width=32
        ),
    }
)
_LENGTH = 5


def _network(config: RankerConfig) -> RankingNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return RankingNetwork(config).requires_grad_(False).eval()


def _inputs(
    network: RankingNetwork, num_requests: int, num_candidates: int
) -> tuple[State, torch.Tensor, torch.Tensor]:
    config, random = network.config, torch.Generator().manual_seed(1)
    state = network.encode(
        torch.randn(num_requests, len(config.request_features), config.width, generator=random),
        torch.randn(num_requests, _LENGTH, config.width, generator=random),
        torch.randint(NUM_WEIGHT_BUCKETS, (num_requests, _LENGTH), generator=random),
        torch.randint(NUM_GAP_BUCKETS, (num_requests, _LENGTH), generator=random),
        torch.rand(num_requests, _LENGTH, generator=random) < 0.7,
        torch.randn(num_requests, len(DENSE_FEATURES), generator=random),
    )
    pooled = torch.randn(num_candidates, len(config.candidate_features), config.width, generator=random)
    return state, pooled, torch.randn(num_candidates, len(COUNTER_FEATURES), generator=random)


def _error(network: RankingNetwork, depth: int, backend: Backend, dtype: torch.dtype, num_requests: int = 3) -> float:
    state, pooled, counters = _inputs(network, num_requests, 40)
    layout = CandidateLayout.of(torch.arange(40) % num_requests, num_requests)
    expected = network.full_pass(state, pooled, counters, None, None, layout, depth)
    stack = CandidateStack(network, depth, backend, dtype)
    found = stack.full_pass(state, stack.give(state), pooled, counters, None, None, layout)
    assert found.dtype == torch.float32
    return largest_error(found, expected)


def _limit(network: RankingNetwork, dtype: torch.dtype, depth: int) -> float:
    sizes = network.config.layer_sizes
    longest = max(max(layer.candidate.num_products, layer.candidate.hidden_width) for layer in sizes)
    # About eight values a layer are stored on the way to a token.
    return tolerance(dtype, longest, roundings=8 * depth)


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_float32_is_the_network(backend: Backend, depth: int, num_requests: int) -> None:
    network = _network(_CONFIG)
    assert _error(network, depth, backend, torch.float32, num_requests) <= 8 * _limit(network, torch.float32, depth)


@pytest.mark.parametrize("depth", [1, 2])
def test_native_is_the_network_to_bfloat16(depth: int) -> None:
    if not (found := status()).available:
        pytest.skip(found.reason)
    network = _network(_CONFIG)
    assert _error(network, depth, "native", torch.bfloat16) <= _limit(network, torch.bfloat16, depth)


def test_a_simplified_network_has_a_stack_too() -> None:
    network = _network(_CONFIG)
    width = network.config.width
    network.get_submodule("layers.1.candidate.down").get_parameter("weight")[:width] = 0
    network.get_submodule("layers.0.candidate").get_parameter("linear")[1] = 0
    network.get_submodule("layers.0").get_parameter("cross_linear")[1] = 0

    def run(each: RankingNetwork) -> None:
        state, pooled, counters = _inputs(each, 20, 100)
        each.all_exits(state, pooled, counters, None, None, CandidateLayout.of(torch.arange(100) % 20, 20))

    small = simplify(network, run).network
    assert [layer.candidate.num_residual_tokens for layer in small.config.layer_sizes] == [1, 1]
    # The stack's norm has the plain epsilon, which differs where a simplified norm counts products that are gone.
    error = _error(small, 2, "reference", torch.float32)
    assert error <= 8 * _limit(small, torch.float32, 2)


def test_what_is_refused() -> None:
    with pytest.raises(KeyError):
        CandidateStack(_network(_CONFIG), 3, "reference", torch.float32)
    with pytest.raises(ValueError, match="bias"):
        CandidateStack(_network(_CONFIG.model_copy(update={"bias": True})), 1, "reference", torch.float32)
    assert math.isfinite(_error(_network(_CONFIG), 1, "torch", torch.bfloat16))
