"""Between weights versions and ``LiveWeights``: what of a version a process holds, and a state as a version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from models.source import MemorySource, Tensors, WeightSource
from models.updates.arena import Array, Ids, MakeStorage
from models.updates.live import Build, Convert, LiveConfig, LiveState, LiveWeights, RowSelect
from shared.clock import Clock
from shared.errors import WeightsError
from shared.weights import WeightReader
from shared.weights.deltas import TensorSpec, tensor_key
from shared.weights.layout import DTYPES
from shared.weights.state import ROW_GROUPS


def held_rows(held: Mapping[str, Ids]) -> RowSelect:
    """Return the choice of the rows that a process holds, for any placement.

    Args:
        held: Tensor key -> int64 [local rows], the row of the whole table that lies at each place here; a row may lie
            at several (hot rows). Tensors that are not in it are held in full.
    """
    indexes = {key: (rows[order := np.argsort(rows, kind="stable")], order) for key, rows in held.items()}

    def select(key: str, ids: Ids) -> tuple[Ids, Ids]:
        if key not in indexes:
            return np.arange(len(ids)), ids
        rows, places = indexes[key]
        first, end = np.searchsorted(rows, ids), np.searchsorted(rows, ids, side="right")
        counts = end - first
        chosen = np.repeat(np.arange(len(ids)), counts)
        # Within each run of equal rows: 0, 1, .. from its first.
        steps = np.arange(len(chosen)) - np.repeat(np.cumsum(counts) - counts, counts)
        return chosen, places[first[chosen] + steps]

    return select


def tensor_specs(source: WeightSource) -> dict[str, TensorSpec]:
    """Return type and shape of every tensor of a version, without reading one.

    Raises:
        WeightsError: the source cannot list its tensors.
    """
    if isinstance(source, WeightReader):
        return {
            tensor_key(group, name): (DTYPES[entry.dtype], entry.shape)
            for group, file in source.manifest.files.items()
            for name, entry in file.tensors.items()
        }
    if isinstance(source, MemorySource):
        return {
            tensor_key(group, name): (array.dtype, array.shape)
            for group, part in source.groups.items()
            for name, array in part.items()
        }
    raise WeightsError(
        f"weights {source.version} of a {type(source).__name__} do not list their tensors",
        version=source.version,
        file="",
    )


def live_weights(
    source: WeightSource,
    groups: Iterable[str],
    config: LiveConfig | None = None,
    *,
    select: RowSelect | None = None,
    convert: Mapping[str, Convert] | None = None,
    build: Build | None = None,
    documents: Iterable[str] = (),
    make_storage: Mapping[str, MakeStorage] | None = None,
    clock: Clock | None = None,
) -> LiveWeights:
    """Return some groups of a version as weights that change while they serve.

    Args:
        source: The version.
        groups: Groups that this process holds; tables by rows, the rest as whole tensors.
        config: Limits.
        select: Which rows of tables it holds (``held_rows``); None: all.
        convert: Tensor key -> how its published rows become the stored ones (some columns, quantized).
        build: Makes what hangs on a state before it serves.
        documents: Documents that deltas may bring anew.
        make_storage: Tensor key -> what makes the storage of a table; others get numpy's own.
        clock: For the status.

    Raises:
        WeightsError: a group or document is missing.
    """
    tables: dict[str, Array] = {}
    whole: dict[str, Array] = {}
    for group in groups:
        for name, array in source.tensors(group).items():
            key = tensor_key(group, name)
            if not group.startswith(ROW_GROUPS) or array.ndim < 2:
                whole[key] = array
                continue
            stored = convert[key](array) if convert and key in convert else array
            if select is not None:
                chosen, local = select(key, np.arange(len(array)))
                part = np.empty((len(local), *stored.shape[1:]), stored.dtype)
                part[local] = stored[chosen]
                stored = part
            tables[key] = stored
    return LiveWeights(
        source.version,
        tables,
        whole,
        config,
        specs=tensor_specs(source),
        select=select,
        convert=convert,
        build=build,
        documents={name: source.json(name) for name in documents},
        make_storage=make_storage,
        clock=clock,
    )


class LiveSource:
    """A state as a ``WeightSource``: what it holds over what the version published.

    Args:
        base: The version.
        state: A state of it.
        in_part: Give the rows that the state holds of a table where it does not hold all, in its own order; else that
            is an error.
    """

    def __init__(self, base: WeightSource, state: LiveState, *, in_part: bool = False) -> None:
        self._base = base
        self._state = state
        self._in_part = in_part

    @property
    def version(self) -> str:
        """Stamp of the state."""
        return self._state.stamp

    def json(self, name: str) -> dict[str, Any]:
        """Return the JSON document ``name``.

        Raises:
            WeightsError: there is none.
        """
        return self._state.documents.get(name) or self._base.json(name)

    def tensors(self, group: str) -> Tensors:
        """Return all tensors of a group; tables are copied.

        Raises:
            WeightsError: there is no such group, or the state holds a part of it only.
        """
        tensors = dict(self._base.tensors(group))
        held = {*self._state.whole, *self._state.tables}
        for name, published in tensors.items():
            key = tensor_key(group, name)
            if key not in held:
                continue
            tensors[name] = self._state.array(key)
            if tensors[name].shape != published.shape and not self._in_part:
                raise WeightsError(
                    f"{key} of {self.version} is held in part: {tensors[name].shape} of {published.shape}",
                    version=self.version,
                    file=group,
                )
        return tensors
