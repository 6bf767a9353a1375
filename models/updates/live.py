"""LiveWeights: the states of a version and its deltas, switched by one pointer.

A reader takes ``LiveWeights.state`` once and uses it to the end of its request: rows of all tables, whole tensors, and
what was built from them (a network) belong to one stamp. An update prepares the next state beside the current one and
then flips the pointer; if anything fails before the flip, the old state goes on serving, and the status says why.

Slots of old blocks are free again when no state that names them is held by anybody: states are ordered by epoch, a
block is named by the states from its birth to its death, a dead state only notes its epoch, and the next update sweeps.
So a state that a reader holds for long costs the blocks that have changed since, once, however many updates come after
it; an update that finds no free block is refused, not the reader.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from pydantic import Field

from models.updates.arena import Array, Ids, MakeStorage, RowArena, Written, moved
from shared.clock import Clock, SystemClock
from shared.config import Config
from shared.errors import OverloadedError, RankMeshError, VersionMismatchError, WeightsError
from shared.weights.deltas import Delta, TensorSpec, parse_stamp, split_key, version_stamp
from shared.weights.errors import NEEDS_SNAPSHOT, DeltaGapError, DeltaTooLargeError
from shared.weights.state import check_next

RowSelect: TypeAlias = Callable[[str, Ids], tuple[Ids, Ids]]
"""Tensor key and rows -> positions of those rows that are held here, and where they lie here."""

Convert: TypeAlias = Callable[[Array], Array]
"""From published rows to stored ones, row by row."""


class LiveConfig(Config):
    """Limits of weights that change while they serve.

    Args:
        block_rows: Rows of a block, a power of two: small ones copy less an update, large ones need a smaller map.
        spare_share: Spare blocks as a share of all of a table's.
        spare_blocks_min: Least number of spare blocks, or ``keep_states`` times all blocks of a table with fewer: any
            update of a small table fits, whatever is held.
        keep_states: States that stay readable by their stamp, the current one included. An update that would need one
            more is refused while all of them are asked for (``LiveWeights.keep``).
        undo_bytes_max: Old values that are kept for roll-back; the oldest go first.
    """

    block_rows: int = Field(16, ge=1, le=65_536)
    spare_share: float = Field(0.25, ge=0, le=10)
    spare_blocks_min: int = Field(4096, ge=1)
    keep_states: int = Field(8, ge=1, le=1024)
    undo_bytes_max: int = Field(64 * 2**20, ge=0)

    def spare_blocks(self, num_rows: int) -> int:
        """Return the spare blocks of a table of so many rows."""
        blocks = -(-num_rows // self.block_rows)
        return max(int(blocks * self.spare_share), min(self.keep_states * blocks, self.spare_blocks_min), 1)

    def storage_rows(self, num_rows: int) -> int:
        """Return the rows of the storage of a table of so many rows, spare ones included."""
        return (-(-num_rows // self.block_rows) + self.spare_blocks(num_rows)) * self.block_rows


@dataclass(frozen=True, slots=True)
class UpdateStatus:
    """What a station reports about its updates.

    Args:
        stamp: State that serves.
        applied: Deltas applied.
        rolled_back: Deltas taken back.
        refused: Deltas that were refused or failed.
        reason: Why the last one was; empty once a later one is applied.
        needs_snapshot: Deltas are missing or belong to another series: only a full version helps.
        rows: Rows written.
        undo_from: Lowest sequence that a roll-back can reach.
        blocks_free: Free blocks of the table with the fewest.
        updated_s: Time of the last change, seconds since the epoch; 0 for none.
    """

    stamp: str
    applied: int = 0
    rolled_back: int = 0
    refused: int = 0
    reason: str = ""
    needs_snapshot: bool = False
    rows: int = 0
    undo_from: int = 0
    blocks_free: int = 0
    updated_s: float = 0.0


class LiveState:
    """One state, immutable; hold it for as long as its values are needed.

    Args:
        base: Version of the series.
        sequence: Deltas that are in it.
        crc: Checksum of the last of them.
        arenas: Tensor key -> storage of a table.
        moves: Tensor key -> map of its blocks.
        whole: Tensor key -> array.
        documents: Documents that deltas brought.
    """

    def __init__(
        self,
        base: str,
        sequence: int,
        crc: int,
        arenas: Mapping[str, RowArena],
        moves: dict[str, Ids],
        whole: dict[str, Array],
        documents: dict[str, dict[str, Any]],
    ) -> None:
        self.base = base
        self.sequence = sequence
        self.crc = crc
        self.stamp = version_stamp(base, sequence)
        self.moves = moves
        self.whole = whole
        self.documents = documents
        self.built: Any = None
        self._arenas = arenas

    @property
    def tables(self) -> tuple[str, ...]:
        """Keys of the tensors that are looked up by row."""
        return tuple(self._arenas)

    def differs(self, other: LiveState, *groups: str) -> bool:
        """Return whether a tensor of these groups was written between two states of the same weights."""
        return any(
            mine[key] is not theirs[key]
            for mine, theirs in ((self.whole, other.whole), (self.moves, other.moves))
            for key in mine
            if split_key(key)[0] in groups
        )

    def lookup(self, key: str, ids: Ids) -> Array:
        """Return rows of a table: int64 [U] -> [U, D].

        Raises:
            InvalidRequestError: a row is out of range.
        """
        return self._arenas[key].lookup(self.moves[key], ids)

    def positions(self, key: str, ids: Ids) -> Ids:
        """Return where rows lie in the storage of a table, for an operator that reads it itself: int64 [U] -> [U].

        Raises:
            InvalidRequestError: a row is out of range.
        """
        return self._arenas[key].positions(self.moves[key], ids)

    def places(self, key: str, ids: Ids) -> Ids:
        """Return ``positions`` of rows that are known to be in range: int64 [U] -> int64 [U]."""
        moves, arena = self.moves[key], self._arenas[key]
        return ids if moves is arena.moves else moved(moves, ids, arena.shift)

    def at_places(self, key: str, places: Ids) -> Array:
        """Return what lies at places of a table's storage: int64 [U] -> [U, D]."""
        return self._arenas[key].storage.take(places, axis=0)

    def storage_bytes(self, key: str) -> int:
        """Return the bytes of a table's storage, spare blocks included."""
        return self._arenas[key].storage.nbytes

    def array(self, key: str) -> Array:
        """Return a tensor as a whole; tables are copied."""
        if key in self._arenas:
            return self._arenas[key].to_array(self.moves[key])
        return self.whole[key]


