"""Turns histories into what the request side of the ranker reads: buckets and dense features. Numpy only.

Training and serving call the same function, on B padded histories or on one; nothing here sees a candidate, and nothing
a server would not have at request time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    "last_weight",
    "log_gap_newest",
    "log_gap_oldest",
    "hour_share",
    "has_history",
    "click_surprise",
    "conversion_surprise",
)
"""Request-only dense features, in the order of ``RequestInputs.dense``; the surprises need the items' rates."""

NUM_SURPRISES = 2

COUNTER_FEATURES = ("log_count", "click_log_odds", "conversion_log_odds")
"""Dense features of a candidate: what the log says of the item, in the order of ``FeatureBatch.dense``."""

GAP_SCALE = 16.0
"""What the logarithm of a gap in seconds is divided by."""

_NEWEST = 10
_HOUR_S = 3600
_DAY_S = 86_400.0
_COUNTER_PRIOR = 2.0
_SURPRISE_PRIOR, _SURPRISE_SCALE = 5.0, 4.0
_TASTE_PRIOR_EVENTS, _TASTE_PRIOR_WEIGHT = 5.0, 3.6
"""A user's usual weight starts as if so many events of that weight had been: the mean rating of MovieLens-1M."""


BEGINNING_BUCKET = NUM_GAP_BUCKETS
"""Pause bucket of the oldest event that counts: what was before it is not asked."""

PAUSE_UNIT_S = 60.0
"""Pauses far below this hardly count in the time between events: ratings of one sitting are seconds apart."""


@dataclass(frozen=True, slots=True)
class RequestInputs:
    """The request side of B requests, as rows and buckets; events oldest first, then padding 0.

    Args:
        feature_rows: int64 [B, number of request features], row of each in its table.
        item_rows: int64 [B, L], rows of table ``item``.
        weight_buckets: int64 [B, L], 0 to ``NUM_WEIGHT_BUCKETS - 1``.
        pause_buckets: int64 [B, L], 0 to ``BEGINNING_BUCKET``, by time since the event before.
        clock: float64 [B, L], log time between events, summed from the oldest: grows by log(1 + pause / unit).
        log_gaps: float64 [B, L], log(1 + seconds between event and request).
        mask: bool [B, L], true where there is an event.
        dense: float32 [B, len(DENSE_FEATURES)].
        taste_rows: int64 [B, W], rows of table ``item`` of all events that are read, padding 0 first.
        taste_weights: float32 [B, W], by how much each of them counts in the user's taste; 0 where there is none.
    """

    feature_rows: npt.NDArray[np.int64]
    item_rows: npt.NDArray[np.int64]
    weight_buckets: npt.NDArray[np.int64]
    pause_buckets: npt.NDArray[np.int64]
    clock: npt.NDArray[np.float64]
    log_gaps: npt.NDArray[np.float64]
    mask: npt.NDArray[np.bool_]
    dense: npt.NDArray[np.float32]
    taste_rows: npt.NDArray[np.int64]
    taste_weights: npt.NDArray[np.float32]


