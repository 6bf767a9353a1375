"""A trainer that never comes to rest: deltas that move rows and networks, and the oracle's view of every state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.golden import DOCUMENT, GROUP, GoldenRequest, add_golden
from models.source import MemorySource
from models.stations import DENSE_GROUP, NETWORK_PREFIX
from shared.weights import WeightStore
from shared.weights.delta_log import DeltaLog
from shared.weights.deltas import Delta, parse_stamp, version_stamp
from shared.weights.layout import Tensors
from shared.weights.state import TensorState

STEP = 0.05
"""Standard deviation of what a step adds to a row: far over the tolerance of an answer."""

DENSE_STEP = 0.01
"""Largest share by which a step scales a tensor of the network."""


class Drift:
    """Makes the deltas that follow the newest state of a version.

    Args:
        store: Where the version and its deltas are.
        base: The version.
        golden: Answered anew by each delta that moves the network.
        seed: Of what is moved.
        tables: Tables whose rows move.
    """

    def __init__(
        self,
        store: WeightStore,
        base: str,
        golden: GoldenRequest,
        seed: int,
        tables: Sequence[str] = ("item", "user"),
    ) -> None:
        self._log = DeltaLog(store, base)
        self._state = TensorState.of(store.open(base), self._log.since(0))
        self._golden = golden
        self._rng = np.random.default_rng(seed)
        self._tables = tables

    def rows(self, num_rows: int) -> Delta:
        """Return the next delta: up to ``num_rows`` rows of each table move; row 0 stays, which no id has."""
        groups = self._state.groups()
        for table in self._tables:
            weight = groups[f"tables/{table}"]["weight"].copy()
            ids = 1 + self._rng.permutation(len(weight) - 1)[:num_rows]
            weight[ids] += self._rng.normal(0, STEP, (len(ids), weight.shape[1])).astype(np.float32)
            groups[f"tables/{table}"] = {"weight": weight}
        return self._taken(groups, {})

    def network(self) -> Delta:
        """Return the next delta: every tensor of the network is scaled a little; it brings its golden answers."""
        groups = self._state.groups()
        groups[DENSE_GROUP] = {
            name: self._scaled(array) if name.startswith(NETWORK_PREFIX) and array.dtype == np.float32 else array
            for name, array in groups[DENSE_GROUP].items()
        }
        source = MemorySource(self._state.base, groups, dict(self._state.documents))
        add_golden(source, self._golden)
        return self._taken(source.groups, {DOCUMENT: source.documents[DOCUMENT]})

    def wrong(self) -> Delta:
        """Return the next delta, which brings golden answers that the weights do not give."""
        groups = self._state.groups()
        groups[GROUP] = {
            name: array + 1 if name.startswith(("scores.", "rows.", "state.")) else array
            for name, array in groups[GROUP].items()
        }
        return self._taken(groups, {})

    def append(self, delta: Delta) -> None:
        """Publish a delta that was made."""
        self._log.append(delta)

    def _scaled(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.multiply(array, np.float32(1 + self._rng.uniform(-DENSE_STEP, DENSE_STEP)))

    def _taken(self, groups: dict[str, Tensors], documents: dict[str, dict[str, object]]) -> Delta:
        delta = self._state.step(groups, "drift", documents)
        self._state.apply(delta)
        return delta


class States:
    """The states of a store's versions as sources, for an oracle; read from the log, in order.

    Args:
        store: The store.
    """

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._states: dict[str, TensorState] = {}

    def source(self, stamp: str) -> MemorySource:
        """Return the weights of a stamp; asking for them in ascending order reads every delta once."""
        base, sequence = parse_stamp(stamp)
        state = self._states.get(base)
        if state is None or state.sequence > sequence:
            state = self._states[base] = TensorState.of(self._store.open(base))
        for delta in DeltaLog(self._store, base).since(state.sequence, sequence - state.sequence):
            state.apply(delta)
        if state.sequence != sequence:
            raise ValueError(f"{stamp} is not in the log, it ends at {version_stamp(base, state.sequence)}")
        groups = {name: dict(part) for name, part in state.groups().items()}
        return MemorySource(stamp, groups, dict(state.documents))
