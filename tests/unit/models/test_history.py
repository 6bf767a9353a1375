"""A history that is kept and extended answers as one that is encoded anew, and is of no use for other events."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.native import status
from models.config import EncoderConfig, RankerConfig
from models.execution_config import REFERENCE, Backend, Execution
from models.history import EncodedHistory
from models.network import RankingNetwork
from models.random_request import random_requests
from models.random_weights import TINY
from models.sequence_encoder import Ages, Events
from models.stations import RequestEncoder, StateArrays
from shared.schema.user import UserHistory
from tests.helpers.weights import random_weights

NOW_S = 1_000_000
CONFIG = TINY.model_copy(
    update={
        "width": 16,
        "num_layers": 3,
        "history_length": 40,
        "encoder": EncoderConfig(num_events=40, window_step=8, block=4, window_blocks=2, feed_forward_width=24),
    }
)
PROFILE = {"gender": "F", "age": "25"}


@pytest.fixture(scope="module")
def encoder() -> RequestEncoder:
    return RequestEncoder(random_weights(CONFIG, golden=False))


def _history(length: int, seed: int = 0, profile: dict[str, str] | None = None) -> UserHistory:
    """Return the first events of one user's life; shorter ones are its beginnings."""
    random = np.random.default_rng(seed)
    items, weights, pauses = (
        random.integers(0, 45, 100),
        random.integers(1, 11, 100) / 2,
        random.integers(0, 9_000, 100),
    )
    return UserHistory(
        items[:length].astype(np.int64),
        weights[:length].astype(np.float32),
        np.cumsum(pauses)[:length],
        length,
        PROFILE if profile is None else profile,
    )


def _cut(history: UserHistory, length: int) -> UserHistory:
    """Return what a log answers that is asked for the newest events: ``num_total`` counts all."""
    newest = slice(max(len(history) - length, 0), None)
    return dataclasses.replace(
        history,
        item_keys=history.item_keys[newest],
        weights=history.weights[newest],
        timestamps_s=history.timestamps_s[newest],
    )


def _equal(found: StateArrays, expected: StateArrays) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 90), min_size=1, max_size=8).map(sorted), st.integers(0, 3))
def test_an_extended_state_has_the_bits_of_one_encoded_anew(
    encoder: RequestEncoder, lengths: list[int], seed: int
) -> None:
    known: EncodedHistory | None = None
    for step, length in enumerate(lengths):
        history = _cut(_history(length, seed), CONFIG.history_length)
        made = encoder.encode_from(known, history, 3, "web", NOW_S + 1_000 * step)
        known = made.history
        _equal(made.tensors, encoder.encode(history, 3, "web", NOW_S + 1_000 * step))


def test_only_new_events_are_encoded(encoder: RequestEncoder) -> None:
    known, encoded = None, []
    for length in (24, 24, 27, 20, 41):
        made = encoder.encode_from(known, _cut(_history(length), 40), 3, "web", NOW_S)
        known = made.history
        encoded.append(made.num_encoded)
    # The fourth request reads the beginning of what is there; the last one's window has moved on by a step.
    assert encoded == [24, 0, 3, 0, 33]


@pytest.mark.parametrize("what", ["event", "weight", "user", "profile", "beginning"])
def test_a_state_of_something_else_is_of_no_use(encoder: RequestEncoder, what: str) -> None:
    known = encoder.encode_from(None, _history(24), 3, "web", NOW_S).history
    history, user = _history(26), 3
    if what == "event":
        history.item_keys[3] += 1
    elif what == "weight":
        history.weights[5] = 0.5 if history.weights[5] > 2 else 5.0
    elif what == "user":
        user = 4
    elif what == "profile":
        history = _history(26, profile={"gender": "M"})
    else:
        history = dataclasses.replace(_cut(history, 22), num_total=22)
    made = encoder.encode_from(known, history, user, "web", NOW_S)
    assert made.num_encoded == len(history)
    _equal(made.tensors, encoder.encode(history, user, "web", NOW_S))


def test_an_earlier_request_reads_the_beginning_and_keeps_the_longer_state(encoder: RequestEncoder) -> None:
    known = encoder.encode_from(None, _history(30), 3, "web", NOW_S).history
    made = encoder.encode_from(known, _history(21), 3, "web", NOW_S - 5_000)
    assert made.history is known
    _equal(made.tensors, encoder.encode(_history(21), 3, "web", NOW_S - 5_000))


