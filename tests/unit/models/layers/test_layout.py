"""The grid of candidate slots: every candidate has a place of its own, in a row of its own request."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from models.layers.attention import attend, attend_candidates
from models.layers.layout import SLOTS_MAX, CandidateLayout

_INDEX = st.lists(st.integers(0, 4), min_size=1, max_size=40)


@given(_INDEX)
def test_every_candidate_has_its_own_slot_in_its_request(index: list[int]) -> None:
    layout = CandidateLayout.of(torch.tensor(index), 5)
    assert layout.slot is not None
    assert len(set(layout.slot.tolist())) == len(index)
    assert 1 <= layout.num_slots <= SLOTS_MAX
    rows = layout.slot // layout.num_slots
    owner = rows if layout.grid_request is None else layout.grid_request[rows]
    assert owner.tolist() == index


@given(_INDEX, st.integers(0, 2**31))
def test_grid_attention_equals_one_candidate_at_a_time(index: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(2, len(index), 8, generator=generator)
    keys, values = torch.randn(2, 5, 6, 8, generator=generator)
    mask = torch.rand(5, 6, generator=generator) < 0.6
    mask[:, 0] = True
    layout = CandidateLayout.of(torch.tensor(index), 5)
    found = attend_candidates(queries, keys, values, mask, 2, layout)
    for candidate, request in enumerate(index):
        own = slice(request, request + 1)
        expected = attend(queries[:, candidate][None], keys[own], values[own], mask[own], 2)[0]
        torch.testing.assert_close(found[:, candidate], expected)


def test_a_single_request_needs_no_index() -> None:
    layout = CandidateLayout.of(torch.zeros(7, dtype=torch.int64), 1)
    assert layout.request_index is None
    state = torch.randn(1, 3, 4)
    assert layout.tokens(state).shape == (3, 1, 4)
