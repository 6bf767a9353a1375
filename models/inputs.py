"""Turns histories into what the request side of the ranker reads: buckets and dense features. Numpy only.

Training and serving call the same function, on B padded histories or on one; nothing here sees a candidate, and nothing
a server would not have at request time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_WEIGHT_BUCKETS = 11
"""Event weights 0, 0.5, .. 5; heavier events share the last bucket."""

WEIGHT_MAX = 5.0
POSITIVE_WEIGHT_MIN = 4.0

NUM_GAP_BUCKETS = 60
"""Two buckets an octave of seconds, the last from about 30 years."""

# The first bound is 2: gaps 0 and 1 share bucket 0. Training on strictly earlier seconds never sees a gap of 0.
_GAP_BOUNDS_S = np.ceil(2.0 ** (np.arange(2, NUM_GAP_BUCKETS + 1) / 2)).astype(np.int64)

DENSE_FEATURES = (
    "log_num_total",
    "mean_weight",
    "deviation_weight",
    "positive_share",
    "top_share",
    "mean_weight_newest",
    "positive_share_newest",
    "log_gap_newest",
    "log_gap_oldest",
    "hour_share",
    "has_history",
)
"""Request-only dense features, in the order of ``RequestInputs.dense``."""

_NEWEST = 10
_HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class RequestInputs:
    """The request side of B requests, as rows and buckets.

    Args:
        feature_rows: int64 [B, number of request features], row of each in its table.
        item_rows: int64 [B, L], rows of table ``item``, oldest event first, padding 0 at the end.
        weight_buckets: int64 [B, L], 0 to ``NUM_WEIGHT_BUCKETS - 1``.
        gap_buckets: int64 [B, L], 0 to ``NUM_GAP_BUCKETS - 1``, by time between event and request.
        mask: bool [B, L], true where there is an event; the events of a request come first.
        dense: float32 [B, len(DENSE_FEATURES)].
    """

    feature_rows: npt.NDArray[np.int64]
    item_rows: npt.NDArray[np.int64]
    weight_buckets: npt.NDArray[np.int64]
    gap_buckets: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    dense: npt.NDArray[np.float32]


def weight_buckets(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the bucket of each event weight, half a point a bucket: float32 of any shape -> int64."""
    return np.asarray(np.rint(np.clip(weights, 0.0, WEIGHT_MAX) * 2.0), np.int64)


def gap_buckets(gaps_s: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bucket of each time gap in seconds: int64 of any shape -> int64; 0 and 1 second share bucket 0."""
    return np.asarray(np.searchsorted(_GAP_BOUNDS_S, gaps_s, side="right"), np.int64)


def request_inputs(
    feature_rows: npt.NDArray[np.int64],
    item_rows: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float32],
    timestamps_s: npt.NDArray[np.int64],
    mask: npt.NDArray[np.bool_],
    num_total: npt.NDArray[np.int64],
    as_of_s: npt.NDArray[np.int64],
) -> RequestInputs:
    """Build the inputs of B requests.

    Args:
        feature_rows: int64 [B, number of request features].
        item_rows: int64 [B, L], anything where ``mask`` is false.
        weights: float32 [B, L].
        timestamps_s: int64 [B, L].
        mask: bool [B, L], events first, padding after them.
        num_total: int64 [B], events that the log holds before the request.
        as_of_s: int64 [B], request times.
    """
    gaps_s = np.where(mask, np.maximum(as_of_s[:, None] - timestamps_s, 0), 0)
    weights = np.where(mask, np.clip(weights, 0.0, WEIGHT_MAX), 0.0).astype(np.float32)
    return RequestInputs(
        feature_rows=feature_rows,
        item_rows=np.where(mask, item_rows, 0),
        weight_buckets=weight_buckets(weights),
        gap_buckets=gap_buckets(gaps_s),
        mask=mask,
        dense=_dense(weights, gaps_s, mask, num_total),
    )


def _dense(
    weights: npt.NDArray[np.float32],
    gaps_s: npt.NDArray[np.int64],
    mask: npt.NDArray[np.bool_],
    num_total: npt.NDArray[np.int64],
) -> npt.NDArray[np.float32]:
    lengths = mask.sum(axis=1)
    count = np.maximum(lengths, 1).astype(np.float32)
    newest = mask & (np.arange(mask.shape[1]) >= lengths[:, None] - _NEWEST)
    num_newest = np.maximum(newest.sum(axis=1), 1).astype(np.float32)
    positive = mask & (weights >= POSITIVE_WEIGHT_MIN)
    mean = weights.sum(axis=1) / count
    deviation = np.where(mask, weights - mean[:, None], 0.0)
    # Events are oldest first, so the largest gap is the oldest event's; the newest one's is the smallest that is there.
    oldest_s = gaps_s.max(axis=1, initial=0)
    newest_s = np.where(mask, gaps_s, np.iinfo(np.int64).max).min(axis=1, initial=np.iinfo(np.int64).max)
    newest_s = np.where(lengths > 0, newest_s, 0)
    columns = (
        np.log1p(num_total.astype(np.float64)) / 8.0,
        mean / WEIGHT_MAX,
        np.sqrt((deviation * deviation).sum(axis=1) / count) / 2.0,
        positive.sum(axis=1) / count,
        (mask & (weights >= WEIGHT_MAX)).sum(axis=1) / count,
        np.where(newest, weights, 0.0).sum(axis=1) / num_newest / WEIGHT_MAX,
        (positive & newest).sum(axis=1) / num_newest,
        # A gap of 0 counts as 1, as in the buckets.
        np.log(np.maximum(newest_s, 1).astype(np.float64)) / 16.0,
        np.log(np.maximum(oldest_s, 1).astype(np.float64)) / 16.0,
        (mask & (gaps_s <= _HOUR_S)).sum(axis=1) / count,
        lengths > 0,
    )
    return np.stack([np.asarray(column, np.float32) for column in columns], axis=1)
