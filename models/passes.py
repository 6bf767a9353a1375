"""The passes of the network that ranking asks for, one request's alone or those of several requests as one.

A ranking is a course that yields the passes it needs and is sent their logits. What drives it decides how a pass runs:
``alone`` cuts it into micro-batches, ``together`` joins the passes of several courses whose tensors fit. A course that
fails ends with its own error and leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from models.layers.layout import CandidateLayout
from shared.errors import RankMeshError

ResultT = TypeVar("ResultT")


class Network(Protocol):
    """What runs a pass: ``RankingNetwork``, or its packed form."""

    def first_pass(self, state: dict[str, Tensor], pooled: Tensor, counters: Tensor, layout: CandidateLayout) -> Tensor:
        """See ``RankingNetwork.first_pass``."""
        ...

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
        """See ``RankingNetwork.full_pass``."""
        ...


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over candidates of one request.

    Args:
        depth: Interaction layers, 0: the first pass.
        state: The user state, each tensor with a batch axis of 1.
        pooled: [C, F, D].
        counters: [C, counters].
        speculative: [C, E], None: none.
        levels: int64 [C], None: none.
        first: Logits [C, O] of the first pass over the same candidates, which a deeper one adds to; None: not known.
    """

    depth: int
    state: dict[str, Tensor]
    pooled: Tensor
    counters: Tensor
    speculative: Tensor | None = None
    levels: Tensor | None = None
    first: Tensor | None = None

    @property
    def fits(self) -> Hashable:
        """What passes must have in common to run as one."""
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(self.state.items()))
        return self.depth, self.speculative is None, self.first is None, shapes


Course: TypeAlias = Generator[Pass, Tensor, ResultT]
"""Yields passes, is sent their logits [C, O], returns its result."""


def _go_on() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Steps:
    """Where work may be ended before its end.

    Args:
        micro_batch: Candidates that a full pass takes at a time.
        checkpoint: Called between passes and between micro-batches; what it raises ends the work.
    """

    micro_batch: int = 2**31
    checkpoint: Callable[[], None] = _go_on


WHOLE = Steps()
"""Every pass in one piece, to the end."""


def alone(network: Network, course: Course[ResultT], steps: Steps = WHOLE) -> ResultT:
    """Drive one course to its result."""
    wanted = next(course)
    while True:
        logits = _run(network, wanted, steps)
        try:
            wanted = course.send(logits)
        except StopIteration as done:
            result: ResultT = done.value
            return result
        steps.checkpoint()


def together(
    network: Network, courses: Sequence[Course[ResultT]], steps: Steps = WHOLE
) -> list[ResultT | RankMeshError]:
    """Drive several courses side by side, passes that fit as one; return result or error of each, in order."""
    outcomes: dict[int, ResultT | RankMeshError] = {}
    wanted: dict[int, Pass] = {}

    def move(index: int, logits: Tensor | None) -> None:
        try:
            wanted[index] = next(courses[index]) if logits is None else courses[index].send(logits)
        except StopIteration as done:
            outcomes[index] = done.value
        except RankMeshError as error:
            outcomes[index] = error

    for index in range(len(courses)):
        move(index, None)
    while wanted:
        groups: dict[Hashable, list[int]] = {}
        for index, each in wanted.items():
            groups.setdefault(each.fits, []).append(index)
        made: dict[int, Tensor] = {}
        for group in groups.values():
            made |= dict(zip(group, _run_as_one(network, [wanted[index] for index in group], steps), strict=True))
        wanted.clear()
        for index, logits in made.items():
            move(index, logits)
        if wanted:
            steps.checkpoint()
    return [outcomes[index] for index in range(len(courses))]


def _run(network: Network, wanted: Pass, steps: Steps) -> Tensor:
    count = len(wanted.pooled)
    if wanted.depth == 0:
        return network.first_pass(wanted.state, wanted.pooled, wanted.counters, CandidateLayout.single(count))
    parts = []
    for begin in range(0, count, steps.micro_batch):
        if begin:
            steps.checkpoint()
        own = slice(begin, begin + steps.micro_batch)
        vectors, levels, first = (
            None if part is None else part[own] for part in (wanted.speculative, wanted.levels, wanted.first)
        )
        pooled, layout = wanted.pooled[own], CandidateLayout.single(len(wanted.pooled[own]))
        counters = wanted.counters[own]
        parts.append(network.full_pass(wanted.state, pooled, counters, vectors, levels, layout, wanted.depth, first))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _run_as_one(network: Network, passes: Sequence[Pass], steps: Steps) -> list[Tensor]:
    if len(passes) == 1:
        return [_run(network, passes[0], steps)]
    counts = [len(each.pooled) for each in passes]
    state = {name: torch.cat([each.state[name] for each in passes]) for name in passes[0].state}
    owner = torch.repeat_interleave(torch.arange(len(passes)), torch.tensor(counts))
    layout = CandidateLayout.of(owner, len(passes))
    pooled, counters = torch.cat([each.pooled for each in passes]), torch.cat([each.counters for each in passes])
    if passes[0].depth == 0:
        logits = network.first_pass(state, pooled, counters, layout)
    else:
        vectors, levels, first = (
            torch.cat(parts) if parts else None
            for parts in (
                [each.speculative for each in passes if each.speculative is not None],
                [each.levels for each in passes if each.levels is not None],
                [each.first for each in passes if each.first is not None],
            )
        )
        logits = network.full_pass(state, pooled, counters, vectors, levels, layout, passes[0].depth, first)
    return list(torch.split(logits, counts))
