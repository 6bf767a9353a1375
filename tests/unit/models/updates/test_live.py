"""Weights that change while they serve: no reader sees half a row, or two states, and failures change nothing."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.source import MemorySource
from models.updates import LiveConfig, LiveSource, LiveState, LiveWeights, RowArena, held_rows, live_weights
from models.updates.source import tensor_specs
from shared.clock import ManualClock
from shared.errors import InvalidRequestError, OverloadedError, VersionMismatchError, WeightsError
from shared.weights.deltas import Delta, RowDelta
from shared.weights.errors import (
    DeltaBaseError,
    DeltaError,
    DeltaGapError,
    DeltaRepeatedError,
    DeltaShapeError,
    DeltaTooLargeError,
)
from shared.weights.state import TensorState

ITEM, USER, DENSE = "tables/item/weight", "tables/user/weight", "dense/w"
SMALL = LiveConfig(block_rows=4, spare_blocks_min=16)
Array = npt.NDArray[Any]


def tables() -> dict[str, Array]:
    rng = np.random.default_rng(2)
    return {ITEM: rng.random((50, 8), np.float32), USER: rng.integers(0, 255, (21, 3), np.uint8)}


def live(config: LiveConfig = SMALL, **options: Any) -> LiveWeights:
    return LiveWeights("v", tables(), {DENSE: np.zeros((2, 2), np.float32)}, config, **options)


class Trainer:
    """Makes the deltas of a series."""

    def __init__(self, weights: LiveWeights, seed: int = 3) -> None:
        self.rng = np.random.default_rng(seed)
        state = weights.state
        groups: dict[str, dict[str, Array]] = {}
        for key in (*state.tables, *state.whole):
            group, _, name = key.rpartition("/")
            groups.setdefault(group, {})[name] = state.array(key)
        self.state = TensorState("v", groups, {})

    def step(self, num_rows: int = 5, dense: bool = False) -> Delta:
        groups = {group: {n: a.copy() for n, a in part.items()} for group, part in self.state.groups().items()}
        for group in ("tables/item", "tables/user"):
            weight = groups[group]["weight"]
            rows = self.rng.permutation(len(weight))[:num_rows]
            weight[rows] = (self.rng.random((len(rows), weight.shape[1])) * 255).astype(weight.dtype)
        if dense:
            groups["dense"]["w"][:] = self.rng.random((2, 2))
        delta = self.state.step(groups, "now")
        self.state.apply(delta)
        return delta

    def bits(self) -> dict[str, bytes]:
        return {
            f"{group}/{name}": array.tobytes()
            for group, part in self.state.groups().items()
            for name, array in part.items()
        }


def bits(state: LiveState) -> dict[str, bytes]:
    return {key: state.array(key).tobytes() for key in (*state.tables, *state.whole)}


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1), block_rows=st.sampled_from([1, 2, 8, 64]))
def test_a_base_and_a_thousand_deltas_serve_the_trainer_bit_for_bit(seed: int, block_rows: int) -> None:
    weights = live(LiveConfig(block_rows=block_rows, spare_blocks_min=64))
    trainer = Trainer(weights, seed)
    for number in range(200):
        weights.apply(trainer.step(num_rows=int(trainer.rng.integers(0, 20)), dense=number % 7 == 0))
    assert bits(weights.state) == trainer.bits()
    ids = trainer.rng.integers(0, 50, 400)
    np.testing.assert_array_equal(weights.state.lookup(ITEM, ids), weights.state.array(ITEM)[ids])


@pytest.mark.slow
def test_the_whole_thousand() -> None:
    weights = live()
    trainer = Trainer(weights)
    for number in range(1000):
        weights.apply(trainer.step(dense=number % 7 == 0))
    assert bits(weights.state) == trainer.bits()


@settings(max_examples=30)
@given(steps=st.lists(st.integers(0, 12), min_size=1, max_size=12), data=st.data())
def test_a_roll_back_restores_the_old_bits(steps: list[int], data: st.DataObject) -> None:
    weights = live()
    trainer = Trainer(weights)
    history = [(weights.state.stamp, bits(weights.state))]
    for number, num_rows in enumerate(steps):
        weights.apply(trainer.step(num_rows, dense=number % 3 == 0))
        history.append((weights.state.stamp, bits(weights.state)))
    stamp, expected = history[data.draw(st.integers(0, len(steps)))]
    assert weights.roll_back(stamp).stamp == stamp
    assert bits(weights.state) == expected
    earlier, expected = history[data.draw(st.integers(0, weights.state.sequence))]
    weights.roll_back(earlier)
    assert bits(weights.state) == expected


def test_after_a_roll_back_the_series_goes_on() -> None:
    weights = live()
    trainer = Trainer(weights)
    deltas = [trainer.step() for _ in range(4)]
    for delta in deltas:
        weights.apply(delta)
    weights.roll_back("v+1")
    with pytest.raises(DeltaGapError):
        weights.apply(deltas[2])
    for delta in deltas[1:]:
        weights.apply(delta)
    assert bits(weights.state) == trainer.bits()
    status = weights.status()
    assert (status.applied, status.rolled_back, status.refused) == (7, 3, 1)


def test_a_roll_back_that_cannot_be() -> None:
    one = RowDelta(np.array([3]), np.ones((1, 8), np.float32))
    undo_bytes = 8 + 32  # an id and a row
    weights = live(LiveConfig(block_rows=4, undo_bytes_max=2 * undo_bytes))
    deltas = [Delta("v", 1, 0, "now", {ITEM: one})]
    for sequence in (2, 3):
        deltas.append(Delta("v", sequence, deltas[-1].crc, "now", {ITEM: one}))
    for delta in deltas:
        weights.apply(delta)
    assert weights.status().undo_from == 1
    with pytest.raises(DeltaGapError, match=r"old values reach back to v\+1, not to v: a full snapshot is needed"):
        weights.roll_back("v")
    for stamp, words in (("v+4", "an earlier state"), ("w+1", "an earlier state"), ("v+x", "stamp must be")):
        with pytest.raises(WeightsError, match=words):
            weights.roll_back(stamp)
    assert weights.state.stamp == "v+3"
    assert weights.roll_back("v+3") is weights.state
    assert weights.roll_back("v+1").stamp == "v+1"


# ---------------------------------------------------------------- one state, whole


def uniform(value: int, sequence: int, crc: int, num_rows: int = 50) -> Delta:
    """Every row of the table and the dense tensor say ``value``."""
    values = np.full((num_rows, 8), value, np.float32)
    whole = {DENSE: np.full((2, 2), value, np.float32)}
    return Delta("v", sequence, crc, "now", {ITEM: RowDelta(np.arange(num_rows), values)}, whole)


class InPlace(LiveWeights):
    """What must not be: rows written where readers look. The checks below have to find it out."""

    def apply(self, delta: Delta) -> LiveState:
        for key, part in delta.rows.items():
            arena = self._arenas[key]
            for row, values in zip(arena.positions(self.state.moves[key], part.ids), part.values, strict=True):
                arena.storage[row, :4] = values[:4]
                arena.storage[row, 4:] = values[4:]
        for key, array in delta.whole.items():
            self.state.whole[key][:] = array
        return self.state


def race(make: Callable[..., LiveWeights], num_updates: int) -> tuple[int, int]:
    """Update every row to 1, 2, 3, ... while three threads read; return torn lookups and lookups.

    A lookup is torn when it holds half a row, two states, or a dense tensor of another state than its rows.
    """
    config = LiveConfig(block_rows=16, spare_share=4, keep_states=1)
    weights = make("v", {ITEM: np.zeros((4096, 8), np.float32)}, {DENSE: np.zeros((2, 2), np.float32)}, config)
    ids = np.random.default_rng(0).integers(0, 4096, 2000)
    stop, torn, read = threading.Event(), itertools.count(), itertools.count()

    def reader() -> None:
        while not stop.is_set():
            state = weights.state
            rows = state.lookup(ITEM, ids)
            if rows.min() != rows.max() or rows[0, 0] != state.whole[DENSE][0, 0]:
                next(torn)
            next(read)

    threads = [threading.Thread(target=reader, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        crc = 0
        for sequence in range(1, num_updates + 1):
            delta = uniform(sequence, sequence, crc, 4096)
            crc = delta.crc
            apply_when_there_is_room(weights, delta)
    finally:
        stop.set()
    for thread in threads:
        thread.join(10)
    return next(torn), next(read)


def apply_when_there_is_room(weights: LiveWeights, delta: Delta) -> None:
    """Try again while a reader that lost its core pins old blocks, as a station would."""
    for _ in range(1000):
        try:
            weights.apply(delta)
            return
        except OverloadedError:
            threading.Event().wait(0.001)
    raise AssertionError("no block came free in a second")


def test_no_reader_sees_half_a_row_or_two_states() -> None:
    torn, read = race(LiveWeights, 60)
    assert read > 20
    assert torn == 0


def test_the_race_finds_out_writes_in_place() -> None:
    """The test above can fail: the same race over rows written in place tears."""
    torn, _ = race(InPlace, 4)
    assert torn > 0


def test_a_reader_in_the_middle_of_an_update_sees_the_old_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without luck: a lookup between the two halves of a write."""
    weights = live()
    seen: list[Array] = []
    put = RowArena._put

    def halfway(arena: RowArena, places: Array, values: Array) -> None:
        put(arena, places[:7], values[:7])
        seen.append(weights.state.lookup(ITEM, np.arange(50)))
        put(arena, places, values)
        seen.append(weights.state.lookup(ITEM, np.arange(50)))

    monkeypatch.setattr(RowArena, "_put", halfway)
    before = weights.state.array(ITEM)
    weights.apply(uniform(7, 1, 0))
    assert len(seen) == 2
    for rows in seen:
        np.testing.assert_array_equal(rows, before)
    assert set(weights.state.array(ITEM).ravel()) == {7.0}


