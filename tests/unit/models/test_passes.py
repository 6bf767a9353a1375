"""A full pass gets the first pass's logits of its own candidates, alone, in micro-batches and joined with others."""

from __future__ import annotations

import torch
from torch import Tensor

from models.layers.layout import CandidateLayout
from models.passes import Course, Pass, Steps, alone, together


class _Echo:
    """A network whose full pass answers what it was given of the first one; it must never compute one itself."""

    def __init__(self) -> None:
        self.num_first = 0

    def first_pass(self, state: dict[str, Tensor], pooled: Tensor, counters: Tensor, layout: CandidateLayout) -> Tensor:
        self.num_first += 1
        return pooled[:, 0] + layout.rows(state["user"])

    def full_pass(
        self,
        state: dict[str, Tensor],
        pooled: Tensor,
        counters: Tensor,
        speculative: Tensor | None,
        levels: Tensor | None,
        layout: CandidateLayout,
        depth: int | None = None,
        first: Tensor | None = None,
    ) -> Tensor:
        assert first is not None
        return torch.cat([first, pooled[:, 0]], dim=1)


def _course(user: float, count: int) -> Course[Tensor]:
    state = {"user": torch.full((1, 2), user)}
    pooled, counters = torch.arange(2.0 * count).view(count, 1, 2), torch.zeros(count, 3)
    first = yield Pass(0, state, pooled, counters)
    chosen = torch.arange(count - 1, -1, -1)
    logits = yield Pass(2, state, pooled[chosen], counters[chosen], first=first[chosen])
    return logits


def test_each_candidate_keeps_its_own_first_pass() -> None:
    network = _Echo()
    for steps in (Steps(), Steps(micro_batch=2)):
        found = alone(network, _course(100.0, 5), steps)
        assert torch.equal(found[:, :2], found[:, 2:] + 100)
    both = together(network, [_course(100.0, 5), _course(200.0, 3)])
    for user, each in zip((100, 200), both, strict=True):
        assert isinstance(each, Tensor)
        assert torch.equal(each[:, :2], each[:, 2:] + user)
    assert network.num_first == 3  # one a pass, not one a micro-batch
