"""EncodedHistory: what the encoder made of one user's events, kept between requests and extended by new events.

An event's keys and values depend on it, on earlier events and on the request's features (``models.kunlun``). So while
those features are the same, a history that has only grown costs its new events; one that lost events at its beginning,
or changed, is made anew. Arrays only ever grow behind what was given out: a state that an earlier request still reads
does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from models.arrays import ROWS_MULTIPLE
from models.config import EncoderConfig
from models.kunlun import Personal, Window
from models.sequence_encoder import EncodedLayer

_SPARE_SHARE = 8
"""Rows are kept for an eighth more events than there are, so that few appends copy."""

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EventColumns:
    """What the encoder reads of one user's events, oldest first: equal columns, equal state.

    Args:
        item_rows: int64 [L].
        weight_buckets: int64 [L].
        pause_buckets: int64 [L].
        clock: float64 [L].
    """

    item_rows: Ints
    weight_buckets: Ints
    pause_buckets: Ints
    clock: npt.NDArray[np.float64]

    def __len__(self) -> int:
        """Number of events L."""
        return len(self.item_rows)

    def begins_with(self, other: EventColumns, count: int) -> bool:
        """Return whether the first events of both are the same."""
        pairs = zip(self.columns(), other.columns(), strict=True)
        return len(self) >= count <= len(other) and all(np.array_equal(a[:count], b[:count]) for a, b in pairs)

    def padded(self, first: int, behind: int) -> EventColumns:
        """Return the events from one on, with zeros behind."""
        items, weights, pauses, clock = self.columns()
        return EventColumns(
            np.pad(items[first:], (0, behind)),
            np.pad(weights[first:], (0, behind)),
            np.pad(pauses[first:], (0, behind)),
            np.pad(clock[first:], (0, behind)),
        )

    def columns(self) -> tuple[Ints, Ints, Ints, npt.NDArray[np.float64]]:
        """Return all columns."""
        return self.item_rows, self.weight_buckets, self.pause_buckets, self.clock


class _Rows:
    """Rows that grow in place while nobody else has grown them; else they are copied first.

    Args:
        data: [capacity, D].
        num_used: Rows that hold something.
    """

    __slots__ = ("data", "num_used")

    def __init__(self, data: Tensor, num_used: int) -> None:
        self.data = data
        self.num_used = num_used

    def with_rows(self, begin: int, new: Tensor) -> _Rows:
        """Return rows that hold the first ``begin`` of these and then the new ones, [n, D]."""
        end = begin + len(new)
        if end > len(self.data) or begin != self.num_used:
            grown = self.data.new_empty(end + max(end // _SPARE_SHARE, ROWS_MULTIPLE), self.data.shape[1])
            grown[:begin] = self.data[:begin]
            grown[begin:end] = new
            return _Rows(grown, end)
        self.data[begin:end] = new
        self.num_used = end
        return self


class EncodedHistory:
    """Keys and values of one user's events in every layer.

    Args:
        context_rows: int64 [features], table rows of the request's features.
        events: The events.
        layers: Each layer's keys and values, of which the first ``len(events)`` rows count.
        windows: Each layer's window, cut to what the next event sees.
        personal: Each layer's weights as the request's features made them.
    """

    __slots__ = ("_layers", "context_rows", "events", "personal", "windows")

    def __init__(
        self,
        context_rows: Ints,
        events: EventColumns,
        layers: Sequence[tuple[_Rows, _Rows]],
        windows: Sequence[Window],
        personal: Sequence[Personal],
    ) -> None:
        self.context_rows = context_rows
        self.events = events
        self._layers = tuple(layers)
        self.windows = tuple(windows)
        self.personal = tuple(personal)

    def __len__(self) -> int:
        """Number of events."""
        return len(self.events)

    @property
    def num_bytes(self) -> int:
        """Bytes that it keeps alive."""
        tensors = [rows.data for pair in self._layers for rows in pair]
        tensors += [x for pair in (*self.windows, *self.personal) if pair is not None for x in pair]
        held = sum(x.nbytes for x in tensors)
        return held + sum(column.nbytes for column in self.events.columns()) + self.context_rows.nbytes

    def covers(self, context_rows: Ints, events: EventColumns) -> int | None:
        """Return how many of these events it holds encoded, None if it is of no use: other features or other events.

        It may also hold later ones: a request of an earlier time reads the first of them.
        """
        common = min(len(self), len(events))
        if not np.array_equal(self.context_rows, context_rows) or not self.events.begins_with(events, common):
            return None
        return common

    def layers(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's keys and values of the first events: both [1, count, D]."""
        return [(keys.data[None, :count], values.data[None, :count]) for keys, values in self._layers]

    def extended(self, events: EventColumns, encoded: Sequence[EncodedLayer], config: EncoderConfig) -> EncodedHistory:
        """Return the history with new events behind those that it holds.

        Args:
            events: All events, the new ones last.
            encoded: What the layers made of the new ones; padding behind them is left out.
            config: Of the encoder.
        """
        begin, count = len(self), len(events) - len(self)
        layers = [
            (keys.with_rows(begin, made.keys[0, :count]), values.with_rows(begin, made.values[0, :count]))
            for (keys, values), made in zip(self._layers, encoded, strict=True)
        ]
        first = max(len(events) // config.block - config.window_blocks + 1, 0) * config.block
        windows = []
        for before, made in zip(self.windows, encoded, strict=True):
            origin = begin - (0 if before is None else before[0].shape[1])
            windows.append(_cut(made.window, first - origin, len(events) - origin))
        return EncodedHistory(self.context_rows, events, layers, windows, [made.personal for made in encoded])

    @classmethod
    def empty(cls, context_rows: Ints, num_layers: int, rows: Tensor) -> EncodedHistory:
        """Return the history of no events; ``rows`` [0, D] gives width and type."""
        none = np.zeros(0, np.int64)
        events = EventColumns(none, none, none, np.zeros(0))
        nothing = [None] * num_layers
        return cls(context_rows, events, [(_Rows(rows, 0), _Rows(rows, 0))] * num_layers, nothing, nothing)


def _cut(window: Window, first: int, last: int) -> Window:
    """Copy what later events see: a view would keep the whole history alive."""
    return None if window is None else (window[0][:, first:last].clone(), window[1][:, first:last].clone())
