"""The trainer's side of in-place updates: what changed since the last delta, written as the next one.

What counts is the bits: a row is sent when they differ from what was sent before. ``TouchedRows`` only narrows where to
look, so that a large table is not compared in full: it hangs on the optimizer and knows which rows had a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from models.embedding.tables import ReferenceTables, group
from shared.clock import Clock, SystemClock
from shared.errors import WeightsError
from shared.weights import WeightReader, WeightStore
from shared.weights.delta_log import DeltaLog
from shared.weights.deltas import Delta, tensor_key
from shared.weights.layout import Tensors
from shared.weights.state import TensorState

CHANGING_DOCUMENTS: Final = ("golden",)
"""Documents that say what the tensors must answer, and so change with them."""

ROWS_TENSOR: Final = "weight"


class TouchedRows:
    """Marks the rows of tables that an optimizer may have changed.

    Args:
        tables: The tables.
        momentum: Whether a row goes on moving after its gradient has gone, as with Adam: then it stays marked.
    """

    def __init__(self, tables: ReferenceTables, *, momentum: bool) -> None:
        self._weights: dict[str, nn.Parameter] = dict(tables.weights.items())
        self._momentum = momentum
        self._marks = {name: torch.zeros(len(weight), dtype=torch.bool) for name, weight in self._weights.items()}

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Mark at every step of an optimizer from now on; ``remove()`` of what is returned ends it."""
        return optimizer.register_step_pre_hook(lambda *_: self.mark())

    def mark(self) -> None:
        """Mark the rows that have a gradient now."""
        for name, weight in self._weights.items():
            if weight.grad is not None:
                self._marks[name][_rows_of(weight.grad)] = True

    def take(self) -> dict[str, npt.NDArray[np.int64]]:
        """Return tensor key -> int64, ascending, the marked rows; without momentum the marks are gone then."""
        found = {
            tensor_key(group(name), ROWS_TENSOR): marks.nonzero().squeeze(1).numpy()
            for name, marks in self._marks.items()
        }
        if not self._momentum:
            for marks in self._marks.values():
                marks.zero_()
        return found


def _rows_of(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        return gradient.coalesce().indices()[0]
    return gradient.abs().amax(dim=1) != 0


class DeltaPublisher:
    """Publishes a series of deltas.

    Args:
        state: What was published last: a version, or a version and its deltas so far.
        log: Where deltas go; None: nowhere, they are only returned.
        clock: Their time.
    """

    def __init__(self, state: TensorState, log: DeltaLog | None = None, clock: Clock | None = None) -> None:
        self._state = state
        self._log = log
        self._clock = clock or SystemClock()

    @property
    def state(self) -> TensorState:
        """What was published last."""
        return self._state

    def publish(
        self,
        groups: Mapping[str, Tensors],
        documents: Mapping[str, dict[str, Any]] | None = None,
        touched: Mapping[str, npt.NDArray[np.int64]] | None = None,
    ) -> Delta:
        """Publish what changed; the delta may be empty.

        Args:
            groups: group -> name -> array of the new state, such as ``TrainedModel.source().groups``.
            documents: Documents that go with it.
            touched: See ``TensorState.step``.

        Returns:
            The delta, whose ``stamp`` names the new state.

        Raises:
            DeltaShapeError: the form of the weights changed: that takes a version.
            DeltaError: another writer was faster.
            WeightsError: the store refuses.
        """
        created = datetime.fromtimestamp(self._clock.now_s(), UTC).isoformat()
        delta = self._state.step(groups, created, documents, touched)
        if self._log is not None:
            self._log.append(delta)
        self._state.apply(delta)
        return delta


def resume_series(store: WeightStore, base: str, clock: Clock | None = None) -> DeltaPublisher:
    """Return the publisher that goes on where the series of a version ends.

    Raises:
        WeightsError: the version or one of its deltas is missing or damaged.
    """
    log = DeltaLog(store, base)
    return DeltaPublisher(TensorState.of(store.open(base), log.since(0)), log, clock)


def publish_difference(store: WeightStore, base: str, target: WeightReader, clock: Clock | None = None) -> Delta:
    """Publish the step from the newest state of a version to another version as a delta.

    Args:
        store: Store of the version and its deltas.
        base: The version whose series goes on.
        target: The version whose tensors the new state has; of the same form.
        clock: Time of the delta.

    Returns:
        The delta; its state answers the golden request of ``target``.

    Raises:
        DeltaShapeError: the versions differ in form (tables of other sizes, other tensors).
        WeightsError: a version or delta is missing or damaged, or the store refuses.
    """
    groups = {name: target.tensors(name) for name in target.groups()}
    documents = {name: target.json(name) for name in CHANGING_DOCUMENTS if name in target.manifest.documents}
    return resume_series(store, base, clock).publish(groups, documents)


def publish_inverse(store: WeightStore, base: str, sequence: int, clock: Clock | None = None) -> Delta:
    """Publish the step back to an earlier state as the next delta, so that every replica takes it, late ones too.

    Args:
        store: Store of the version and its deltas.
        base: The version.
        sequence: Number of the state to go back to; 0: as published.
        clock: Time of the delta.

    Raises:
        WeightsError: there is no such earlier state, or a delta is missing or damaged.
    """
    publisher = resume_series(store, base, clock)
    if not 0 <= sequence < publisher.state.sequence:
        raise WeightsError(
            f"{base} has deltas up to {publisher.state.sequence}, there is no earlier state {sequence}",
            version=base,
            file="",
            limit=publisher.state.sequence,
            value=sequence,
        )
    earlier = TensorState.of(store.open(base), DeltaLog(store, base).since(0, limit=sequence))
    documents = {name: text for name, text in earlier.documents.items() if name in CHANGING_DOCUMENTS}
    return publisher.publish(earlier.groups(), documents)