def window_start(num_total: npt.NDArray[np.int64], num_events: int, step: int) -> npt.NDArray[np.int64]:
    """Return the ordinal of the oldest event that counts, of histories of so many events: int64 [B] -> int64 [B].

    It moves on in whole steps, so a history can grow by ``step`` events before its window loses any.
    """
    beyond = np.maximum(num_total - num_events, 0)
    return np.asarray(-(-beyond // step) * step, np.int64)


def weight_buckets(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the bucket of each event weight, half a point a bucket: float32 of any shape -> int64."""
    return np.asarray(np.rint(np.clip(weights, 0.0, WEIGHT_MAX) * 2.0), np.int64)


def gap_buckets(gaps_s: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bucket of each time gap in seconds: int64 of any shape -> int64; 0 and 1 second share bucket 0."""
    return np.asarray(np.searchsorted(_GAP_BOUNDS_S, gaps_s, side="right"), np.int64)


def counter_features(
    num_events: npt.NDArray[np.int64], num_clicks: npt.NDArray[np.int64], num_conversions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Return the dense features of N items: int64 [N] counts -> float32 [N, len(COUNTER_FEATURES)].

    Log odds are smoothed towards 0, so an item without events has zeros.
    """
    odds = [(hits + _COUNTER_PRIOR) / (num_events - hits + _COUNTER_PRIOR) for hits in (num_clicks, num_conversions)]
    columns = [np.log1p(num_events.astype(np.float64)) / 8.0, *(np.log(ratio) / 2.0 for ratio in odds)]
    return np.stack(columns, axis=1).astype(np.float32)


def rates(counters: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return how likely a click and a conversion of each item is: [N, counter features] -> float32 [N, 2]."""
    return np.asarray(1.0 / (1.0 + np.exp(-2.0 * counters[:, 1:])), np.float32)


def request_inputs(
    feature_rows: npt.NDArray[np.int64],
    item_rows: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float32],
    timestamps_s: npt.NDArray[np.int64],
    mask: npt.NDArray[np.bool_],
    num_total: npt.NDArray[np.int64],
    as_of_s: npt.NDArray[np.int64],
    num_events: int,
    window_step: int,
    item_rates: npt.NDArray[np.float32],
    surprise_half_days: float | None = None,
) -> RequestInputs:
    """Build the inputs of B requests.

    Args:
        feature_rows: int64 [B, number of request features].
        item_rows: int64 [B, W], anything where ``mask`` is false.
        weights: float32 [B, W].
        timestamps_s: int64 [B, W].
        mask: bool [B, W], padding first, then events, oldest first: the newest event is in the last column.
        num_total: int64 [B], events that the log holds before the request.
        as_of_s: int64 [B], request times.
        num_events: L, newest events that become tokens; all W count in the dense features and the taste.
        window_step: Events by which the oldest of them moves on at once, see ``window_start``.
        item_rates: float32 [item rows, 2], ``rates`` of every row of table ``item``.
        surprise_half_days: See ``RankerConfig``.
    """
    gaps_s = np.where(mask, np.maximum(as_of_s[:, None] - timestamps_s, 0), 0)
    weights = np.where(mask, np.clip(weights, 0.0, WEIGHT_MAX), 0.0).astype(np.float32)
    width = mask.shape[1]
    wanted = num_total - window_start(num_total, num_events, window_step)
    lengths = np.minimum(wanted, np.minimum(mask.sum(axis=1), num_events))
    kept = np.arange(min(num_events, width)) < lengths[:, None]
    at = np.where(kept, (width - lengths)[:, None] + np.arange(kept.shape[1]), 0)

    def left(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.where(kept, np.take_along_axis(values, at, axis=1), 0)

    counts = _event_counts(gaps_s, mask, surprise_half_days)
    times = left(timestamps_s)
    pauses_s = np.maximum(np.diff(times, axis=1, prepend=times[:, :1]), 0)
    pauses = gap_buckets(pauses_s)
    pauses[:, :1] = BEGINNING_BUCKET
    return RequestInputs(
        feature_rows=feature_rows,
        item_rows=left(item_rows),
        weight_buckets=weight_buckets(left(weights)),
        pause_buckets=np.where(kept, pauses, 0),
        clock=np.cumsum(np.log1p(pauses_s / PAUSE_UNIT_S), axis=1),
        log_gaps=np.log1p(left(gaps_s).astype(np.float64)),
        mask=kept,
        dense=np.concatenate(
            [_dense(weights, gaps_s, mask, num_total), _surprises(weights, item_rows, counts, item_rates)], axis=1
        ),
        taste_rows=np.where(mask, item_rows, 0),
        taste_weights=_taste_weights(weights, mask),
    )


def _taste_weights(weights: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """Return by how much more than usual each event was worth to its user: [B, W], squares of the order of 1 in sum."""
    count = mask.sum(axis=1, keepdims=True) + _TASTE_PRIOR_EVENTS
    usual = (weights.sum(axis=1, keepdims=True, dtype=np.float64) + _TASTE_PRIOR_EVENTS * _TASTE_PRIOR_WEIGHT) / count
    return np.where(mask, (weights - usual) / np.sqrt(count), 0.0).astype(np.float32)


def _event_counts(
    gaps_s: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_], half_days: float | None
) -> npt.NDArray[np.float64]:
    """Return as how many events each one counts in the surprises: [B, W], 0 for padding."""
    if half_days is None:
        return mask.astype(np.float64)
    # Not exponential: of someone who comes back after years, the old events are still the best there is.
    return np.where(mask, 1.0 / (1.0 + gaps_s / (half_days * _DAY_S)), 0.0)


def _surprises(
    weights: npt.NDArray[np.float32],
    item_rows: npt.NDArray[np.int64],
    counts: npt.NDArray[np.float64],
    item_rates: npt.NDArray[np.float32],
) -> npt.NDArray[np.float32]:
    """Return how much oftener the user clicks, and converts, than others do on the same items: float32 [B, 2]."""
    expected = item_rates[np.where(counts > 0, item_rows, 0)]
    found = np.stack([weights >= POSITIVE_WEIGHT_MIN, weights >= WEIGHT_MAX], axis=2)
    total = ((found - expected) * counts[:, :, None]).sum(axis=1, dtype=np.float64)
    return np.asarray(_SURPRISE_SCALE * total / (counts.sum(axis=1, keepdims=True) + _SURPRISE_PRIOR), np.float32)


def _dense(
    weights: npt.NDArray[np.float32],
    gaps_s: npt.NDArray[np.int64],
    mask: npt.NDArray[np.bool_],
    num_total: npt.NDArray[np.int64],
) -> npt.NDArray[np.float32]:
    lengths = mask.sum(axis=1)
    count = np.maximum(lengths, 1).astype(np.float32)
    newest = slice(max(mask.shape[1] - _NEWEST, 0), mask.shape[1])
    num_newest = np.maximum(mask[:, newest].sum(axis=1), 1).astype(np.float32)
    positive = mask & (weights >= POSITIVE_WEIGHT_MIN)
    mean = weights.sum(axis=1) / count
    deviation = np.where(mask, weights - mean[:, None], 0.0)
    # The newest event is in the last column, and no gap is larger than the oldest's; padding has gap and weight 0.
    last_weight, newest_s = (x[:, -1] if x.shape[1] else np.zeros(len(x), x.dtype) for x in (weights, gaps_s))
    oldest_s = gaps_s.max(axis=1, initial=0)
    columns = (
        np.log1p(num_total.astype(np.float64)) / 8.0,
        mean / WEIGHT_MAX,
        np.sqrt((deviation * deviation).sum(axis=1) / count) / 2.0,
        positive.sum(axis=1) / count,
        (mask & (weights >= WEIGHT_MAX)).sum(axis=1) / count,
        weights[:, newest].sum(axis=1) / num_newest / WEIGHT_MAX,
        positive[:, newest].sum(axis=1) / num_newest,
        last_weight / WEIGHT_MAX,
        # A gap of 0 counts as 1, as in the buckets.
        np.log(np.maximum(newest_s, 1).astype(np.float64)) / GAP_SCALE,
        np.log(np.maximum(oldest_s, 1).astype(np.float64)) / GAP_SCALE,
        (mask & (gaps_s <= _HOUR_S)).sum(axis=1) / count,
        lengths > 0,
    )
    return np.stack([np.asarray(column, np.float32) for column in columns], axis=1)
