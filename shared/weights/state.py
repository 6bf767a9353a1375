"""The tensors of one state of a series: made of a version and its deltas, and compared to find the next delta."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shared.weights.deltas import Array, Delta, RowDelta, TensorSpec, changed_rows, same_bits, split_key, tensor_key
from shared.weights.errors import (
    DeltaBaseError,
    DeltaForkError,
    DeltaGapError,
    DeltaRepeatedError,
    DeltaShapeError,
)
from shared.weights.layout import Tensors
from shared.weights.reader import WeightReader

ROW_GROUPS: Final = ("tables/", "rows/")
"""Groups whose tensors change by rows, as trained and as served; others are sent whole."""


def check_next(delta: Delta, base: str, sequence: int, crc: int) -> None:
    """Check that a delta is the next one of a series.

    Args:
        delta: What came.
        base: Version of the series.
        sequence: Number of the last delta that was applied, 0 for none.
        crc: Its checksum, 0 for none.

    Raises:
        DeltaBaseError: it belongs to another version.
        DeltaRepeatedError: its number was applied already.
        DeltaGapError: deltas before it are missing.
        DeltaForkError: it follows another delta than the last one.
    """
    context: dict[str, Any] = {"version": base, "sequence": delta.sequence}
    if delta.base != base:
        message = f"delta {delta.stamp} is for weights {delta.base}, these are {base}"
        raise DeltaBaseError(message, **context, expected=base, found=delta.base)
    if delta.sequence <= sequence:
        message = f"delta {delta.stamp} was applied already, the last one is {sequence}"
        raise DeltaRepeatedError(message, **context, expected=sequence + 1, found=delta.sequence)
    if delta.sequence > sequence + 1:
        message = f"delta {sequence + 1} of {base} is missing, {delta.sequence} came: a full snapshot is needed"
        raise DeltaGapError(message, **context, expected=sequence + 1, found=delta.sequence)
    if delta.previous != crc:
        message = f"delta {delta.stamp} follows one of CRC-32 {delta.previous:08x}, the last one applied has {crc:08x}"
        raise DeltaForkError(message, **context, expected=crc, found=delta.previous)


class TensorState:
    """Tensors of one state, in memory of their own; for making snapshots and deltas, not for serving.

    Args:
        base: Version of the series.
        groups: group -> name -> array; copied.
        documents: Name -> JSON document.
        sequence: Number of the last delta that is in them.
        crc: Its checksum.
    """

    def __init__(
        self,
        base: str,
        groups: Mapping[str, Tensors],
        documents: Mapping[str, dict[str, Any]],
        sequence: int = 0,
        crc: int = 0,
    ) -> None:
        self.base = base
        self.sequence = sequence
        self.crc = crc
        self.documents = dict(documents)
        self._tensors: dict[str, Array] = {
            tensor_key(group, name): np.array(array) for group, part in groups.items() for name, array in part.items()
        }

    @classmethod
    def of(cls, reader: WeightReader, deltas: Iterable[Delta] = ()) -> TensorState:
        """Return a version after some of its deltas.

        Raises:
            WeightsError: the version is damaged, or a delta is not the next one or does not fit.
        """
        documents = {name: reader.json(name) for name in reader.manifest.documents}
        state = cls(reader.version, {group: reader.tensors(group) for group in reader.groups()}, documents)
        for delta in deltas:
            state.apply(delta)
        return state

    def groups(self) -> dict[str, Tensors]:
        """Return the tensors by group; arrays are shared, not copied."""
        groups: dict[str, Tensors] = {}
        for key, array in self._tensors.items():
            group, name = split_key(key)
            groups.setdefault(group, {})[name] = array
        return groups

    def specs(self) -> dict[str, TensorSpec]:
        """Return type and shape of every tensor."""
        return {key: (array.dtype, array.shape) for key, array in self._tensors.items()}

    def apply(self, delta: Delta) -> None:
        """Take the next step; a delta that is refused changes nothing.

        Raises:
            DeltaError: it is not the next one, or does not fit.
        """
        check_next(delta, self.base, self.sequence, self.crc)
        delta.check_fit(self.specs())
        for key, part in delta.rows.items():
            self._tensors[key][part.ids] = part.values
        for key, array in delta.whole.items():
            self._tensors[key] = np.array(array)
        self.documents |= delta.documents
        self.sequence, self.crc = delta.sequence, delta.crc

    def step(
        self,
        new: Mapping[str, Tensors],
        created: str,
        documents: Mapping[str, dict[str, Any]] | None = None,
        touched: Mapping[str, npt.NDArray[np.int64]] | None = None,
    ) -> Delta:
        """Return the delta from this state to another, without taking it.

        Args:
            new: group -> name -> array, the same tensors of the same types and shapes.
            created: Time of the delta.
            documents: Documents of the new state that go with its tensors; those that did not change are left out.
            touched: Tensor key -> int64, ascending, the only rows that may differ; tensors that are not in it are
                compared in full.

        Raises:
            DeltaShapeError: a tensor came, went, or changed its type or shape: that takes a version of its own.
        """
        given = {tensor_key(group, name): array for group, part in new.items() for name, array in part.items()}
        rows: dict[str, RowDelta] = {}
        whole: dict[str, Array] = {}
        for key in sorted(self._tensors.keys() | given.keys()):
            old, array = self._tensors.get(key), given.get(key)
            if old is None or array is None or (old.dtype, old.shape) != (array.dtype, array.shape):
                raise self._other_form(key, old, array)
            if key.startswith(ROW_GROUPS) and old.ndim > 1:
                if touched is not None and key in touched:
                    among = touched[key]
                    ids = among[changed_rows(old[among], array[among])]
                else:
                    ids = changed_rows(old, array)
                if len(ids):
                    rows[key] = RowDelta(ids, array[ids])
            elif not same_bits(old, array):
                whole[key] = np.array(array)
        told = {name: text for name, text in (documents or {}).items() if self.documents.get(name) != text}
        return Delta(self.base, self.sequence + 1, self.crc, created, rows, whole, told)

    def _other_form(self, key: str, old: Array | None, new: Array | None) -> DeltaShapeError:
        words = ["none" if array is None else f"{array.dtype} {array.shape}" for array in (old, new)]
        return DeltaShapeError(
            f"weights {self.base}: {key} was {words[0]} and is {words[1]}: publish a version, a delta cannot say this",
            version=self.base,
            sequence=self.sequence,
            tensor=key,
        )
