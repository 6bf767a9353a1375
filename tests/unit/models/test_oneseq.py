"""One sequence out of several sources: stable in time, selective, and each event embedded by its own source alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from models.oneseq import EventSourceConfig, OneSeq, OneSeqConfig, merge_histories, select_events
from shared.schema.user import UserHistory

WIDTH = 4
TWO = OneSeqConfig(
    sources=(EventSourceConfig(name="feed"), EventSourceConfig(name="search", features=("item", "gap"), max_events=2)),
    length=5,
)


def history(times: list[int], first_item: int, total: int | None = None) -> UserHistory:
    num = len(times)
    return UserHistory(
        item_keys=np.arange(first_item, first_item + num),
        weights=np.arange(num, dtype=np.float32),
        timestamps_s=np.array(sorted(times), np.int64),
        num_total=num if total is None else total,
        profile={f"of{first_item}": "x"},
    )


@given(parts=st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=4))
def test_merging_equals_a_stable_sort(parts: list[list[int]]) -> None:
    histories = [history(times, 100 * number) for number, times in enumerate(parts)]
    merged = merge_histories(histories)
    expected = sorted(
        (
            (int(one.timestamps_s[place]), number, int(one.item_keys[place]))
            for number, one in enumerate(histories)
            for place in range(len(one))
        ),
        key=lambda event: event[0],
    )
    assert merged.sources is not None
    columns = (merged.timestamps_s, merged.sources, merged.item_keys)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert merged.num_total == len(expected)


def test_merging_needs_something() -> None:
    with pytest.raises(ValueError, match="at least one"):
        merge_histories([])
    both = merge_histories([history([1], 0, total=7), history([], 100, total=2)])
    assert (len(both), both.num_total, both.profile) == (1, 9, {"of0": "x", "of100": "x"})


@given(sources=st.lists(st.integers(0, 3), max_size=20))
def test_selection_keeps_the_newest_of_each_source(sources: list[int]) -> None:
    chosen = select_events(np.array(sources, np.uint8), TWO).tolist()
    search = [place for place, source in enumerate(sources) if source == 1][-2:]
    feed = [place for place, source in enumerate(sources) if source == 0]
    assert chosen == sorted(feed + search)[-TWO.length :]


def test_a_source_can_be_left_out() -> None:
    config = OneSeqConfig(sources=(EventSourceConfig(name="a", max_events=0), EventSourceConfig(name="b")))
    assert select_events(np.array([0, 1, 0, 1], np.uint8), config).tolist() == [1, 3]


def inputs(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 6)
    return [
        torch.randn(*shape, WIDTH, generator=generator),
        torch.randint(0, 11, shape, generator=generator),
        torch.randint(0, 60, shape, generator=generator),
        torch.randint(0, 3, shape, generator=generator),
        torch.rand(shape, generator=generator) < 0.7,
    ]


def test_every_event_is_embedded_by_its_source() -> None:
    torch.manual_seed(0)
    module = OneSeq(TWO, WIDTH)
    items, weights, gaps, sources, mask = inputs(1)
    tokens = module(items, weights, gaps, sources, mask)
    for row in range(3):
        for place in range(6):
            source = int(sources[row, place])
            if not mask[row, place] or source > 1:
                assert not tokens[row, place].any()
                continue
            parts = [items[row, place], module.weights[weights[row, place]], module.gaps[gaps[row, place]]]
            seen = torch.cat(parts if source == 0 else [parts[0], parts[2]])
            expected = module.networks[source](seen) + module.sources[source]
            torch.testing.assert_close(tokens[row, place], expected)


def test_what_a_source_does_not_say_changes_nothing() -> None:
    module = OneSeq(TWO, WIDTH)
    items, weights, gaps, sources, mask = inputs(2)
    search = sources == 1
    one = module(items, weights, gaps, sources, mask)
    two = module(items, torch.where(search, (weights + 3) % 11, weights), gaps, sources, mask)
    assert torch.equal(one, two)
    three = module(items, (weights + 3) % 11, gaps, sources, mask)
    assert not torch.equal(one, three)


def test_all_parts_learn() -> None:
    module = OneSeq(TWO, WIDTH)
    module(*inputs(3)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())


def test_configuration_that_cannot_be_used() -> None:
    with pytest.raises(ValidationError, match="distinct"):
        OneSeqConfig(sources=(EventSourceConfig(name="a"), EventSourceConfig(name="a")))
    with pytest.raises(ValidationError, match="at least one"):
        EventSourceConfig(name="a", features=())
