"""Groups rows into requests, so that a batch carries the request-only part once and the candidates apart.

In ``strict`` mode all rows of one user and one second have the same history: they are one request with several
candidates. In ``pub`` mode the history may differ from row to row, so each row is its own request; the batch has the
same form and training code needs no second path.

Shape letters: R requests of a batch, C rows (candidates) of a batch, L history length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.data.history import HistoryBatch, HistoryReader
from training.data.log import Rows


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """One batch of R requests with C candidates in all, in time order.

    Args:
        user_index: int32 [R], request-only.
        timestamp_s: int64 [R], request-only, non-decreasing.
        surface: uint8 [R], request-only.
        history: R histories, request-only.
        candidates: C rows, the part per candidate.
        request_index: int64 [C], the request of each candidate, non-decreasing from 0 to R - 1, none left out.
    """

    user_index: npt.NDArray[np.int32]
    timestamp_s: npt.NDArray[np.int64]
    surface: npt.NDArray[np.uint8]
    history: HistoryBatch
    candidates: Rows
    request_index: npt.NDArray[np.int64]

    @property
    def num_requests(self) -> int:
        """Number of requests R."""
        return len(self.user_index)

    @property
    def num_candidates(self) -> int:
        """Number of rows C."""
        return len(self.candidates)


def request_starts(rows: Rows) -> npt.NDArray[np.int64]:
    """Return where a new request begins: the first row of each run of equal (user, timestamp, surface).

    Args:
        rows: N rows in (timestamp, user) order.

    Returns:
        int64 [number of requests], ascending, first entry 0; empty for no rows.
    """
    if not len(rows):
        return np.zeros(0, np.int64)
    opens = np.ones(len(rows), np.bool_)
    opens[1:] = (
        (rows.user_index[1:] != rows.user_index[:-1])
        | (rows.timestamp_s[1:] != rows.timestamp_s[:-1])
        | (rows.surface[1:] != rows.surface[:-1])
    )
    return np.flatnonzero(opens)


def request_batches(rows: Rows, reader: HistoryReader, num_rows_max: int) -> Iterator[RequestBatch]:
    """Yield the rows as request-oriented batches, in order.

    A request is never cut, unless it alone has more than ``num_rows_max`` rows; its parts then read the same history.

    Args:
        rows: Rows in (timestamp, user) order, as in a ``Split``.
        reader: Joins the histories; its mode decides what a request is.
        num_rows_max: Most candidates of a batch, at least 1; in ``pub`` mode every batch but the last is full.

    Raises:
        ValueError: ``num_rows_max`` is under 1.
    """
    if num_rows_max < 1:
        raise ValueError(f"num_rows_max must be at least 1, is {num_rows_max}")
    starts = np.arange(len(rows), dtype=np.int64) if reader.mode == "pub" else request_starts(rows)
    bounds = np.append(starts, len(rows))
    begin = 0
    while begin < len(rows):
        last = int(np.searchsorted(bounds, begin + num_rows_max, side="right")) - 1
        end = int(bounds[last])
        if end <= begin:
            end = begin + num_rows_max
        inside = starts[np.searchsorted(starts, begin, side="right") : np.searchsorted(starts, end)] - begin
        yield _batch(rows.select(slice(begin, end)), np.insert(inside, 0, 0), reader)
        begin = end


def _batch(rows: Rows, firsts: npt.NDArray[np.int64], reader: HistoryReader) -> RequestBatch:
    heads = rows.select(firsts)
    counts = np.diff(np.append(firsts, len(rows)))
    return RequestBatch(
        user_index=heads.user_index,
        timestamp_s=heads.timestamp_s,
        surface=heads.surface,
        history=reader.read(heads),
        candidates=rows,
        request_index=np.repeat(np.arange(len(firsts), dtype=np.int64), counts),
    )
