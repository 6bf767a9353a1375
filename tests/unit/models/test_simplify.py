"""Planted dead units are found and removed, the outputs stay, and the smaller model is served and checked as any."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

from models.calibration import Calibration
from models.config import GroupConfig, RankerConfig, TierConfig
from models.embedding.catalog import ItemCatalog
from models.embedding.vocabulary import Vocabulary
from models.export import export_source, import_ranker
from models.flops import candidate_flops, request_flops
from models.golden import GoldenRequest, add_golden
from models.inputs import COUNTER_FEATURES
from models.layers.layout import CandidateLayout
from models.network import RankingNetwork
from models.random_request import random_requests
from models.random_weights import TINY
from models.simplify import Simplified, num_parameters, simplify
from models.wukong import InteractionLayer
from shared.schema.user import UserHistory
from tests.helpers.weights import random_weights

_GROUP = GroupConfig(num_queries=2, num_mixtures=4, num_mlp_tokens=3, num_linear_tokens=3, hidden_width=12)
_CONFIG = TINY.model_copy(
    update={
        "num_layers": 3,
        "request_group": _GROUP,
        "candidate_group": _GROUP,
        "tiers": {
            "light": TierConfig(head_max=0),
            "standard": TierConfig(head_max=8, num_layers=1),
            "full": TierConfig(head_max=8),
        },
    }
)


_REQUESTS = 40


def _layer(network: RankingNetwork, index: int) -> InteractionLayer:
    return cast(InteractionLayer, network.layers[index])


def _dead_hidden(network: RankingNetwork) -> None:
    _layer(network, 1).candidate.up.weight[3] = 0
    _layer(network, 1).cross_up.weight[3] = 0
    _layer(network, 0).request.up.weight[:5] = 0


def _dead_mixture(network: RankingNetwork) -> None:
    _layer(network, 1).candidate.mixtures[2] = 0
    _layer(network, 1).cross_mixtures[2] = 0
    _layer(network, 2).request.mixtures[0] = 0


def _dead_mlp_part(network: RankingNetwork) -> None:
    width = network.config.width
    _layer(network, 1).candidate.down.weight[width : 2 * width] = 0
    _layer(network, 0).request.down.weight[:width] = 0


def _dead_linear_row(network: RankingNetwork) -> None:
    _layer(network, 2).candidate.linear[1] = 0
    _layer(network, 2).cross_linear[1] = 0
    _layer(network, 1).request.linear[2] = 0


def _dead_tokens(network: RankingNetwork) -> None:
    """The first layer's candidate token 1 and request token 5 are zero; the residual of the next layers pairs them."""
    layer, width = _layer(network, 0), network.config.width
    layer.candidate.down.weight[width : 2 * width] = 0
    layer.request.linear[2] = 0
    for block, token in ((layer.candidate, 1), (layer.request, 5)):
        assert block.residual is not None
        block.residual[token] = 0


def _dead_encoder_and_heads(network: RankingNetwork) -> None:
    feed_forward = network.encoder.layer(2).feed_forward
    assert feed_forward is not None
    feed_forward.values[:4] = 0
    feed_forward.value_mix[:4] = 0
    head = network.heads.exit(3)
    head.hidden.weight[6] = 0
    head.cross.weight[6] = 0


_PLANTED: dict[str, tuple[Callable[[RankingNetwork], None], dict[tuple[str, str], int]]] = {
    "nothing": (lambda _: None, {}),
    "hidden": (_dead_hidden, {("layer 2 candidate", "hidden units"): 1, ("layer 1 request", "hidden units"): 5}),
    "mixture": (
        _dead_mixture,
        {("layer 2 candidate", "mixture columns"): 1, ("layer 3 request", "mixture columns"): 1},
    ),
    "mlp": (
        _dead_mlp_part,
        {("layer 2 candidate", "tokens of the FM block"): 1, ("layer 1 request", "tokens of the FM block"): 1},
    ),
    "linear": (
        _dead_linear_row,
        {("layer 3 candidate", "rows of the linear block"): 1, ("layer 2 request", "rows of the linear block"): 1},
    ),
    "tokens": (
        _dead_tokens,
        {
            ("layer 1 candidate", "tokens of the FM block"): 1,
            ("layer 1 candidate", "output tokens"): 1,
            ("layer 1 request", "rows of the linear block"): 1,
            ("layer 1 request", "output tokens"): 1,
        },
    ),
    "heads": (_dead_encoder_and_heads, {("layer 3 encoder", "hidden units"): 4, ("exit 3 heads", "hidden units"): 1}),
}


def _network(plant: Callable[[RankingNetwork], None]) -> RankingNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        network = RankingNetwork(_CONFIG).requires_grad_(False)
    plant(network)
    return network.eval()


def _outputs(network: RankingNetwork, num_candidates: int = 200, seed: int = 0) -> dict[str, Tensor]:
    """Run everything on random inputs: 40 requests with 5 candidates each."""
    config, random = network.config, torch.Generator().manual_seed(seed)
    length = config.encoder.num_events
    mask = torch.arange(length) < torch.randint(0, length + 1, (_REQUESTS, 1), generator=random)
    state = network.encode(*random_requests(config, random, _REQUESTS, mask))
    pooled = torch.randn(num_candidates, len(config.candidate_features), config.width, generator=random)
    counters = torch.randn(num_candidates, len(COUNTER_FEATURES), generator=random)
    layout = CandidateLayout.of(torch.arange(num_candidates) % _REQUESTS, _REQUESTS)
    logits, embedding = network.all_depths(state, pooled, counters, None, None, layout)
    return {f"depth {depth}": value for depth, value in logits.items()} | {"embedding": embedding}