def test_two_ways_on_from_one_state_do_not_meet(encoder: RequestEncoder) -> None:
    """Rows grow in place: the second way must not write over the first."""
    known = encoder.encode_from(None, _history(20), 3, "web", NOW_S).history
    one, other = _history(22), _history(22)
    other.item_keys[21] += 1
    states = [encoder.encode_from(known, history, 3, "web", NOW_S) for history in (one, other)]
    again = encoder.encode_from(states[0].history, one, 3, "web", NOW_S).tensors
    _equal(again, encoder.encode(one, 3, "web", NOW_S))
    _equal(states[1].tensors, encoder.encode(other, 3, "web", NOW_S))


def test_bytes_are_those_of_the_rows_and_grow_with_them(encoder: RequestEncoder) -> None:
    sizes = [
        encoder.encode_from(None, _history(length), 3, "web", NOW_S).history.num_bytes for length in (0, 8, 16, 32)
    ]
    assert sizes == sorted(set(sizes))
    rows = 2 * CONFIG.num_layers * CONFIG.width * 4
    assert 32 * rows <= sizes[-1] <= 2 * (32 * rows + 32 * 4 * 8)


@pytest.mark.parametrize(
    "backend",
    ["torch", pytest.param("native", marks=pytest.mark.skipif(not status().available, reason="no native library"))],
)
def test_bfloat16_states_extend_within_its_rounding(backend: Backend) -> None:
    execution = Execution(backend, "bfloat16", "")
    blocks = CONFIG.encoder.model_copy(update={"block": 16})  # new events within a block, and across two
    config = CONFIG.model_copy(update={"encoder": blocks})
    encoder = RequestEncoder(random_weights(config, golden=False), execution)
    exact = RequestEncoder(random_weights(config, golden=False), REFERENCE)
    known: EncodedHistory | None = None
    for length in (17, 18, 26, 39):
        made = encoder.encode_from(known, _history(length), 3, "web", NOW_S)
        known = made.history
    for name, value in exact.encode(_history(39), 3, "web", NOW_S).items():
        anew = encoder.encode(_history(39), 3, "web", NOW_S)[name]
        scale = max(1.0, float(np.abs(value).max()))
        assert float(np.abs(made.tensors[name] - anew).max()) <= 2.0**-8 * 12 * scale, name


@pytest.mark.parametrize("num_layers", [1, 2, 4])
@torch.inference_mode()
def test_empty_short_and_very_long_histories_of_one_batch_score_as_alone(num_layers: int) -> None:
    longest = 10_000
    config = RankerConfig(
        width=16,
        history_length=longest,
        num_layers=num_layers,
        encoder=EncoderConfig(num_events=longest, block=64, feed_forward_width=16),
        tiers={"full": TINY.tiers["full"]},
    )
    torch.manual_seed(0)
    network = RankingNetwork(config).eval()
    lengths = torch.tensor([0, 1, longest])
    mask = torch.arange(longest) < lengths[:, None]
    features, events, ages, dense, taste = random_requests(config, batch=3, mask=mask)
    state = network.encode(features, events, ages, dense, taste)
    for row, length in enumerate(lengths.tolist()):
        alone = network.encode(
            features[row : row + 1],
            Events(*(getattr(events, each.name)[row : row + 1, :length] for each in dataclasses.fields(Events))),
            Ages(ages.log_gaps[row : row + 1, :length], None),
            dense[row : row + 1],
            taste[row : row + 1],
        )
        for name in ("first", f"head{num_layers}", "layer0.mixtures"):
            torch.testing.assert_close(state[name][row], alone[name][0], rtol=1e-4, atol=1e-5)


def test_events_see_their_block_and_whole_blocks_before_and_nothing_later() -> None:
    config = CONFIG.model_copy(update={"num_layers": 2})
    torch.manual_seed(1)
    network = RankingNetwork(config).eval()
    features, events, *_ = random_requests(config, length=20)
    changed = dataclasses.replace(events, items=events.items.clone())
    changed.items[0, 9] += 1.0
    with torch.inference_mode():
        before, after = (network.encode_events(features, each)[1].keys[0] for each in (events, changed))
    moved = [int(row) for row in torch.nonzero((before != after).any(-1))[:, 0]]
    # Event 9 is in the block 8 to 11, which the next block, 12 to 15, sees as well.
    assert moved == [9, 10, 11, 12, 13, 14, 15]
