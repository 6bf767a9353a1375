"""Catalog: what the mesh knows of an item by its key, so that a request names items and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from models.source import Tensors, WeightSource, tensor
from shared.errors import WeightsError

GROUP = "catalog"


@dataclass(frozen=True, slots=True)
class ItemAttributes:
    """Attributes of N items.

    Args:
        genre_rows: int64 [T], rows of table ``genre``, jagged.
        genre_offsets: int64 [N + 1].
        year_rows: int64 [N], row of table ``year``.
        group_keys: int64 [N], key of the ad group, 0 when unknown.
        counters: float32 [N, number of counter features], see ``models.inputs``; 0 when unknown.
        known: bool [N], whether the catalog has the item.
    """

    genre_rows: npt.NDArray[np.int64]
    genre_offsets: npt.NDArray[np.int64]
    year_rows: npt.NDArray[np.int64]
    group_keys: npt.NDArray[np.int64]
    counters: npt.NDArray[np.float32]
    known: npt.NDArray[np.bool_]


class ItemCatalog:
    """Attributes of all items, ascending by key.

    Args:
        item_keys: int64 [I], strictly ascending.
        genre_rows: int64 [G], item ``i`` owns ``genre_rows[genre_offsets[i]:genre_offsets[i + 1]]``.
        genre_offsets: int64 [I + 1].
        year_rows: int64 [I].
        group_keys: int64 [I].
        counters: float32 [I, number of counter features].

    Raises:
        WeightsError: the arrays do not fit one another.
    """

    __slots__ = ("counters", "genre_offsets", "genre_rows", "group_keys", "item_keys", "year_rows")

    def __init__(
        self,
        item_keys: npt.NDArray[np.int64],
        genre_rows: npt.NDArray[np.int64],
        genre_offsets: npt.NDArray[np.int64],
        year_rows: npt.NDArray[np.int64],
        group_keys: npt.NDArray[np.int64],
        counters: npt.NDArray[np.float32],
    ) -> None:
        num_items = len(item_keys)
        if num_items > 1 and not bool((item_keys[1:] > item_keys[:-1]).all()):
            raise WeightsError("catalog item keys must be strictly ascending")
        sizes = (len(genre_offsets) - 1, len(year_rows), len(group_keys), len(counters))
        if any(size != num_items for size in sizes) or counters.ndim != 2:
            raise WeightsError(f"catalog arrays must describe {num_items} items each")
        if genre_offsets[0] != 0 or genre_offsets[-1] != len(genre_rows) or bool((np.diff(genre_offsets) < 0).any()):
            raise WeightsError(f"catalog genre offsets must rise from 0 to {len(genre_rows)}")
        self.item_keys = item_keys
        self.genre_rows = genre_rows
        self.genre_offsets = genre_offsets
        self.year_rows = year_rows
        self.group_keys = group_keys
        self.counters = counters

    @classmethod
    def from_weights(cls, source: WeightSource) -> Self:
        """Read the catalog of a weights version."""
        names = ("item_keys", "genre_rows", "genre_offsets", "year_rows", "group_keys")
        counters = tensor(source, GROUP, "counters", np.float32)
        keys, genre_rows, offsets, years, groups = (tensor(source, GROUP, name, np.int64) for name in names)
        return cls(keys, genre_rows, offsets, years, groups, counters)

    def __len__(self) -> int:
        """Number of items I."""
        return len(self.item_keys)

    def attributes(self, item_keys: npt.NDArray[np.int64]) -> ItemAttributes:
        """Return the attributes of N items; an unknown item has no genre, year row 0 and group 0.

        Args:
            item_keys: int64 [N].
        """
        if not len(self):
            nothing = np.zeros(len(item_keys), np.int64)
            offsets = np.zeros(len(item_keys) + 1, np.int64)
            counters = np.zeros((len(item_keys), self.counters.shape[1]), np.float32)
            return ItemAttributes(nothing[:0], offsets, nothing, nothing, counters, nothing.astype(np.bool_))
        found = np.minimum(np.searchsorted(self.item_keys, item_keys), len(self) - 1)
        known = self.item_keys[found] == item_keys
        counts = np.where(known, self.genre_offsets[found + 1] - self.genre_offsets[found], 0)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        # Position of every jagged value: start of its item's slice plus its place in it.
        source = np.repeat(self.genre_offsets[found] - offsets[:-1], counts) + np.arange(offsets[-1])
        return ItemAttributes(
            genre_rows=self.genre_rows[source],
            genre_offsets=offsets,
            year_rows=np.where(known, self.year_rows[found], 0),
            group_keys=np.where(known, self.group_keys[found], 0),
            counters=np.where(known[:, None], self.counters[found], np.float32(0.0)),
            known=known,
        )

    def tensors(self) -> Tensors:
        """Return the arrays under the names that ``from_weights`` reads."""
        return {
            "item_keys": self.item_keys,
            "genre_rows": self.genre_rows,
            "genre_offsets": self.genre_offsets,
            "year_rows": self.year_rows,
            "group_keys": self.group_keys,
            "counters": self.counters,
        }
