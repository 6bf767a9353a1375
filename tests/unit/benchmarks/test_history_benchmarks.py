"""The parts of the history benchmarks that decide what they say: cuts, fits, worlds and counts."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from benchmarks.models.length import cut, draw, every_request, power_law
from benchmarks.models.oneseq import FORMS, SIGNALS, OperatorCount, Reader, SmallRanker, World, batch_of, of_source
from tests.helpers.tiny_dataset import tiny_dataset
from training.data import HistoryReader, request_batches, request_starts
from training.indexing import streaming_counters


@pytest.mark.parametrize("length", [0, 3, 20, 100])
def test_a_cut_history_is_a_short_one_that_hides_how_long_it_was(length: int) -> None:
    log, rows = tiny_dataset().log, tiny_dataset().split.test.select(slice(0, 300))
    (whole,) = request_batches(rows, HistoryReader(log, 40, "strict", align="right"), 1_000)
    found = cut(whole, length).history
    expected = HistoryReader(log, max(length, 1), "strict", align="right").read_at(whole.user_index, whole.timestamp_s)
    width = min(int(expected.lengths.max()), 40) if length else 0
    assert found.item_ids.shape[1] == width == min(length, 40)
    assert found.mask.sum(axis=1).tolist() == np.minimum(expected.lengths, width).tolist()
    assert found.lengths.tolist() == found.num_total.tolist() == np.minimum(expected.num_total, width).tolist()
    if 0 < length <= 40:
        for field in ("item_ids", "ratings", "timestamps_s", "mask"):
            assert getattr(found, field).tolist() == getattr(expected, field).tolist()


def test_each_request_may_be_cut_to_a_length_of_its_own() -> None:
    log, rows = tiny_dataset().log, tiny_dataset().split.test.select(slice(0, 100))
    (whole,) = request_batches(rows, HistoryReader(log, 40, "strict", align="right"), 1_000)
    lengths = np.arange(whole.num_requests) % 12
    found = cut(whole, lengths).history
    for place, length in enumerate(lengths.tolist()):
        alone = cut(whole, length).history
        kept = min(length, int(whole.history.lengths[place]))
        assert found.lengths[place] == found.num_total[place] == kept == found.mask[place].sum()
        newest = slice(found.item_ids.shape[1] - kept, None)
        expected = slice(alone.item_ids.shape[1] - kept, None)
        assert found.item_ids[place, newest].tolist() == alone.item_ids[place, expected].tolist()
        assert not found.item_ids[place, : newest.start].any()


def test_every_third_request_is_whole() -> None:
    rows = tiny_dataset().split.test
    starts, chosen = request_starts(rows), every_request(rows, 3)
    bounds = [*starts.tolist(), len(rows)]
    expected = [place for begin, end in list(itertools.pairwise(bounds))[::3] for place in range(begin, end)]
    assert chosen.event_position.tolist() == rows.event_position[expected].tolist()


def test_a_power_law_is_found_again() -> None:
    lengths = [10, 30, 100, 300]
    scale, exponent, residual = power_law(lengths, [0.9 * length**-0.02 for length in lengths])
    assert scale == pytest.approx(0.9)
    assert exponent == pytest.approx(0.02)
    assert residual == pytest.approx(0.0, abs=1e-9)
    _, _, rough = power_law(lengths, [0.9, 0.8, 0.95, 0.7])
    assert rough > 0.05


def small_world() -> World:
    dataset = tiny_dataset()
    log = dataclasses.replace(dataset.log, surface=(dataset.log.rating < 4).astype(np.uint8))
    split = dataset.split
    num_items = int(log.item_id.max()) + 1
    return World("signals", log, SIGNALS, split.train, {"all": split.test}, num_items, streaming_counters(log))


def test_one_source_alone_has_its_events_in_order() -> None:
    log = small_world().log
    parts = [of_source(log, number) for number in range(2)]
    assert sum(len(part) for part in parts) == len(log)
    assert (parts[0].rating >= 4).all()
    assert (parts[1].rating < 4).all()
    assert not parts[1].surface.any()


def test_both_forms_read_the_same_newest_events_and_merged_takes_fewer_operators() -> None:
    world = small_world()
    rows = world.test["all"].select(slice(0, 50))
    counts = {}
    for form in FORMS:
        inputs = batch_of(world, Reader(world, form), rows)
        model = SmallRanker(world, form).eval()
        with torch.inference_mode(), OperatorCount() as operators:
            assert model(*inputs).shape == (50,)
        counts[form] = operators.count
        assert len(inputs[2]) == (1 if form == "merged" else 2)
    assert counts["merged"] < counts["separate"]


def test_the_chart_is_drawn(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("chart") / "length.svg"
    draw([10, 100], {"alike": [0.81, 0.8], "aged": [0.81, 0.79]}, path)
    assert "history length" in path.read_text(encoding="utf-8")