def _removed(found: Simplified) -> dict[tuple[str, str], int]:
    return {(row.place, row.unit): row.before - row.after for row in found.removals if row.before > row.after}


@pytest.mark.parametrize("name", _PLANTED)
def test_planted_dead_units_go_and_the_outputs_stay(name: str) -> None:
    plant, expected = _PLANTED[name]
    network = _network(plant)
    found = simplify(network, _outputs)
    removed = _removed(found)
    # The ReLU of a hidden unit may stay shut on these rows without our doing; nothing else goes that is not planted.
    assert {key for key in removed if key[1] != "hidden units"} == {key for key in expected if key[1] != "hidden units"}
    assert all(
        removed[key] == count or (key[1] == "hidden units" and removed[key] > count) for key, count in expected.items()
    )
    before, after = _outputs(network, seed=0), _outputs(found.network, seed=0)
    # 64 * eps * sqrt(longest sum), as for the oracle: the sums have other lengths, so other orders.
    limit = 64 * torch.finfo(torch.float32).eps * 96**0.5
    for key, value in before.items():
        assert float((after[key] - value).abs().max()) <= limit * max(float(value.abs().max()), 1.0), key


def test_nothing_dead_means_the_same_bits() -> None:
    network = RankingNetwork(TINY.model_copy(update={"num_layers": 1, "tiers": {"full": TierConfig(head_max=5)}}))
    for parameter in network.parameters():
        parameter.data = parameter.data.abs() + 0.01  # every ReLU is open
    network.requires_grad_(False)
    found = simplify(network, _outputs)
    assert _removed(found) == {}
    for key, value in _outputs(network).items():
        assert torch.equal(value, _outputs(found.network)[key])


def test_parameters_and_flops_fall() -> None:
    network = _network(_dead_tokens)
    small = simplify(network, _outputs).network
    assert num_parameters(small) < num_parameters(network)
    for depth in small.config.exits:
        assert sum(candidate_flops(small.config, depth, 7).values()) < sum(candidate_flops(_CONFIG, depth, 7).values())
    assert sum(request_flops(small.config, 7).values()) < sum(request_flops(_CONFIG, 7).values())


def test_simplifying_again_finds_nothing_more() -> None:
    network = _network(_dead_tokens)
    once = simplify(network, _outputs).network
    twice = simplify(once, _outputs)
    assert twice.network.config == once.config
    for name, value in once.state_dict().items():
        torch.testing.assert_close(twice.network.state_dict()[name], value)


def test_a_high_threshold_leaves_one_of_each() -> None:
    network = _network(lambda _: None)
    small = simplify(network, _outputs, threshold=0.999).network
    for sizes in small.config.layer_sizes:
        assert min(sizes.candidate.num_mlp_tokens, sizes.candidate.num_linear_tokens, sizes.candidate.num_mixtures) >= 1
    assert all(torch.isfinite(value).all() for value in _outputs(small).values())


def test_hidden_widths_stay_multiples_and_the_strongest_of_the_removed_stay() -> None:
    network = _network(_dead_hidden)
    small = simplify(network, _outputs, threshold=0.05, multiple=4).network
    narrow = simplify(network, _outputs, threshold=0.05).network
    for wide, exact in zip(small.config.layer_sizes, narrow.config.layer_sizes, strict=True):
        for width, least in ((wide.candidate.hidden_width, exact.candidate.hidden_width),):
            assert width % 4 == 0
            assert least <= width < least + 4


def test_the_smaller_model_is_served_and_equals_the_oracle() -> None:
    source = random_weights(_CONFIG)
    ranker = import_ranker(source)
    ranker.requires_grad_(False)
    for plant, _ in _PLANTED.values():
        plant(ranker.network)
    small = simplify(ranker.network, _outputs).network
    config = RankerConfig.model_validate_json(small.config.model_dump_json())
    assert config.sizes is not None
    made = export_source(
        ranker.with_network(small),
        {table.name: Vocabulary.from_weights(source, table.name) for table in config.tables},
        ItemCatalog.from_weights(source),
        Calibration.identity(config.depths),
    )
    # Refuses when stations and oracle disagree, for any tier.
    add_golden(made, GoldenRequest(1, list(range(1, 24)), "web", 100, UserHistory.empty()))
    assert import_ranker(made).network.config == config


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"threshold must be in \[0, 1\), is 1"):
        simplify(_network(lambda _: None), lambda _: None, 1.0)
    with pytest.raises(ValueError, match="multiple must be at least 1, is 0"):
        simplify(_network(lambda _: None), lambda _: None, multiple=0)
    with pytest.raises(ValueError, match="bias"):
        simplify(RankingNetwork(TINY.model_copy(update={"bias": True})), lambda _: None)
    with pytest.raises(ValueError, match="every layer and exit must run"):
        simplify(_network(lambda _: None), lambda _: None)
