"""The formulas against torch's own counter over the same modules, and what sharing saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.config import EncoderConfig, RankerConfig, TierConfig
from models.flops import candidate_flops, ranking_flops, request_flops
from models.inputs import COUNTER_FEATURES
from models.layers.layout import CandidateLayout
from models.network import RankingNetwork
from models.random_request import random_requests
from models.random_weights import TINY
from models.sizes import NetworkSizes

_TIERS = {
    "light": TierConfig(head_max=0),
    "low": TierConfig(head_max=3, num_layers=1),
    "mid": TierConfig(head_max=3, num_layers=2),
    "full": TierConfig(head_max=3),
}
_CONFIGS = {
    "tiny": TINY,
    "default": RankerConfig(),
    "deep": RankerConfig(
        width=16, num_layers=3, request_ratio=1.7, encoder=EncoderConfig(num_heads=4, num_summaries=3), tiers=_TIERS
    ),
    "bias": TINY.model_copy(update={"bias": True}),
}


def _simplified() -> RankerConfig:
    """Return sizes as simplification leaves them: other widths, a token of the residual alone, a residual map."""
    first, second = TINY.layer_sizes
    first = first.model_copy(
        update={"request": first.request.model_copy(update={"hidden_width": 5}), "feed_forward_width": 3}
    )
    candidate = second.candidate.model_copy(
        update={"num_mlp_tokens": 1, "num_residual_tokens": 1, "has_residual_map": True, "hidden_width": 6}
    )
    sizes = NetworkSizes(layers=(first, second.model_copy(update={"candidate": candidate})), head_widths=(7, 3))
    return TINY.model_copy(update={"sizes": sizes})


_CONFIGS["simplified"] = _simplified()


def _counted(run: Any) -> tuple[Any, int]:
    # The plain form of attention: torch's counter has no rule for the fused one of the CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.inference_mode():
        result = run()
    return result, counter.get_total_flops()


def _encode(network: RankingNetwork, num_requests: int, num_events: int) -> dict[str, torch.Tensor]:
    return network.encode(*random_requests(network.config, batch=num_requests, length=num_events))


def _hidden_pairs(config: RankerConfig, num_events: int) -> int:
    """Count what block attention multiplies and a mask then hides, in FLOPs: windows are whole, causal or not."""
    encoder, hidden = config.encoder, 0
    size = encoder.block
    num_blocks = -(-num_events // size)
    seen = sum(t + 1 - max(t // size - encoder.window_blocks + 1, 0) * size for t in range(num_events))
    for layer in range(config.num_layers):
        if encoder.parts(layer).self_attention:
            hidden += num_blocks * size * encoder.window_blocks * size - seen
    return 4 * config.width * hidden


@pytest.mark.parametrize("name", _CONFIGS)
@pytest.mark.parametrize(("num_requests", "num_events", "num_candidates"), [(1, 5, 7), (3, 0, 1), (1, 6, 16)])
def test_formulas_equal_the_counter(name: str, num_requests: int, num_events: int, num_candidates: int) -> None:
    config = _CONFIGS[name]
    network, num_tokens = RankingNetwork(config), num_events + 1
    _, counted = _counted(lambda: _encode(network, num_requests, num_events))
    computed = sum(request_flops(config, num_tokens, num_requests).values())
    assert counted == computed + num_requests * _hidden_pairs(config, num_events)
    state = _encode(network, 1, num_events)
    pooled = torch.randn(num_candidates, len(config.candidate_features), config.width)
    counters = torch.randn(num_candidates, len(COUNTER_FEATURES))
    layout = CandidateLayout.single(num_candidates)
    first, counted = _counted(lambda: network.first_pass(state, pooled, counters, layout))
    assert counted == sum(candidate_flops(config, 0, num_tokens, num_candidates).values())
    vectors = torch.randn(num_candidates, config.speculative_width)
    levels = torch.ones(num_candidates, dtype=torch.int64)
    for depth in config.exits:
        for given in (False, True):
            extra = vectors if given else None
            _, counted = _counted(
                lambda extra=extra, depth=depth: network.full_pass(
                    state, pooled, counters, extra, levels, layout, depth, first
                )
            )
            assert counted == sum(candidate_flops(config, depth, num_tokens, num_candidates, given).values())


def test_a_deeper_exit_costs_more_and_an_unknown_one_is_refused() -> None:
    costs = [sum(candidate_flops(_CONFIGS["deep"], depth, 50).values()) for depth in (0, 1, 2, 3)]
    assert costs == sorted(set(costs))
    with pytest.raises(ValueError, match=r"depth must be one of \(0, 1, 2\), is 3"):
        candidate_flops(TINY, 3, 50)


def test_sharing_never_costs_more_and_is_alike_for_one_candidate() -> None:
    config = RankerConfig()
    one = ranking_flops(config, 2, 52, 1)
    assert one.shared == one.expanded == one.per_pair
    many = ranking_flops(config, 2, 52, 500)
    assert many.shared < many.expanded < many.per_pair
    assert many.shared - one.shared == 499 * sum(sum(candidate_flops(config, depth, 52).values()) for depth in (0, 2))
    two = ranking_flops(config, 2, 52, 500, num_requests=2)
    assert two.shared - many.shared == sum(request_flops(config, 52).values())


def test_the_large_model_is_what_its_file_says() -> None:
    config = RankerConfig.model_validate(yaml.safe_load(Path("configs/model/large.yaml").read_text()))
    num_tokens = config.encoder.num_tokens
    candidate = sum(candidate_flops(config, config.num_layers, num_tokens).values())
    request = sum(request_flops(config, num_tokens).values())
    assert 8e6 <= candidate <= 14e6
    assert 2e9 <= request <= 9e9
    growth = ranking_flops(config, 6, num_tokens, 2000).shared / ranking_flops(config, 6, num_tokens, 100).shared
    assert growth <= 5
