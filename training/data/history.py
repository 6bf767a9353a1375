"""Joins rows with histories: the newest L events of each row's user, as padded arrays.

The events come from the data set's own log, by index arithmetic, or from a user log as serving has it
(``training.data.join``); the arrays are the same to the bit.

Two modes say what "earlier" means:

- ``pub``: everything before the row's event in (timestamp, user, item) order, as in the published split; events of the
  same second may be among them, which a server would not have.
- ``strict``: events of strictly earlier seconds only, which is what serving reads. The only mode of a user log.

Neither ever reads the row's own event or a later one.

Shape letters: B rows or requests of a batch, L history length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from training.data.join import Histories, JoinedBatch
from training.data.log import EventLog, Rows

HistoryMode: TypeAlias = Literal["pub", "strict"]
Align: TypeAlias = Literal["left", "right"]
IntegerT = TypeVar("IntegerT", bound=np.integer)


@dataclass(frozen=True, slots=True)
class HistoryBatch:
    """Newest events of B users, oldest first, padded with 0 to length L.

    Args:
        item_ids: int64 [B, L].
        ratings: float32 [B, L], 1 to 5.
        timestamps_s: int64 [B, L].
        surfaces: uint8 [B, L].
        mask: bool [B, L], true where there is an event.
        lengths: int64 [B], events that are there, at most L.
        num_total: int64 [B], all earlier events of the user, at least ``lengths``.
    """

    item_ids: npt.NDArray[np.int64]
    ratings: npt.NDArray[np.float32]
    timestamps_s: npt.NDArray[np.int64]
    surfaces: npt.NDArray[np.uint8]
    mask: npt.NDArray[np.bool_]
    lengths: npt.NDArray[np.int64]
    num_total: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """Number of histories B."""
        return len(self.lengths)


class HistoryReader:
    """Joins rows with the log.

    Args:
        log: The event log.
        length: L, at least 1.
        mode: What counts as earlier, see the module.
        align: ``left``: events in columns ``0 .. lengths - 1``; ``right``: in the last ``lengths`` columns. The newest
            event is the last one either way.
        histories: Where the events are read, e.g. a user log; None: the event log.

    Raises:
        ValueError: ``length`` is under 1, or the mode is one that only the event log has.
    """

    __slots__ = ("_histories", "_log", "align", "length", "mode")

    def __init__(
        self,
        log: EventLog,
        length: int,
        mode: HistoryMode,
        align: Align = "left",
        histories: Histories | None = None,
    ) -> None:
        if length < 1:
            raise ValueError(f"history length must be at least 1, is {length}")
        if histories is not None and mode != "strict":
            raise ValueError(f"a user log is read in mode strict, not {mode}")
        self._log = log
        self._histories = histories
        self.length = length
        self.mode: HistoryMode = mode
        self.align: Align = align

    def read(self, rows: Rows) -> HistoryBatch:
        """Return the histories of B rows."""
        if self._histories is not None:
            return self.read_at(rows.user_index, rows.timestamp_s)
        ends = rows.event_position if self.mode == "pub" else self._log.second_start[rows.event_position]
        return self._gather(self._log.user_offsets[rows.user_index], ends)

    def read_at(self, user_index: npt.NDArray[np.integer], timestamp_s: npt.NDArray[np.int64] | int) -> HistoryBatch:
        """Return the histories of B users strictly before a time (in either mode: there is no row to stand before).

        Args:
            user_index: integers [B].
            timestamp_s: int64 [B], or one time for all.
        """
        if self._histories is not None:
            before_s = np.broadcast_to(np.asarray(timestamp_s, np.int64), user_index.shape)
            return self._padded(self._histories.read(user_index, before_s, self.length))
        return self._gather(self._log.user_offsets[user_index], self._log.position_before(user_index, timestamp_s))

    def _padded(self, joined: JoinedBatch) -> HistoryBatch:
        histories = joined.histories
        lengths = np.array([len(history) for history in histories], np.int64)
        columns = np.arange(self.length, dtype=np.int64)
        is_left = self.align == "left"
        mask = columns < lengths[:, None] if is_left else columns >= self.length - lengths[:, None]
        shape = (len(histories), self.length)
        items, weights, times = np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.int64)
        surfaces = np.zeros(shape, np.uint8)
        if mask.any():
            # Events of all rows in one piece: row after row is the order in which a mask selects.
            items[mask] = np.concatenate([history.item_keys for history in histories])
            weights[mask] = np.concatenate([history.weights for history in histories])
            times[mask] = np.concatenate([history.timestamps_s for history in histories])
            sources = [
                np.zeros(len(history), np.uint8) if history.sources is None else history.sources
                for history in histories
            ]
            surfaces[mask] = joined.surface_of_source[np.concatenate(sources)]
        num_total = np.array([history.num_total for history in histories], np.int64)
        return HistoryBatch(items, weights, times, surfaces, mask, lengths, num_total)

    def _gather(self, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> HistoryBatch:
        log = self._log
        num_total = ends - starts
        lengths = np.minimum(num_total, self.length)
        columns = np.arange(self.length, dtype=np.int64)
        if self.align == "left":
            positions = (ends - lengths)[:, None] + columns
            mask = columns < lengths[:, None]
        else:
            positions = (ends - self.length)[:, None] + columns
            mask = columns >= self.length - lengths[:, None]
        return HistoryBatch(
            item_ids=_take(log.item_id, positions, mask),
            ratings=_take(log.rating, positions, mask).astype(np.float32),
            timestamps_s=_take(log.timestamp_s, positions, mask),
            surfaces=_take(log.surface, positions, mask),
            mask=mask,
            lengths=lengths,
            num_total=num_total,
        )


def _take(
    values: npt.NDArray[IntegerT], positions: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]
) -> npt.NDArray[IntegerT]:
    if not len(values):
        return np.zeros(positions.shape, values.dtype)
    # Padding may point outside the log: "clip" keeps it inside (and skips the bounds pass), the mask then clears it.
    taken = values.take(positions, mode="clip")
    taken *= mask
    return taken
