"""Several deltas in one switch, and states that updates must not let go of."""

from __future__ import annotations

import numpy as np
import pytest

from models.updates.live import LiveConfig, LiveWeights
from shared.errors import OverloadedError, VersionMismatchError
from shared.weights.deltas import Delta, RowDelta
from shared.weights.errors import DeltaGapError

ITEM, DENSE = "tables/item/weight", "dense/w"


def weights(**config: int) -> LiveWeights:
    table = np.arange(100, dtype=np.float32).reshape(50, 2)
    return LiveWeights("v", {ITEM: table}, {DENSE: np.zeros(3, np.float32)}, LiveConfig(block_rows=4, **config))


def deltas(num: int, seed: int = 0) -> list[Delta]:
    """Deltas that write some rows again and again; every third brings a dense tensor."""
    rng, made, crc = np.random.default_rng(seed), list[Delta](), 0
    for sequence in range(1, num + 1):
        ids = np.unique(rng.integers(0, 50, 12))
        rows = {ITEM: RowDelta(ids, rng.random((len(ids), 2), np.float32))}
        whole = {DENSE: rng.random(3, np.float32)} if sequence % 3 == 0 else {}
        made.append(Delta("v", sequence, crc, "now", rows, whole))
        crc = made[-1].crc
    return made


@pytest.mark.parametrize("cuts", [[7], [3, 7], [1, 2, 6, 7]])
def test_taken_together_or_one_by_one(cuts: list[int]) -> None:
    made = deltas(7)
    one_by_one, together = weights(), weights()
    for delta in made:
        one_by_one.apply(delta)
    for begin, end in zip([0, *cuts], cuts, strict=False):
        together.apply_all(made[begin:end])
    assert together.state.stamp == "v+7"
    assert together.status().applied == 7
    for key in (ITEM, DENSE):
        np.testing.assert_array_equal(together.state.array(key), one_by_one.state.array(key))
    together.roll_back("v")
    np.testing.assert_array_equal(together.state.array(ITEM), weights().state.array(ITEM))
    assert together.status().rolled_back == 7


def test_no_state_lies_between_deltas_that_were_taken_together() -> None:
    live = weights()
    live.apply_all(deltas(4))
    with pytest.raises(VersionMismatchError):
        live.at("v+2")
    with pytest.raises(DeltaGapError, match="a full snapshot is needed"):
        live.roll_back("v+2")


def test_one_wrong_delta_among_several_changes_nothing() -> None:
    live, made = weights(), deltas(4)
    with pytest.raises(DeltaGapError):
        live.apply_all([*made[:2], made[3]])
    assert live.stamps() == ("v",)
    np.testing.assert_array_equal(live.state.array(ITEM), weights().state.array(ITEM))
    live.apply_all(made)


def test_an_update_waits_for_states_that_are_asked_for() -> None:
    live, made = weights(keep_states=3), deltas(4)
    live.apply(made[0])
    live.apply(made[1])
    live.keep(["v", "v+1"])
    live.keep(["v", "v+1", "v+2"])
    with pytest.raises(OverloadedError, match="3 states are asked for, limit 3"):
        live.apply(made[2])
    assert live.stamps() == ("v", "v+1", "v+2")
    live.keep(["v+1"])
    assert live.stamps() == ("v+1", "v+2")
    live.apply(made[2])
    live.apply(made[3])
    assert live.stamps() == ("v+1", "v+3", "v+4"), "v+2 was not asked for, so it made room"


def test_a_state_that_is_asked_for_costs_its_blocks_once() -> None:
    """A request that runs long, and a hundred updates after it: each finds room, and the old state stays as it was."""
    live = weights(keep_states=4, spare_blocks_min=26)  # twice the blocks of the table
    kept = live.state.array(ITEM)
    live.keep(["v"])
    for delta in deltas(100):
        live.apply(delta)
    assert live.state.sequence == 100
    np.testing.assert_array_equal(live.at("v").array(ITEM), kept)
    live.keep(["v+100"])
    live.apply(deltas(101)[-1])
    assert live.status().blocks_free >= 13, "the old state's blocks are free again"


def test_blocks_of_states_that_are_asked_for_are_not_taken() -> None:
    live, made = weights(keep_states=2), deltas(3)
    kept = live.state.array(ITEM)
    live.keep(["v"])
    live.apply(made[0])
    live.keep(["v", "v+1"])
    with pytest.raises(OverloadedError):
        live.apply(made[1])
    np.testing.assert_array_equal(live.at("v").array(ITEM), kept)
