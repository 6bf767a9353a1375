"""Held-out rows served in the order of time, by a calibration and a router that follow the outcomes of earlier ones.

At the start of each day the refit of ``training.recalibration`` is made from the outcomes of requests that are at least
a delay old, as ``rankmesh recalibrate --every 86400`` would, and serves the rows of that day. So no row is predicted
with an outcome that came after it, and the published numbers are those of the validation rows.

Shape letters: N rows in order of time, D depths, O objectives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.calibration import Calibration
from models.heads import CLICK
from models.routing import GainModel
from training.data import Rows
from training.evaluate import Predictions
from training.outcomes import JoinConfig, Outcomes
from training.recalibration import RecalibrationConfig, refit
from training.routing import Floats, Slice, choose

DAY_S = 86_400
ROUTER_DAYS = 30
"""Days between two refits of what depth is worth: it needs a table of prices each time."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows in order of time, with what the network said of them.

    Args:
        rows: N rows.
        depths: D depths.
        logits: float64 [N, D, O], before calibration.
        signals: float32 [N, K].
        surfaces: int64 [N], id keys.
    """

    rows: Rows
    depths: tuple[int, ...]
    logits: Floats
    signals: npt.NDArray[np.float32]
    surfaces: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rows: Rows, said: Predictions, published: Slice) -> Stream:
        """Join rows with raw logits and the signals of their slice."""
        logits = np.stack([said[depth] for depth in published.depths], axis=1).astype(np.float64)
        return cls(rows, published.depths, logits, published.signals, published.surfaces)

    def days(self) -> list[tuple[int, slice]]:
        """Return the start of each day that has rows, seconds since the epoch, and those rows."""
        times = self.rows.timestamp_s
        starts = np.arange(int(times[0]), int(times[-1]) + 1, DAY_S)
        edges = np.append(np.searchsorted(times, starts), len(times))
        spans = zip(starts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        return [(start, slice(begin, end)) for start, begin, end in spans if end > begin]

    def outcomes(self, now_s: int, explored: npt.NDArray[np.bool_], config: JoinConfig) -> Outcomes:
        """Return what of the explored rows is known at a time: [N] flags -> their outcomes, the newest of each user."""
        times = self.rows.timestamp_s
        first = int(np.searchsorted(times, now_s - config.age_s_max))
        end = int(np.searchsorted(times, now_s - config.delay_s, side="right"))
        known = np.arange(first, max(first, end))
        known = known[explored[known]]
        users = self.rows.user_index[known]
        newest = known[_newest(users, config.user_outcomes_max)]
        return Outcomes(
            depths=self.depths,
            logits=self.logits[newest],
            clicks=self.rows.click[newest],
            conversions=self.rows.conversion[newest],
            age_s=(now_s - times[newest]).astype(np.float64),
            signals=self.signals[newest],
            surfaces=self.surfaces[newest],
            counts={"users": len(np.unique(users))},
        )


def _newest(users: npt.NDArray[np.integer], limit: int) -> npt.NDArray[np.bool_]:
    """Return which rows are among the last ``limit`` of their user: [M] -> bool [M]."""
    order = np.argsort(users, kind="stable")
    ends = np.searchsorted(users[order], users[order], side="right")
    keep = np.empty(len(users), np.bool_)
    keep[order] = ends - np.arange(len(users)) <= limit
    return keep


def recalibrated(
    stream: Stream, published: Calibration, share: float, seed: int, join: JoinConfig, config: RecalibrationConfig
) -> Floats:
    """Return each row's click logits by the calibration of its day: [N, D].

    Args:
        stream: The rows.
        published: Serves until there are outcomes enough.
        share: Share of the requests that were explored.
        seed: Of which they were.
        join: Delay, greatest age, and limits of one user.
        config: Prior and limits.
    """
    explored = np.random.default_rng(seed).random(len(stream.rows)) < share
    found = np.empty(stream.logits.shape[:2], np.float64)
    for now_s, rows in stream.days():
        made = refit(published, None, np.zeros(0), stream.outcomes(now_s, explored, join), config)
        calibration = published if made is None else made.calibration
        for column, depth in enumerate(stream.depths):
            raw = stream.logits[rows, column].astype(np.float32)
            found[rows, column] = calibration.apply(raw, depth)[:, CLICK]
    return found


def rerouted(
    stream: Stream,
    calibration: Calibration,
    published: GainModel,
    costs: Floats,
    shares: Floats,
    join: JoinConfig,
    config: RecalibrationConfig,
) -> npt.NDArray[np.int64]:
    """Return the columns of the depths that a router takes which follows outcomes, for each wanted share: [S, N].

    Args:
        stream: The rows.
        calibration: As published.
        published: Routes until there are outcomes enough.
        costs: [D], cost of each depth over the deepest's.
        shares: [S], mean costs that the price is to lead to.
        join: Delay, greatest age, and limits of one user.
        config: Prior and limits.
    """
    explored = np.ones(len(stream.rows), np.bool_)
    chosen = np.empty((len(shares), len(stream.rows)), np.int64)
    model, due_s = published, -np.inf
    for now_s, rows in stream.days():
        if now_s >= due_s:
            due_s = now_s + ROUTER_DAYS * DAY_S
            made = refit(calibration, published, costs, stream.outcomes(now_s, explored, join), config)
            model = published if made is None or made.gain is None else made.gain
        gains = model.gains(stream.signals[rows], stream.surfaces[rows])
        for index, share in enumerate(shares.tolist()):
            chosen[index, rows] = choose(gains, costs, model.price(share))
    return chosen