Build: TypeAlias = Callable[[LiveState, LiveState | None], Any]
"""Makes what is derived from a state (a network); gets the state before too, to take over what did not change.

It must not keep the state itself: a cycle would hold the state's blocks until the garbage collector comes by.
"""


@dataclass(slots=True)
class _Undo:
    """What takes one delta back."""

    sequence: int
    crc: int
    rows: dict[str, tuple[Ids, Array]]
    whole: dict[str, Array]
    documents: dict[str, dict[str, Any]]
    num_bytes: int


@dataclass(slots=True)
class _Change:
    """A state in the making: the tensors that differ from the current one; of rows, what is added last stays."""

    added: dict[str, list[tuple[Ids, Array]]] = field(default_factory=dict)
    whole: dict[str, Array] = field(default_factory=dict)

    def rows(self) -> dict[str, tuple[Ids, Array]]:
        """Return the rows by tensor key, each row once."""
        return {key: _merged(parts) for key, parts in self.added.items()}


class LiveWeights:
    """The tensors that one process serves, and their updates; any number of readers, one update at a time.

    Args:
        base: Version of the series.
        tables: Tensor key -> rows held here, [R, D]; copied.
        whole: Tensor key -> tensors held here that are replaced as a whole; those that can be written to are copied.
        config: Limits.
        specs: Tensor key -> type and shape of every tensor of the version, also of those that are not held here; None:
            exactly those held here.
        select: Which rows of a delta are held here, and where; None: all, at their own place.
        convert: Tensor key -> how the rows of a delta become the stored ones (some columns, quantized).
        build: Makes what hangs on a state before it serves; its failure refuses the update.
        documents: Documents that deltas may bring anew.
        make_storage: Makes the storage of a table, by key; None: numpy's own.
        clock: For the status.
    """

    def __init__(
        self,
        base: str,
        tables: Mapping[str, Array],
        whole: Mapping[str, Array],
        config: LiveConfig | None = None,
        *,
        specs: Mapping[str, TensorSpec] | None = None,
        select: RowSelect | None = None,
        convert: Mapping[str, Convert] | None = None,
        build: Build | None = None,
        documents: Mapping[str, dict[str, Any]] | None = None,
        make_storage: Mapping[str, MakeStorage] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._config = config or LiveConfig()
        self._clock = clock or SystemClock()
        self._select = select or (lambda key, ids: (np.arange(len(ids)), ids))
        self._convert = dict(convert or {})
        self._build = build or (lambda state, before: None)
        held = {**tables, **whole}
        self._specs = dict(specs or {key: (array.dtype, array.shape) for key, array in held.items()})
        self._arenas = {
            key: RowArena(
                rows, self._config.block_rows, self._config.spare_blocks(len(rows)), (make_storage or {}).get(key)
            )
            for key, rows in tables.items()
        }
        self._lock = threading.Lock()
        self._epoch = 0
        self._alive: set[int] = set()
        self._dead_epochs: deque[int] = deque()
        self._born = {key: np.zeros(arena.num_slots, np.int64) for key, arena in self._arenas.items()}
        self._dead_slots: list[tuple[int, str, Ids]] = []
        self._undos: deque[_Undo] = deque()
        self._kept: dict[str, LiveState] = {}  # replaced, never changed: readers look things up in it at any time
        self._asked_for: frozenset[str] = frozenset()
        moves = {key: arena.moves for key, arena in self._arenas.items()}
        kept = {key: _immutable(array) for key, array in whole.items()}
        state = LiveState(base, 0, 0, self._arenas, moves, kept, dict(documents or {}))
        state.built = self._build(state, None)
        self._status = UpdateStatus(state.stamp)
        self._flip(state)

    @property
    def state(self) -> LiveState:
        """The state that serves; take it once a request."""
        return self._state

    def at(self, stamp: str) -> LiveState:
        """Return the state of a stamp, as long as it is kept.

        Raises:
            VersionMismatchError: it is not, or not yet.
        """
        if (state := self._kept.get(stamp)) is not None:
            return state
        held = self._state.stamp
        raise VersionMismatchError(f"asked for {stamp}, held is {held}", asked=stamp, held=held)

    def stamps(self) -> tuple[str, ...]:
        """Return the states that are kept, oldest first; the last one serves."""
        return tuple(self._kept)

    def keep(self, stamps: Collection[str]) -> None:
        """Let go of all kept states but these and the newest; updates will not let go of these.

        Args:
            stamps: States that requests may ask for.
        """
        with self._lock:
            self._asked_for = frozenset(stamps)
            newest = self._state.stamp
            self._kept = {key: state for key, state in self._kept.items() if key in self._asked_for or key == newest}

    def status(self) -> UpdateStatus:
        """Return what to report."""
        return self._status

    def apply(self, delta: Delta) -> LiveState:
        """Take the next step; see ``apply_all``."""
        return self.apply_all([delta])

    def apply_all(self, deltas: Sequence[Delta]) -> LiveState:
        """Take the next steps at once: one new state, that of the last; when it fails, the old state goes on serving.

        Args:
            deltas: One at least, in order.

        Raises:
            DeltaError: a delta is not the next one, does not fit, or holds what is no number.
            OverloadedError: so many old states are held that there is no room for another; may be tried again.
        """
        last = deltas[-1]
        with self._lock, self._reported(last.stamp):
            state, change = self._state, _Change()
            sequence, crc, documents = state.sequence, state.crc, state.documents
            for delta in deltas:
                check_next(delta, state.base, sequence, crc)
                delta.check_fit(self._specs)
                delta.check_numbers()
                self._add_change(delta, change)
                sequence, crc = delta.sequence, delta.crc
                documents = documents | {name: text for name, text in delta.documents.items() if name in documents}
            after, undo = self._prepare(change, last.sequence, last.crc, documents)
            self._remember(undo)
            self._flip(after)
            self._tell(applied=len(deltas), rows=sum(len(ids) for ids, _ in undo.rows.values()))
            return after

    def roll_back(self, stamp: str) -> LiveState:
        """Go back to an earlier state of the series, bit for bit, in one flip.

        Args:
            stamp: That state.

        Raises:
            WeightsError: the stamp is of another series or not an earlier state, or its old values are not kept any
                more: a full snapshot is needed.
            OverloadedError: no block is free.
        """
        with self._lock, self._reported(stamp):
            state = self._state
            base, sequence = _parsed(stamp)
            if base != state.base or not 0 <= sequence <= state.sequence:
                raise WeightsError(
                    f"roll-back must go to an earlier state of {state.stamp}, {stamp} is none",
                    version=state.stamp,
                    file=stamp,
                )
            undos = [undo for undo in self._undos if undo.sequence >= sequence]
            if sequence < state.sequence and (not undos or undos[0].sequence != sequence):
                raise DeltaGapError(
                    f"old values reach back to {version_stamp(base, self._undo_from())}, not to {stamp}: "
                    "a full snapshot is needed",
                    version=base,
                    sequence=sequence,
                    expected=sequence,
                    found=self._undo_from(),
                )
            if not undos:
                return state
            change = _Change()
            for undo in reversed(undos):  # newest first: what is oldest is written last and stays
                change.whole |= undo.whole
                for key, part in undo.rows.items():
                    change.added.setdefault(key, []).append(part)
            before, _ = self._prepare(change, sequence, undos[0].crc, undos[0].documents)
            for _ in undos:
                self._undos.pop()
            self._flip(before)
            self._tell(rolled_back=state.sequence - sequence)
            return before

    def _add_change(self, delta: Delta, change: _Change) -> None:
        """Add what of a delta is held here to the change of those before it."""
        whole = self._state.whole
        for key, part in delta.rows.items():
            if key in self._arenas:
                self._add_rows(change, key, part.ids, part.values)
            elif key in whole:
                change.whole[key] = change.whole.get(key, whole[key]).copy()
                change.whole[key][part.ids] = part.values
        for key, array in delta.whole.items():
            if key in self._arenas:
                self._add_rows(change, key, np.arange(len(array)), array)
            elif key in whole:
                change.whole[key] = _immutable(array)

    def _add_rows(self, change: _Change, key: str, ids: Ids, values: Array) -> None:
        chosen, local = self._select(key, ids)
        if len(local):
            change.added.setdefault(key, []).append((local, self._stored(key, values[chosen])))

    def _stored(self, key: str, rows: Array) -> Array:
        return self._convert[key](rows) if key in self._convert else rows

    def _prepare(
        self, change: _Change, sequence: int, crc: int, documents: dict[str, dict[str, Any]]
    ) -> tuple[LiveState, _Undo]:
        """Make the next state beside the current one; on failure every block is given back."""
        state, rows = self._state, change.rows()
        moves, written = dict(state.moves), dict[str, Written]()
        undo_rows: dict[str, tuple[Ids, Array]] = {}
        self._make_room(rows, sequence)
        try:
            for key, (ids, values) in rows.items():
                if len(ids):
                    written[key] = self._arenas[key].write(moves[key], ids, values)
                    moves[key] = written[key].moves
                    undo_rows[key] = (ids, written[key].old_values)
            after = LiveState(state.base, sequence, crc, self._arenas, moves, state.whole | change.whole, documents)
            after.built = self._build(after, state)
        except BaseException:
            for key, result in written.items():
                self._arenas[key].release(result.fresh)
            raise
        epoch = self._epoch + 1
        for key, result in written.items():
            self._born[key][np.array(result.fresh, np.int64)] = epoch
            self._dead_slots.append((epoch, key, np.array(result.dead, np.int64)))
        old_whole = {key: state.whole[key] for key in change.whole}
        size = sum(ids.nbytes + old.nbytes for ids, old in undo_rows.values())
        size += sum(array.nbytes for array in old_whole.values())
        return after, _Undo(state.sequence, state.crc, undo_rows, old_whole, state.documents, size)

    def _make_room(self, rows: dict[str, tuple[Ids, Array]], sequence: int) -> None:
        """Free what nobody holds; let go of kept states, the oldest first, while blocks are missing."""
        self._sweep()
        needs = {key: self._arenas[key].touched(ids) for key, (ids, _) in rows.items()}
        for key, num in needs.items():
            if num > (limit := self._arenas[key].num_spare):
                stamp = version_stamp(self._state.base, sequence)
                raise DeltaTooLargeError(
                    f"{stamp}: {key} changes in {num} blocks, {limit} are spare: a full snapshot is needed",
                    version=self._state.base,
                    sequence=sequence,
                    limit=limit,
                    value=num,
                )
        while any(self._arenas[key].num_free < num for key, num in needs.items()) and self._let_go():
            self._sweep()
        if len(self._kept) >= self._config.keep_states > 1 and not self._let_go():
            raise OverloadedError(
                f"{len(self._kept)} states are asked for, limit {self._config.keep_states}",
                stage="update",
                limit=self._config.keep_states,
                value=len(self._kept),
                retry_after_s=1.0,
            )

    def _let_go(self) -> bool:
        """Let go of the oldest kept state that is not asked for and does not serve; returns whether there was one."""
        stamp = next((key for key, state in self._kept.items() if self._may_go(key, state)), None)
        if stamp is None:
            return False
        self._kept = {key: state for key, state in self._kept.items() if key != stamp}
        return True

    def _may_go(self, stamp: str, state: LiveState) -> bool:
        return stamp not in self._asked_for and state is not self._state

    def _sweep(self) -> None:
        """Give back the blocks that only states named which nobody holds any more."""
        while self._dead_epochs:
            self._alive.discard(self._dead_epochs.popleft())
        alive = np.array(sorted(self._alive))  # the last one is the current state's: no block is younger
        waiting: list[tuple[int, str, Ids]] = []
        for died, key, slots in self._dead_slots:
            is_named = alive[np.searchsorted(alive, self._born[key][slots])] < died
            self._arenas[key].release(slots[~is_named].tolist())
            if is_named.any():
                waiting.append((died, key, slots[is_named]))
        self._dead_slots = waiting

    def _flip(self, state: LiveState) -> None:
        self._epoch += 1
        self._alive.add(self._epoch)
        # Only a note: this runs wherever the last reader lets go, also within an update of this very thread.
        weakref.finalize(state, self._dead_epochs.append, self._epoch).atexit = False
        kept = {key: each for key, each in self._kept.items() if key != state.stamp} | {state.stamp: state}
        self._state = state  # the switch: one store of one reference
        self._kept = kept
        if len(kept) > self._config.keep_states:
            self._let_go()

    def _remember(self, undo: _Undo) -> None:
        self._undos.append(undo)
        while sum(one.num_bytes for one in self._undos) > self._config.undo_bytes_max:
            self._undos.popleft()

    def _undo_from(self) -> int:
        return self._undos[0].sequence if self._undos else self._state.sequence

    @contextmanager
    def _reported(self, stamp: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            reason = error.message if isinstance(error, RankMeshError) else f"{type(error).__name__}: {error}"
            self._status = replace(
                self._status,
                refused=self._status.refused + 1,
                reason=f"{stamp}: {reason}",
                needs_snapshot=self._status.needs_snapshot or isinstance(error, NEEDS_SNAPSHOT),
            )
            raise

    def _tell(self, *, applied: int = 0, rolled_back: int = 0, rows: int = 0) -> None:
        """Report a step that was taken; it clears what was wrong before."""
        status = self._status
        self._status = UpdateStatus(
            stamp=self._state.stamp,
            applied=status.applied + applied,
            rolled_back=status.rolled_back + rolled_back,
            refused=status.refused,
            rows=status.rows + rows,
            undo_from=self._undo_from(),
            blocks_free=min((arena.num_free for arena in self._arenas.values()), default=0),
            updated_s=self._clock.now_s(),
        )


def _immutable(array: Array) -> Array:
    """Return the array, or a copy if its owner (a trainer) could still write to it: a state never changes."""
    return array.copy() if array.flags.writeable else array


def _merged(parts: Sequence[tuple[Ids, Array]]) -> tuple[Ids, Array]:
    """Return rows of changes as those of one; of rows that are in several the last is taken."""
    if len(parts) == 1:
        return parts[0]
    distinct, newest = np.unique(np.concatenate([ids for ids, _ in reversed(parts)]), return_index=True)
    values = np.concatenate([values for _, values in reversed(parts)])
    return distinct, values[newest]


def _parsed(stamp: str) -> tuple[str, int]:
    try:
        return parse_stamp(stamp)
    except ValueError as error:
        raise WeightsError(str(error), version=stamp, file="") from error