def test_a_request_keeps_its_state_through_updates() -> None:
    weights = live(LiveConfig(block_rows=4, spare_share=8, keep_states=3))
    held = weights.state
    before = bits(held)
    trainer = Trainer(weights)
    for _ in range(6):
        weights.apply(trainer.step(num_rows=10, dense=True))
    assert bits(held) == before
    assert weights.at("v+6") is weights.state
    assert weights.at("v+4").stamp == "v+4"
    for stamp in ("v+3", "v+7", "w"):
        with pytest.raises(VersionMismatchError, match=r"held is v\+6"):
            weights.at(stamp)


# ---------------------------------------------------------------- failures


def broken_deltas() -> list[tuple[Delta, type[DeltaError]]]:
    row = RowDelta(np.array([50]), np.ones((1, 8), np.float32))
    wide = RowDelta(np.array([5]), np.ones((1, 9), np.float32))
    return [
        (Delta("w", 1, 0, "now"), DeltaBaseError),
        (Delta("v", 3, 0, "now"), DeltaGapError),
        (Delta("v", 1, 0, "now", {ITEM: row}), DeltaShapeError),
        (Delta("v", 1, 0, "now", {ITEM: wide}), DeltaShapeError),
        (Delta("v", 1, 0, "now", {ITEM: RowDelta(wide.ids, row.values * np.float32("nan"))}), DeltaShapeError),
        (Delta("v", 1, 0, "now", {ITEM: RowDelta(wide.ids, row.values + np.float32("inf"))}), DeltaShapeError),
        (Delta("v", 1, 0, "now", {"tables/new/weight": row}), DeltaShapeError),
        (Delta("v", 1, 0, "now", {}, {DENSE: np.zeros(3, np.float32)}), DeltaShapeError),
    ]


