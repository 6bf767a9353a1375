"""New events in one native call: as the modules make them, wherever in a block they are, and only where it is said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels import event_layer
from kernels.native import status
from kernels.tolerance import largest_error, tolerance
from models.config import EncoderConfig, RankerConfig
from models.execution import FusedNetwork, choose_execution
from models.execution_config import Execution
from models.kunlun import Personal, Window
from models.network import RankingNetwork
from models.random_request import random_requests
from models.random_weights import TINY
from models.sequence_encoder import FUSED_EVENTS_MAX, EncodedLayer, Events, SequenceEncoder
from shared.errors import ConfigError

needs_native = pytest.mark.skipif(not status().available, reason=status().reason or "native")
LENGTH = 80
BF16 = torch.bfloat16


def _config(width: int = 16, num_layers: int = 3, bias: bool = False, **encoder: object) -> RankerConfig:
    sizes = {"num_events": 400, "block": 8, "window_blocks": 2, "feed_forward_width": 24, **encoder}
    update = {
        "width": width, "num_layers": num_layers, "history_length": 400, "bias": bias,
        "encoder": EncoderConfig.model_validate(sizes),
    }  # fmt: skip
    return TINY.model_copy(update=update)


CONFIGS = {
    "turns": _config(),
    "every layer has all": _config(comp_skip=False, num_layers=2),
    "no attention": _config(self_attention=False),
    "three heads, odd sizes": _config(width=36, num_heads=3, feed_forward_width=17, block=5, window_blocks=3),
    "one head, one block": _config(width=20, num_heads=1, feed_forward_width=33, block=6, window_blocks=1),
}


class _Trio:
    """One network as modules in float32 and in bfloat16, its weights equal, and with native kernels."""

    def __init__(self, config: RankerConfig) -> None:
        torch.manual_seed(5)
        self.config = config
        network = RankingNetwork(config).requires_grad_(False).eval().to(BF16)
        self.modules = network.encoder
        self.exact, self.native = self._copy(network).float(), self._copy(network)
        self.native.use_native()
        features, events, *_ = random_requests(config, length=LENGTH)
        self.features, self.events = features.to(BF16), events.to(BF16)
        self.known = self.modules(self.features, self.events)

    def _copy(self, network: RankingNetwork) -> SequenceEncoder:
        fresh = RankingNetwork(self.config).requires_grad_(False).eval().to(BF16)
        fresh.load_state_dict(network.state_dict())
        return fresh.encoder

    def append(self, encoder: SequenceEncoder, begin: int, count: int, dtype: torch.dtype) -> list[EncodedLayer]:
        """Encode events behind the first ``begin``, of which all three are given the same."""
        sizes = self.config.encoder
        first = max(begin // sizes.block - sizes.window_blocks + 1, 0) * sizes.block
        before = [_cast(each.window, dtype, slice(first, begin)) for each in self.known] if begin else None
        personal = [_cast(each.personal, dtype) for each in self.known]
        made: list[EncodedLayer] = encoder(
            self.features.to(dtype), cut(self.events, begin, begin + count).to(dtype), before, begin, personal
        )
        return made


def cut(events: Events, begin: int, end: int) -> Events:
    columns = (events.items, events.weight_buckets, events.pause_buckets, events.clock)
    return Events(*(column[:, begin:end] for column in columns))


def _cast(pair: Window | Personal, dtype: torch.dtype, rows: slice = slice(None)) -> Window:
    return None if pair is None else (pair[0][:, rows].to(dtype), pair[1][:, rows].to(dtype))


def _check(found: Sequence[EncodedLayer], expected: Sequence[EncodedLayer], config: RankerConfig, paths: int) -> None:
    """Compare within the rounding of so many paths that store bfloat16."""
    reduction = max(config.encoder.feed_forward_width, config.width, LENGTH)
    for index, (own, truth) in enumerate(zip(found, expected, strict=True)):
        # Of the event; of each layer: normed, hidden, fed, tokens; normed, made, turned, weights, answers, mapped,
        # tokens; normed, output. Independent errors add up like their root.
        roundings = 3 + 13 * (index + 1)
        limit = paths * tolerance(BF16, reduction * (index + 1), int(roundings**0.5) + 1)
        assert (own.window is None) == (truth.window is None)
        pairs = [(own.keys, truth.keys), (own.values, truth.values)]
        if own.window is not None and truth.window is not None:
            pairs += zip(own.window, truth.window, strict=True)
        for x, y in pairs:
            assert x.dtype == BF16
            assert x.shape == y.shape
            assert largest_error(x, y) <= limit, index


@pytest.fixture(scope="module", params=CONFIGS)
def trio(request: pytest.FixtureRequest) -> _Trio:
    with torch.inference_mode():
        return _Trio(CONFIGS[request.param])


@needs_native
@pytest.mark.parametrize("count", [1, 2, 7, 8, 13, 32])
@torch.inference_mode()
def test_events_behind_others_equal_the_modules_at_every_place_of_a_block(trio: _Trio, count: int) -> None:
    block = trio.config.encoder.block
    for begin in (0, *range(3 * block, 4 * block + 1)):
        found = trio.append(trio.native, begin, count, BF16)
        _check(found, trio.append(trio.exact, begin, count, torch.float32), trio.config, paths=1)
        _check(found, trio.append(trio.modules, begin, count, BF16), trio.config, paths=2)


@needs_native
@torch.inference_mode()
def test_appended_and_anew_are_equal_to_the_bit_in_any_steps(trio: _Trio) -> None:
    anew = trio.native(trio.features, trio.events)
    sizes = trio.config.encoder
    for step in (1, 8, 31):
        before, personal, parts = None, None, []
        windows: list[Window] = [None] * trio.config.num_layers
        for begin in range(0, LENGTH, step):
            end = min(begin + step, LENGTH)
            made = trio.native(trio.features, cut(trio.events, begin, end), before, begin, personal)
            parts.append(made)
            first = max(end // sizes.block - sizes.window_blocks + 1, 0) * sizes.block
            windows = [
                _cast(each.window, BF16, slice(first - end, None) if first < end else slice(0, 0)) for each in made
            ]
            before, personal = windows, [each.personal for each in made]
        for index, layer in enumerate(anew):
            assert torch.equal(torch.cat([made[index].keys for made in parts], 1), layer.keys)
            assert torch.equal(torch.cat([made[index].values for made in parts], 1), layer.values)


@needs_native
@torch.inference_mode()
def test_few_events_of_one_user_take_the_call_and_others_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    trio = _Trio(CONFIGS["turns"])
    most = FUSED_EVENTS_MAX
    assert [trio.native.fuses(*each) for each in ((1, 1), (1, most), (1, most + 1), (1, 0), (2, 8))] == [
        True, True, False, False, False,
    ]  # fmt: skip
    assert not trio.modules.fuses(1, 8)

    def refuse(*_: object) -> list[event_layer.LayerMade]:
        raise AssertionError("called")

    monkeypatch.setattr(event_layer, "append", refuse)
    with pytest.raises(AssertionError, match="called"):
        trio.append(trio.native, 24, 8, BF16)
    for batch, length in ((2, 8), (1, most + 1), (1, 0)):
        features, events, *_ = random_requests(trio.config, batch=batch, length=length)
        made = trio.native(features.to(BF16), events.to(BF16))
        assert made[0].keys.shape == (batch, length, trio.config.width)


@needs_native
def test_a_replica_says_so_at_its_start() -> None:
    assert f"up to {FUSED_EVENTS_MAX} events of one user" in choose_execution("native", "auto").reason


@needs_native
def test_biases_are_refused() -> None:
    network = RankingNetwork(_config(bias=True))
    with pytest.raises(ConfigError, match="an encoder with biases has no native form"):
        network.to(BF16).encoder.use_native()


@needs_native
@torch.inference_mode()
def test_later_changes_of_the_network_do_not_reach_it() -> None:
    config = CONFIGS["turns"]
    torch.manual_seed(0)
    network = RankingNetwork(config).requires_grad_(False).eval()
    fused = FusedNetwork(network, Execution("native", "bfloat16", ""))
    features, events, *_ = random_requests(config, length=8)

    def keys() -> Tensor:
        return fused.encode_events(features, events, None, 0)[-1].keys

    before = keys()
    network.encoder.layer(0).key_value.weight.mul_(2.0)
    network.encoder.layer(config.num_layers - 1).key_value.weight.mul_(2.0)
    assert torch.equal(keys(), before)
