"""Rows of one tensor in blocks, some of them spare: an update writes copies, readers follow a map of blocks.

The storage is one array that never moves, so that whatever holds its address (an embedding operator, a captured CUDA
graph) stays valid. A map says how far each block lies from the place that its row numbers name. An update copies the
blocks that it touches into free slots, changes the copies, and returns a new map; nobody sees the copies before they
get that map. Measured against a lock around lookups: readers never wait, and the map costs one more gather of 8 bytes
an id.

Shape letters: R rows, D the rest of a row's shape, U ids of a lookup, N rows of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shared.clock import SystemClock
from shared.errors import InvalidRequestError, OverloadedError

Array: TypeAlias = npt.NDArray[Any]
Ids: TypeAlias = npt.NDArray[np.int64]
MakeStorage: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], Array]

PIECE_BYTES: Final = 1 << 17
"""Blocks are copied in pieces of this size, and the interpreter lock is offered to readers after each: a lookup of
100 us must not wait for a copy of milliseconds."""

_CLOCK: Final = SystemClock()


@dataclass(frozen=True, slots=True)
class Written:
    """What an update of one arena gives.

    Args:
        moves: int64 [blocks], the new map.
        old_values: [N, D], the rows as they were.
        fresh: Slots that only the new map names.
        dead: Slots that the new map does not name any more.
    """

    moves: Ids
    old_values: Array
    fresh: tuple[int, ...]
    dead: tuple[int, ...]


class RowArena:
    """Storage of one tensor.

    Args:
        rows: [R, D] of any type; copied.
        block_rows: Rows of a block, a power of two.
        spare_blocks: Free slots: what one update touches, times the states that are kept, must fit.
        make_storage: Makes the array of a shape and type, for an operator that owns its memory; None: ``np.empty``,
            which asks for huge pages where ``np.zeros`` does not: lookups of scattered rows take a quarter less.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self, rows: Array, block_rows: int = 16, spare_blocks: int = 64, make_storage: MakeStorage | None = None
    ) -> None:
        if block_rows < 1 or block_rows & (block_rows - 1):
            raise ValueError(f"block_rows must be a power of two, is {block_rows}")
        if rows.ndim < 1 or spare_blocks < 1:
            raise ValueError(f"rows must be [R, ..] and spare_blocks at least 1, are {rows.shape} and {spare_blocks}")
        self._num_rows = len(rows)
        self._shift = block_rows.bit_length() - 1
        num_blocks = -(-len(rows) // block_rows)
        num_slots = num_blocks + spare_blocks
        self.storage = (make_storage or np.empty)((num_slots * block_rows, *rows.shape[1:]), rows.dtype)
        self.storage[: len(rows)] = rows
        self._blocks = self.storage.reshape(num_slots, block_rows, *rows.shape[1:])
        if not np.shares_memory(self._blocks, self.storage):
            raise ValueError("storage must be contiguous")
        self.moves: Ids = np.zeros(num_blocks, np.int64)
        """int64 [blocks], the map of the rows as given: row ``r`` lies at ``r + moves[r // block_rows]``."""
        self._free = list(range(num_blocks, num_slots))
        self.num_spare = spare_blocks

    @property
    def num_rows(self) -> int:
        """Rows R."""
        return self._num_rows

    @property
    def num_slots(self) -> int:
        """Places for blocks, spare ones included."""
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Free slots."""
        return len(self._free)

    @property
    def shift(self) -> int:
        """Binary logarithm of the rows of a block."""
        return self._shift

    def positions(self, moves: Ids, ids: Ids) -> Ids:
        """Return where rows lie in ``storage``: int64 [U] within ``[0, R)`` -> int64 [U].

        Args:
            moves: Map of the state that is read.
            ids: Rows.

        Raises:
            InvalidRequestError: a row is out of range.
        """
        # One pass for both ends: as unsigned, a negative row is larger than any table.
        if len(ids) and ids.view(np.uint64).max() >= self._num_rows:
            worst = int(ids.max()) if ids.max() >= self._num_rows else int(ids.min())
            raise InvalidRequestError(
                f"row must be in [0, {self._num_rows}), is {worst}", field="row", limit=self._num_rows, value=worst
            )
        return moved(moves, ids, self._shift)

    def lookup(self, moves: Ids, ids: Ids) -> Array:
        """Return rows of a state: int64 [U] -> [U, D].

        Raises:
            InvalidRequestError: a row is out of range.
        """
        return self.storage.take(self.positions(moves, ids), axis=0)

    def to_array(self, moves: Ids) -> Array:
        """Return all rows of a state: [R, D], a copy."""
        return self._blocks[self._slots(moves)].reshape(-1, *self.storage.shape[1:])[: self._num_rows]

    def touched(self, ids: Ids) -> int:
        """Return how many blocks an update of these rows takes."""
        return len(np.unique(ids >> self._shift))

    def write(self, moves: Ids, ids: Ids, values: Array) -> Written:
        """Write rows into copies of their blocks; readers of ``moves`` and of older maps see nothing of it.

        Args:
            moves: The newest map.
            ids: int64 [N], distinct rows within range.
            values: [N, D].

        Raises:
            OverloadedError: fewer slots are free than blocks are touched.
        """
        blocks = np.unique(ids >> self._shift)
        if len(blocks) > len(self._free):
            raise OverloadedError(
                f"an update of {len(blocks)} blocks needs as many free ones, {len(self._free)} are free",
                stage="update",
                limit=len(self._free),
                value=len(blocks),
                retry_after_s=1.0,
            )
        kept = len(self._free) - len(blocks)
        fresh = tuple(self._free[kept:])
        del self._free[kept:]
        try:
            old_slots, new_slots = self._slots(moves, blocks), np.array(fresh, np.int64)
            new_moves = moves.copy()
            new_moves[blocks] = (new_slots - blocks) << self._shift
            self._copy_blocks(old_slots, new_slots)
            places = self.positions(new_moves, ids)
            old_values = self.storage.take(places, axis=0)
            self._put(places, values)
        except BaseException:
            self.release(fresh)
            raise
        return Written(new_moves, old_values, fresh, tuple(old_slots.tolist()))

    def release(self, slots: Iterable[int]) -> None:
        """Give slots back that no map names any more."""
        self._free.extend(slots)

    def _slots(self, moves: Ids, blocks: Ids | None = None) -> Ids:
        """Return the slots of blocks, None: of all."""
        blocks = np.arange(len(moves)) if blocks is None else blocks
        return (moves[blocks] >> self._shift) + blocks

    def _copy_blocks(self, sources: Ids, targets: Ids) -> None:
        step = max(PIECE_BYTES // max(self._blocks[:1].nbytes, 1), 1)
        for start in range(0, len(sources), step):
            piece = slice(start, start + step)
            self._blocks[targets[piece]] = self._blocks[sources[piece]]
            _CLOCK.block_s(0.0)

    def _put(self, places: Ids, values: Array) -> None:
        self.storage[places] = values


def moved(moves: Ids, ids: Ids, shift: int) -> Ids:
    """Return where rows lie: map of blocks of ``2**shift`` rows, and int64 [U] rows in range -> int64 [U]."""
    places: Ids = moves.take(ids >> shift)
    places += ids
    return places
