"""Which exits and sizes a configuration means, and which configurations are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from models.config import RankerConfig, TierConfig
from models.network import RankingNetwork
from models.random_weights import TINY
from models.sizes import NetworkSizes

_MODELS = sorted(Path("configs/model").glob("*.yaml"))


def test_a_tier_is_an_exit_and_light_is_the_first_pass() -> None:
    config = RankerConfig()
    assert list(config.tiers) == ["light", "standard", "full"]
    assert [config.depth(tier) for tier in config.tiers] == [0, 1, 2]
    assert (config.exits, config.depths) == ((1, 2), (0, 1, 2))
    with pytest.raises(KeyError):
        config.depth("huge")


def test_all_layers_are_an_exit_even_without_a_tier_there() -> None:
    config = RankerConfig(num_layers=3, tiers={"only": TierConfig(head_max=5, num_layers=2)})
    assert config.exits == (2, 3)


def test_an_inner_exit_of_the_first_pass_alone_is_no_exit() -> None:
    config = RankerConfig(tiers={"light": TierConfig(head_max=0, num_layers=1)})
    assert config.exits == (2,)
    assert config.depth("light") == 0


def test_the_ratio_widens_the_request_side_alone() -> None:
    narrow, wide = RankerConfig(), RankerConfig(request_ratio=2.0)
    for before, after in zip(narrow.layer_sizes, wide.layer_sizes, strict=True):
        assert after.candidate == before.candidate
        assert after.feed_forward_width == 2 * before.feed_forward_width
        for name in ("num_queries", "num_mixtures", "num_mlp_tokens", "num_linear_tokens", "hidden_width"):
            assert getattr(after.request, name) == 2 * getattr(before.request, name)
    assert RankerConfig(request_ratio=0.01).request_side.num_mixtures == 1


def test_stated_sizes_equal_to_the_groups_make_the_same_network() -> None:
    sizes = NetworkSizes(layers=TINY.layer_sizes, head_widths=tuple(TINY.head_widths.values()))
    stated = RankerConfig.model_validate_json(TINY.model_copy(update={"sizes": sizes}).model_dump_json())
    assert stated.layer_sizes == TINY.layer_sizes
    shapes = [{name: value.shape for name, value in RankingNetwork(c).state_dict().items()} for c in (TINY, stated)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tiers": {"deep": {"head_max": 5, "num_layers": 3}}}, r"tiers.deep.num_layers must be at most num_layers 2"),
        ({"sizes": {"layers": [], "head_widths": []}}, r"sizes.layers must be num_layers 2, are 0"),
        (
            {"sizes": {"layers": [size.model_dump() for size in RankerConfig().layer_sizes], "head_widths": [4]}},
            r"sizes.head_widths must be one an exit \(1, 2\)",
        ),
        ({"request_ratio": 0}, "request_ratio"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RankerConfig.model_validate(changes)


def test_no_bias_unless_asked_for() -> None:
    assert not [name for name in RankingNetwork(TINY).state_dict() if name.endswith("bias")]
    with_bias = RankingNetwork(TINY.model_copy(update={"bias": True})).state_dict()
    assert [name for name in with_bias if name.endswith("bias")]


@pytest.mark.parametrize("path", _MODELS, ids=lambda path: path.stem)
def test_model_files_are_configurations_with_an_inner_exit(path: Path) -> None:
    config = RankerConfig.model_validate(yaml.safe_load(path.read_text()))
    assert len(config.exits) > 1
