"""CandidateLayout: which request each candidate belongs to, and how shared execution indexes it.

A serving batch has one request: its state is broadcast, nothing is indexed. A training batch has many requests with few
candidates each: per-request tensors are gathered per candidate, except keys and values, which are many times larger;
for those the candidates' queries are laid out on a grid of requests and slots instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

SLOTS_MAX = 4
"""Slots of one grid row; a request with more candidates takes several grid rows, so that one large request does not
widen the grid of all others."""


@dataclass(frozen=True, slots=True)
class CandidateLayout:
    """Layout of C candidates of B requests.

    Args:
        num_requests: B.
        num_candidates: C.
        request_index: int64 [C], None for a single request.
        grid_request: int64 [grid rows], the request of each grid row; None: grid row ``r`` is request ``r``.
        slot: int64 [C], each candidate's own place in the flattened grid, None for a single request.
        num_slots: Slots of a grid row.
    """

    num_requests: int
    num_candidates: int
    request_index: Tensor | None = None
    grid_request: Tensor | None = None
    slot: Tensor | None = None
    num_slots: int = 0

    @classmethod
    def single(cls, num_candidates: int) -> Self:
        """Lay out the candidates of one request."""
        return cls(1, num_candidates)

    @classmethod
    def of(cls, request_index: Tensor, num_requests: int) -> Self:
        """Lay out C candidates of any mix of requests.

        Args:
            request_index: int64 [C] in ``[0, num_requests)``, any order; a request may have no candidate.
            num_requests: B.
        """
        num_candidates = len(request_index)
        if num_requests == 1:
            return cls.single(num_candidates)
        counts = torch.bincount(request_index, minlength=num_requests)
        num_slots = min(int(counts.max()) if num_candidates else 1, SLOTS_MAX)
        rows_of_request = (counts + num_slots - 1) // num_slots
        first_row = torch.cumsum(rows_of_request, 0) - rows_of_request
        # Place of a candidate among those of its request, in order of appearance.
        order = torch.argsort(request_index, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(num_candidates) - (torch.cumsum(counts, 0) - counts)[request_index[order]]
        row = first_row[request_index] + place // num_slots
        grid_request = None
        if not bool((rows_of_request == 1).all()):
            grid_request = torch.repeat_interleave(torch.arange(num_requests), rows_of_request)
        return cls(
            num_requests=num_requests,
            num_candidates=num_candidates,
            request_index=request_index,
            grid_request=grid_request,
            slot=row * num_slots + place % num_slots,
            num_slots=num_slots,
        )

    def rows(self, state: Tensor) -> Tensor:
        """Give each candidate its request's row: [B, ..] -> [C, ..], or [1, ..] of a single request to be broadcast."""
        return state if self.request_index is None else state.index_select(0, self.request_index)

    def tokens(self, state: Tensor) -> Tensor:
        """Give each candidate its request's tokens: [B, n, D] -> token-major [n, C, D] or [n, 1, D]."""
        return self.rows(state).transpose(0, 1)