@pytest.mark.parametrize(("delta", "error"), broken_deltas())
def test_a_refused_delta_leaves_the_old_state_and_says_why(delta: Delta, error: type[DeltaError]) -> None:
    weights = live(clock=ManualClock(77.0))
    before, state = bits(weights.state), weights.state
    with pytest.raises(error) as caught:
        weights.apply(delta)
    assert weights.state is state
    assert bits(state) == before
    status = weights.status()
    assert (status.stamp, status.refused, status.applied) == ("v", 1, 0)
    assert caught.value.message in status.reason
    assert status.needs_snapshot is (error is DeltaGapError)
    weights.apply(Delta("v", 1, 0, "now"))
    assert weights.status().reason == ""
    assert weights.status().updated_s == 77.0


@pytest.mark.parametrize("where", ["_copy_blocks", "_put", "build"])
def test_an_interrupted_update_leaves_the_old_state_and_no_trace(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    calls = itertools.count()

    def fail(*_: object) -> None:
        if next(calls) == 1:  # the second table, or the build of the first update
            raise KeyboardInterrupt("pulled the plug")

    weights = live(build=fail if where == "build" else None)
    trainer = Trainer(weights)
    delta = trainer.step(dense=True)
    before, free = bits(weights.state), weights.status().blocks_free
    with monkeypatch.context() as patch:
        if where != "build":
            original = getattr(RowArena, where)

            def half(*args: Any) -> None:
                original(*args)
                fail()

            patch.setattr(RowArena, where, half)
        with pytest.raises(KeyboardInterrupt):
            weights.apply(delta)
    assert bits(weights.state) == before
    assert weights.state.stamp == "v"
    assert "KeyboardInterrupt: pulled the plug" in weights.status().reason
    assert weights.status().blocks_free == free
    weights.apply(delta)
    assert bits(weights.state) == trainer.bits()
    with pytest.raises(DeltaRepeatedError):
        weights.apply(delta)


def test_what_hangs_on_a_state_is_built_before_it_serves() -> None:
    seen: list[tuple[Any, Any, Any]] = []
    weights: LiveWeights | None = None

    def build(state: LiveState, before: LiveState | None) -> str:
        seen.append((state.stamp, before and before.built, weights and weights.state.stamp))
        return f"network of {state.stamp}"

    weights = live(build=build)
    weights.apply(Trainer(weights).step(dense=True))
    assert weights.state.built == "network of v+1"
    assert seen == [("v", None, None), ("v+1", "network of v", "v")]


# ---------------------------------------------------------------- spare blocks


def test_blocks_are_free_again_when_nobody_holds_their_state() -> None:
    weights = live(LiveConfig(block_rows=4, spare_blocks_min=13, spare_share=0, keep_states=1))
    crc = 0
    for sequence in range(1, 50):  # each touches all 13 blocks of the table
        delta = uniform(sequence, sequence, crc)
        crc = delta.crc
        weights.apply(delta)
    assert weights.state.sequence == 49


def test_a_reader_that_holds_on_gets_the_update_refused_not_itself() -> None:
    weights = live(LiveConfig(block_rows=4, spare_blocks_min=13, spare_share=0, keep_states=2))
    held: list[LiveState] = [weights.state]
    first = uniform(1, 1, 0)
    weights.apply(first)
    second = uniform(2, 2, first.crc)
    with pytest.raises(OverloadedError, match="needs as many free ones, 0 are free"):
        weights.apply(second)
    assert weights.state.stamp == "v+1"
    assert "0 are free" in weights.status().reason
    assert set(held.pop().array(ITEM).ravel()) == set(tables()[ITEM].ravel())
    gc.collect()
    weights.apply(second)
    assert weights.state.stamp == "v+2"


def test_an_update_that_never_fits_asks_for_a_snapshot() -> None:
    weights = live(LiveConfig(block_rows=4, spare_blocks_min=12, spare_share=0))
    with pytest.raises(DeltaTooLargeError, match=r"v\+1: tables/item/weight changes in 13 blocks, 12 are spare"):
        weights.apply(uniform(1, 1, 0))
    assert weights.status().needs_snapshot
    weights.apply(uniform(1, 1, 0, num_rows=48))
    assert not weights.status().needs_snapshot


def test_every_update_of_a_small_table_fits_the_defaults() -> None:
    weights = live(LiveConfig())
    crc = 0
    for sequence in range(1, 8):
        delta = uniform(sequence, sequence, crc)
        crc = delta.crc
        weights.apply(delta)


def test_states_that_are_only_kept_make_room() -> None:
    weights = live(LiveConfig(block_rows=4, spare_blocks_min=13, spare_share=0, keep_states=8))
    first = uniform(1, 1, 0)
    weights.apply(first)
    weights.apply(uniform(2, 2, first.crc))
    with pytest.raises(VersionMismatchError):
        weights.at("v")


def test_readers_let_go_in_other_threads() -> None:
    weights = live(LiveConfig(block_rows=4, spare_blocks_min=13, spare_share=0, keep_states=1))
    entered, leave = threading.Event(), threading.Event()

    def reader() -> None:
        state = weights.state
        entered.set()
        leave.wait(10)
        state.lookup(ITEM, np.arange(50))

    thread = threading.Thread(target=reader)
    thread.start()
    entered.wait(10)
    first = uniform(1, 1, 0)
    weights.apply(first)
    with pytest.raises(OverloadedError):
        weights.apply(uniform(2, 2, first.crc))
    leave.set()
    thread.join()
    weights.apply(uniform(2, 2, first.crc))


# ---------------------------------------------------------------- arena


@pytest.mark.parametrize("ids", [[-1], [50], [0, 50], [2**40], [-(2**40), 3]])
def test_rows_out_of_range_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match=r"row must be in \[0, 50\), is") as caught:
        live().state.lookup(ITEM, np.array(ids))
    assert caught.value.context["limit"] == 50


