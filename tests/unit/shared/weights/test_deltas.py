"""Deltas: a version plus its deltas is the trainer's state bit for bit, and everything wrong has its name."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import WeightsError
from shared.weights import WeightStore
from shared.weights.delta_log import DeltaLog
from shared.weights.deltas import (
    ENVELOPE_BYTES,
    Delta,
    RowDelta,
    changed_rows,
    parse_stamp,
    version_stamp,
)
from shared.weights.errors import (
    DeltaBaseError,
    DeltaDamagedError,
    DeltaError,
    DeltaForkError,
    DeltaGapError,
    DeltaRepeatedError,
    DeltaShapeError,
)
from shared.weights.layout import Tensors
from shared.weights.state import TensorState

CREATED = "2026-11-30T00:00:00Z"
Groups = dict[str, Tensors]


def groups_of(rng: np.random.Generator) -> Groups:
    return {
        "tables/item": {"weight": rng.random((20, 4), np.float32)},
        "tables/user": {"weight": rng.integers(0, 255, (9, 6), np.uint8), "scale": rng.random(9, np.float32)},
        "dense": {"w": rng.random((3, 5), np.float32), "empty": np.zeros((0, 2), np.float32)},
    }


def changed(groups: Groups, rng: np.random.Generator) -> Groups:
    """A training step: some rows, sometimes a dense tensor, sometimes values whose bits matter (NaN, -0)."""
    after = {group: {name: array.copy() for name, array in part.items()} for group, part in groups.items()}
    rows = rng.integers(0, 20, rng.integers(0, 6))
    after["tables/item"]["weight"][rows] = rng.random((len(rows), 4), np.float32)
    after["tables/user"]["weight"][rng.integers(0, 9)] = rng.integers(0, 255, 6)
    if rng.random() < 0.3:
        after["dense"]["w"][1] = rng.random(5, np.float32)
        after["tables/user"]["scale"][2] = rng.random()
    if rng.random() < 0.1:
        after["tables/item"]["weight"].view(np.uint32)[3, 1] = rng.choice([0x7FC00001, 0x80000000, 0xFF800000])
    return after


def bits(groups: Groups) -> dict[tuple[str, str], bytes]:
    return {(group, name): array.tobytes() for group, part in groups.items() for name, array in part.items()}


def delta_of(**changes: Any) -> Delta:
    rows = {"tables/item/weight": RowDelta(np.array([1, 5], np.int64), np.ones((2, 4), np.float32))}
    whole = {"dense/w": np.zeros((3, 5), np.float32)}
    return replace(Delta("v", 1, 0, CREATED, rows, whole, {"golden": {"user": 1}}), **changes)


@settings(max_examples=3)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_base_and_a_thousand_deltas_are_the_trainer_bit_for_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trainer = groups_of(rng)
    sender, receiver = TensorState("v", trainer, {}), TensorState("v", trainer, {})
    for sequence in range(1, 1001):
        trainer = changed(trainer, rng)
        delta = sender.step(trainer, CREATED)
        sender.apply(delta)
        receiver.apply(Delta.decode(delta.encode(), "v", sequence))
    assert bits(receiver.groups()) == bits(trainer)
    assert (receiver.sequence, receiver.crc) == (1000, sender.crc)


def test_only_what_changed_travels() -> None:
    rng = np.random.default_rng(0)
    before = groups_of(rng)
    state = TensorState("v", before, {"golden": {"a": 1}, "model": {}})
    after = {group: dict(part) for group, part in before.items()}
    after["tables/item"] = {"weight": before["tables/item"]["weight"].copy()}
    after["tables/item"]["weight"][[3, 17]] += 1
    delta = state.step(after, CREATED, {"golden": {"a": 2}, "model": {}})
    assert list(delta.rows) == ["tables/item/weight"]
    np.testing.assert_array_equal(delta.rows["tables/item/weight"].ids, [3, 17])
    assert delta.whole == {}
    assert delta.documents == {"golden": {"a": 2}}
    assert delta.num_rows == 2
    assert state.sequence == 0, "a step that is made is not taken"


def test_a_state_does_not_share_memory_with_what_it_was_made_of() -> None:
    trainer = groups_of(np.random.default_rng(0))
    state = TensorState("v", trainer, {})
    trainer["tables/item"]["weight"][4] = 7
    delta = state.step(trainer, CREATED)
    trainer["tables/item"]["weight"][4] = 8
    state.apply(delta)
    assert state.groups()["tables/item"]["weight"][4, 0] == 7


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g["dense"].pop("w"),
        lambda g: g["dense"].update(new=np.zeros(1)),
        lambda g: g["dense"].update(w=np.zeros((5, 3), np.float32)),
        lambda g: g["tables/item"].update(weight=np.zeros((21, 4), np.float32)),
        lambda g: g["tables/item"].update(weight=np.zeros((20, 4), np.float16)),
    ],
)
def test_another_form_of_the_weights_takes_a_version(change: Callable[[Groups], object]) -> None:
    groups = groups_of(np.random.default_rng(0))
    state = TensorState("v", groups, {})
    change(groups)
    with pytest.raises(DeltaShapeError, match="publish a version"):
        state.step(groups, CREATED)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"base": "w"}, DeltaBaseError, r"delta w\+1 is for weights w, these are v"),
        ({"sequence": 2}, DeltaGapError, "delta 1 of v is missing, 2 came: a full snapshot is needed"),
        ({"previous": 7}, DeltaForkError, "follows one of CRC-32 00000007, the last one applied has 00000000"),
        ({"whole": {"dense/x": np.zeros(1)}}, DeltaShapeError, "dense/x: the weights have no such tensor"),
        ({"whole": {"dense/w": np.zeros((3, 4), np.float32)}}, DeltaShapeError, r"is float32 \(3, 4\)"),
        ({"whole": {"dense/w": np.zeros((3, 5))}}, DeltaShapeError, r"is float64 \(3, 5\), the weights have float32"),
    ],
)
def test_a_delta_that_is_not_the_next_or_does_not_fit(
    changes: dict[str, Any], error: type[DeltaError], words: str
) -> None:
    groups = groups_of(np.random.default_rng(0))
    state = TensorState("v", groups, {})
    with pytest.raises(error, match=words) as caught:
        state.apply(delta_of(**changes))
    assert caught.value.context["version"] == "v" or error is DeltaShapeError
    assert bits(state.groups()) == bits(groups)
    assert (state.sequence, state.crc) == (0, 0)


def test_a_delta_applied_twice() -> None:
    state = TensorState("v", groups_of(np.random.default_rng(0)), {})
    state.apply(delta_of())
    with pytest.raises(DeltaRepeatedError, match=r"delta v\+1 was applied already, the last one is 1"):
        state.apply(delta_of())


@pytest.mark.parametrize("row", [-1, 20, 21, 2**40])
def test_rows_out_of_range(row: int) -> None:
    part = RowDelta(np.array([row], np.int64), np.ones((1, 4), np.float32))
    state = TensorState("v", groups_of(np.random.default_rng(0)), {})
    delta = delta_of(rows={"tables/item/weight": part})
    with pytest.raises(DeltaShapeError, match=rf"row must be in \[0, 20\), is {row}") as caught:
        state.apply(delta)
    assert caught.value.context["limit"] == 20
    assert caught.value.context["value"] == row


@pytest.mark.parametrize(
    ("ids", "values"),
    [
        (np.array([1, 1]), np.ones((2, 4), np.float32)),
        (np.array([2, 1]), np.ones((2, 4), np.float32)),
        (np.array([-1, 1]), np.ones((2, 4), np.float32)),
        (np.array([1]), np.ones((2, 4), np.float32)),
        (np.array([1, 2], np.int32), np.ones((2, 4), np.float32)),
        (np.array([[1, 2]]), np.ones((2, 4), np.float32)),
    ],
)
def test_ids_must_be_distinct_ascending_rows(ids: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
    with pytest.raises(DeltaShapeError, match="tables/item/weight: ids must be"):
        delta_of(rows={"tables/item/weight": RowDelta(ids, values)}).encode()


def test_what_is_written_is_what_is_read() -> None:
    delta = delta_of()
    again = Delta.decode(delta.encode(), "v", 1)
    assert again.encode() == delta.encode()
    assert (again.base, again.sequence, again.previous, again.created) == ("v", 1, 0, CREATED)
    assert again.documents == {"golden": {"user": 1}}
    np.testing.assert_array_equal(again.whole["dense/w"], delta.whole["dense/w"])
    assert again.crc == delta.crc == zlib.crc32(delta.payload)
    empty = Delta("v", 1, 0, CREATED)
    assert Delta.decode(empty.encode(), "v", 1).encode() == empty.encode()


@settings(max_examples=200)
@given(data=st.data())
def test_any_flipped_bit_and_any_cut_is_damage(data: st.DataObject) -> None:
    whole = delta_of().encode()
    if data.draw(st.booleans()):
        position = data.draw(st.integers(0, 8 * len(whole) - 1))
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
    else:
        damaged = bytearray(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(DeltaDamagedError, match=r"delta v\+1: "):
        Delta.decode(bytes(damaged), "v", 1)
    with pytest.raises(DeltaDamagedError):
        Delta.decode(whole + b"\0", "v", 1)


def sealed(payload: bytes) -> bytes:
    return struct.pack("<8sIIQ", b"RMDELTA1", zlib.crc32(payload), 0, len(payload)) + payload


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"1234567",
        (2**40).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}",
    ],
)
def test_a_right_checksum_over_nonsense_is_refused(payload: bytes) -> None:
    with pytest.raises(DeltaDamagedError, match="cannot be read"):
        Delta.decode(sealed(payload), "v", 1)


def test_a_second_form_of_the_same_content_is_refused() -> None:
    payload = delta_of().payload
    header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
    text = json.dumps(header, indent=1).encode()
    text += b" " * (-len(text) % 8)
    other = len(text).to_bytes(8, "little") + text + payload[8 + int.from_bytes(payload[:8], "little") :]
    with pytest.raises(DeltaDamagedError, match="not in the form"):
        Delta.decode(sealed(other), "v", 1)
    for cut in (payload + b"\0", payload[:-1]):
        with pytest.raises(DeltaDamagedError):
            Delta.decode(sealed(cut), "v", 1)


def test_rows_differ_by_their_bits() -> None:
    old = np.array([[0.0, 1.0], [np.nan, 2.0], [3.0, 4.0]], np.float32)
    new = np.array([[-0.0, 1.0], [np.nan, 2.0], [3.0, 4.0]], np.float32)
    np.testing.assert_array_equal(changed_rows(old, new), [0])
    assert len(changed_rows(np.zeros((0, 3)), np.zeros((0, 3)))) == 0
    assert len(changed_rows(np.zeros((3, 0)), np.zeros((3, 0)))) == 0


@pytest.mark.parametrize(
    ("base", "sequence", "stamp"), [("v", 0, "v"), ("v-1.a", 7, "v-1.a+7"), ("v", 10**7, "v+10000000")]
)
def test_stamps(base: str, sequence: int, stamp: str) -> None:
    assert version_stamp(base, sequence) == stamp
    assert parse_stamp(stamp) == (base, sequence)


@pytest.mark.parametrize("text", ["", "+1", "v+", "v+0", "v+01", "v+1+2", "v+123456789", "v+-1", "../v+1", "v +1"])
def test_what_is_no_stamp(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        parse_stamp(text)


# ---------------------------------------------------------------- the log


def series(store: WeightStore, num: int) -> tuple[DeltaLog, list[Delta]]:
    rng = np.random.default_rng(1)
    trainer = groups_of(rng)
    with store.writer("v") as writer:
        for group, part in trainer.items():
            writer.add_tensors(group, part)
        writer.commit()
    state, log, deltas = TensorState("v", trainer, {}), DeltaLog(store, "v"), []
    for _ in range(num):
        trainer = changed(trainer, rng)
        deltas.append(state.step(trainer, CREATED))
        log.append(deltas[-1])
        state.apply(deltas[-1])
    return log, deltas


def test_a_log_gives_what_was_appended(store: WeightStore) -> None:
    log, deltas = series(store, 5)
    assert log.sequences() == [1, 2, 3, 4, 5]
    assert log.last() == (5, deltas[-1].crc)
    assert [delta.encode() for delta in log.since(0)] == [delta.encode() for delta in deltas]
    assert [delta.sequence for delta in log.since(3)] == [4, 5]
    assert [delta.sequence for delta in log.since(1, limit=2)] == [2, 3]
    assert list(log.since(5)) == []
    state = TensorState.of(store.open("v"), log.since(0))
    assert state.sequence == 5
    assert store.versions() == ["v"]
    assert store.incomplete() == {}, "deltas are not taken for a version"


def test_an_empty_log(store: WeightStore) -> None:
    log = DeltaLog(store, "v")
    assert log.sequences() == []
    assert log.last() == (0, 0)
    assert list(log.since(0)) == []
    with pytest.raises(DeltaGapError, match=r"delta v\+1 is missing"):
        log.read(1)
    with pytest.raises(WeightsError, match="version name"):
        DeltaLog(store, "../v")


def test_a_hole_in_the_log_asks_for_a_snapshot(store: WeightStore) -> None:
    log, _ = series(store, 4)
    store.fs.rm_file(f"{store.root}/deltas/v/00000002.delta")
    seen: list[int] = []
    with pytest.raises(DeltaGapError, match="delta 2 of v is missing, 3 is there: a full snapshot is needed") as caught:
        seen.extend(delta.sequence for delta in log.since(0))
    assert (caught.value.context["expected"], caught.value.context["found"]) == (2, 3)
    assert [delta.sequence for delta in log.since(2)] == [3, 4]


def test_what_is_not_next_is_not_written(store: WeightStore) -> None:
    log, deltas = series(store, 2)
    with pytest.raises(DeltaRepeatedError):
        log.append(deltas[1])
    with pytest.raises(DeltaGapError):
        log.append(Delta("v", 4, 0, CREATED))
    with pytest.raises(DeltaForkError):
        log.append(Delta("v", 3, 1, CREATED))
    with pytest.raises(DeltaBaseError):
        log.append(Delta("w", 3, deltas[1].crc, CREATED))
    assert log.sequences() == [1, 2]


def test_two_writers_cannot_take_the_same_place(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    log, deltas = series(store, 2)
    slow = DeltaLog(store, "v")
    monkeypatch.setattr(slow, "last", lambda: (1, deltas[0].crc))  # it looked before the other one wrote
    with pytest.raises(DeltaRepeatedError, match="another writer was faster"):
        slow.append(Delta("v", 2, deltas[0].crc, CREATED))
    assert log.read(2).encode() == deltas[1].encode()
    assert len(store.fs.ls(f"{store.root}/deltas/v")) == 2, "nothing is left behind"


def test_a_pipe_in_the_log_is_not_waited_for(tmp_path: Path) -> None:
    log = DeltaLog(WeightStore(tmp_path), "v")
    log.append(Delta("v", 1, 0, "now"))
    os.mkfifo(tmp_path / "deltas" / "v" / "00000002.delta")
    with pytest.raises(DeltaDamagedError, match="is no regular file"):
        log.last()
    with pytest.raises(DeltaDamagedError, match="is no regular file"):
        log.read(2)


def test_values_that_are_no_numbers_are_not_written(store: WeightStore) -> None:
    log, values = DeltaLog(store, "v"), np.full((1, 2), np.nan, np.float32)
    with pytest.raises(DeltaShapeError, match="row 3 must be finite"):
        log.append(Delta("v", 1, 0, "now", {"tables/a/weight": RowDelta(np.array([3]), values)}))
    assert log.sequences() == []


def test_values_that_are_no_numbers_are_named() -> None:
    values = np.array([[1, 2], [np.nan, 0], [np.inf, 0]], np.float32)
    with pytest.raises(DeltaShapeError, match=r"tables/a/weight: row 5 must be finite"):
        Delta("v", 1, 0, "now", {"tables/a/weight": RowDelta(np.array([3, 5, 9]), values)}).check_numbers()
    with pytest.raises(DeltaShapeError, match=r"dense/w: must not hold NaN"):
        Delta("v", 1, 0, "now", {}, {"dense/w": values}).check_numbers()
    Delta("v", 1, 0, "now", {}, {"dense/mask": values[[0, 2]], "dense/n": np.arange(3)}).check_numbers()


def test_damage_in_the_log(store: WeightStore) -> None:
    log, deltas = series(store, 3)
    path = f"{store.root}/deltas/v/00000002.delta"
    whole = deltas[1].encode()
    for damaged in (b"", whole[:10], whole[:-1], whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]):
        store.fs.pipe_file(path, damaged)
        with pytest.raises(DeltaDamagedError, match=r"delta v\+2"):
            log.read(2)
    store.fs.pipe_file(path, deltas[0].encode())
    with pytest.raises(DeltaDamagedError, match=r"delta v\+2: holds delta v\+1"):
        log.read(2)
    store.fs.pipe_file(f"{store.root}/deltas/v/00000003.delta", whole[: ENVELOPE_BYTES - 1])
    with pytest.raises(DeltaDamagedError, match="an envelope takes"):
        log.last()


def test_a_delta_that_is_a_link_to_itself_is_damage(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    path = tmp_path / "deltas" / "v" / "00000001.delta"
    path.parent.mkdir(parents=True)
    path.symlink_to(path.name)
    with pytest.raises(DeltaDamagedError, match="is a link that leads to itself"):
        DeltaLog(store, "v").last()


def test_the_size_of_a_delta_is_bounded(store: WeightStore) -> None:
    series(store, 0)
    delta = delta_of()
    size = len(delta.encode())
    with pytest.raises(DeltaError, match=rf"has {size} bytes and number 1, limits {size - 1}"):
        DeltaLog(store, "v", bytes_max=size - 1).append(delta)
    DeltaLog(store, "v", bytes_max=size).append(delta)
    DeltaLog(store, "v", bytes_max=size).read(1)
    with pytest.raises(DeltaDamagedError, match=f"larger than the limit of {size - 1}"):
        DeltaLog(store, "v", bytes_max=size - 1).read(1)


async def test_deltas_go_with_their_version(store: WeightStore) -> None:
    series(store, 2)
    with store.writer("w") as writer:
        writer.add_json("model", {})
        writer.commit()
    removed = store.prune(1)
    assert DeltaLog(store, removed[0]).sequences() == []


def test_no_version_may_be_called_as_the_folder_of_the_deltas(store: WeightStore) -> None:
    with pytest.raises(WeightsError, match="deltas lie there"):
        store.writer("deltas")