def test_an_empty_lookup_and_an_empty_table() -> None:
    weights = LiveWeights("v", {ITEM: np.zeros((0, 8), np.float32)}, {}, SMALL)
    assert weights.state.lookup(ITEM, np.zeros(0, np.int64)).shape == (0, 8)
    assert weights.state.array(ITEM).shape == (0, 8)
    with pytest.raises(InvalidRequestError):
        weights.state.lookup(ITEM, np.array([0]))


def test_storage_of_an_operator_stays_where_it_is() -> None:
    """The address that an embedding operator or a captured graph knows is good for every state."""
    owned: list[Array] = []

    def make(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        owned.append(np.full(shape, np.nan, dtype))
        return owned[-1]

    weights = live(make_storage={ITEM: make})
    trainer = Trainer(weights)
    weights.apply(trainer.step())
    ids = np.array([3, 3, 49, 0])
    places = weights.state.positions(ITEM, ids)
    np.testing.assert_array_equal(owned[0][places], weights.state.lookup(ITEM, ids))


@pytest.mark.parametrize(("block_rows", "spare"), [(0, 1), (3, 1), (-4, 1), (4, 0)])
def test_an_arena_refuses_sizes_that_do_not_work(block_rows: int, spare: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        RowArena(np.zeros((5, 2)), block_rows, spare)


# ---------------------------------------------------------------- versions and shards


def source() -> MemorySource:
    held = tables()
    groups = {
        "tables/item": {"weight": held[ITEM]},
        "tables/user": {"weight": held[USER]},
        "dense": {"w": np.zeros((2, 2), np.float32)},
    }
    return MemorySource("v", groups, {"model": {"width": 8}, "golden": {"user": 1}})


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_shards_together_are_the_whole(num_shards: int) -> None:
    """Rows round the shards, two hot ones on every shard besides, some columns of the other table on each."""
    hot = np.array([3, 30])
    groups = ("tables/item", "tables/user")
    held = [np.concatenate([hot, np.arange(shard, 50, num_shards)]) for shard in range(num_shards)]

    def columns(shard: int) -> Callable[[Array], Array]:
        return lambda rows: rows[:, shard % 3 :]

    shards = [
        live_weights(source(), groups, SMALL, select=held_rows({ITEM: rows}), convert={USER: columns(shard)})
        for shard, rows in enumerate(held)
    ]
    whole = live_weights(source(), (*groups, "dense"), SMALL)
    trainer = Trainer(whole)
    states = {"v": whole.state.array(ITEM), "v+10": np.zeros(0)}
    for _ in range(10):
        delta = trainer.step(dense=True)
        for weights in (whole, *shards):
            weights.apply(delta)
    states["v+10"] = whole.state.array(ITEM)
    for stamp in ("v+10", "v"):
        for shard, weights in enumerate(shards):
            weights.roll_back(stamp)
            np.testing.assert_array_equal(weights.state.array(ITEM), states[stamp][held[shard]])
            assert weights.state.whole == {}
    np.testing.assert_array_equal(shards[0].state.array(USER), tables()[USER])


@settings(max_examples=100)
@given(
    rows=st.lists(st.integers(0, 9), max_size=12),
    ids=st.lists(st.integers(0, 12), max_size=8, unique=True).map(sorted),
)
def test_every_place_of_a_changed_row_is_found(rows: list[int], ids: list[int]) -> None:
    chosen, local = held_rows({ITEM: np.array(rows, np.int64)})(ITEM, np.array(ids, np.int64))
    expected = {(number, place) for number, row in enumerate(ids) for place, found in enumerate(rows) if found == row}
    assert len(chosen) == len(expected)
    assert set(zip(chosen.tolist(), local.tolist(), strict=True)) == expected


def test_a_state_as_a_version() -> None:
    base = source()
    weights = live_weights(base, ("tables/item", "dense"), SMALL, documents=("golden",))
    trainer = Trainer(live_weights(base, ("tables/item", "tables/user", "dense"), SMALL))
    delta = trainer.step(dense=True)
    delta = Delta("v", 1, 0, "now", delta.rows, delta.whole, {"golden": {"user": 2}, "model": {"width": 9}})
    weights.apply(delta)
    state = LiveSource(base, weights.state)
    assert state.version == "v+1"
    assert state.json("golden") == {"user": 2}
    assert state.json("model") == {"width": 8}, "only documents that the process asked for may change"
    assert state.tensors("dense")["w"].tobytes() == trainer.bits()[DENSE]
    assert state.tensors("tables/item")["weight"].tobytes() == trainer.bits()[ITEM]
    np.testing.assert_array_equal(state.tensors("tables/user")["weight"], tables()[USER])
    weights.roll_back("v")
    assert LiveSource(base, weights.state).json("golden") == {"user": 1}


def test_a_part_of_a_table_is_no_version() -> None:
    weights = live_weights(source(), ("tables/item",), SMALL, select=held_rows({ITEM: np.arange(0, 50, 2)}))
    with pytest.raises(WeightsError, match="is held in part"):
        LiveSource(source(), weights.state).tensors("tables/item")


def test_a_state_does_not_follow_arrays_that_their_owner_writes_to() -> None:
    base = source()
    weights = live_weights(base, ("tables/item", "dense"), SMALL)
    before = bits(weights.state)
    given = np.ones((2, 2), np.float32)
    base.groups["dense"]["w"][:] = 5
    base.groups["tables/item"]["weight"][:] = 5
    assert bits(weights.state) == before
    weights.apply(Delta("v", 1, 0, "now", {}, {DENSE: given}))
    given[:] = 5
    assert set(weights.state.whole[DENSE].ravel()) == {1.0}


def test_only_sources_that_list_their_tensors_can_change() -> None:
    with pytest.raises(WeightsError, match="do not list their tensors"):
        tensor_specs(LiveSource(source(), live().state))
