"""Quality of predicted probabilities: AUC, logloss, normalised entropy, calibration, AUC by user."""

from __future__ import annotations

from typing import Self

import numpy as np
import numpy.typing as npt

from shared.config import Config

_CHANCE_MIN = 1e-7


class Metrics(Config):
    """Quality of one objective on one set of rows.

    Args:
        num_rows: Rows.
        base_rate: Share of positive labels.
        auc: Area under the ROC curve, ties counted half; 0.5 with one label only.
        logloss: Mean negative log likelihood, nats.
        ne: Normalised entropy, ``logloss`` over the entropy of ``base_rate``: what the constant base rate gives is 1;
            0 when there is one label only.
        calibration: Mean prediction over ``base_rate``; 0 without a positive.
        gauc: AUC of each user's rows, averaged by rows, users with one label only left out.
    """

    num_rows: int
    base_rate: float
    auc: float
    logloss: float
    ne: float
    calibration: float
    gauc: float

    @classmethod
    def of(
        cls, chance: npt.NDArray[np.floating], labels: npt.NDArray[np.bool_], users: npt.NDArray[np.integer]
    ) -> Self:
        """Measure predictions.

        Args:
            chance: floats [N], predicted probability.
            labels: bool [N].
            users: integers [N], whose row it is.
        """
        clipped = np.clip(chance.astype(np.float64), _CHANCE_MIN, 1 - _CHANCE_MIN)
        logloss = float(-np.where(labels, np.log(clipped), np.log1p(-clipped)).mean()) if len(labels) else 0.0
        base = float(labels.mean()) if len(labels) else 0.0
        entropy = 0.0 if base in (0.0, 1.0) else -(base * np.log(base) + (1 - base) * np.log(1 - base))
        return cls(
            num_rows=len(labels),
            base_rate=base,
            auc=auc(chance, labels),
            logloss=logloss,
            ne=float(logloss / entropy) if entropy else 0.0,
            calibration=float(clipped.mean() / base) if base else 0.0,
            gauc=grouped_auc(chance, labels, users),
        )


def auc(chance: npt.NDArray[np.floating], labels: npt.NDArray[np.bool_]) -> float:
    """Return the area under the ROC curve, ties counted half; 0.5 with one label only."""
    return grouped_auc(chance, labels, np.zeros(len(labels), np.int64))


def grouped_auc(
    chance: npt.NDArray[np.floating], labels: npt.NDArray[np.bool_], groups: npt.NDArray[np.integer]
) -> float:
    """Return the AUC of each group, averaged by rows over groups that have both labels; 0.5 when none has.

    Args:
        chance: floats [N].
        labels: bool [N].
        groups: integers [N].
    """
    if not len(labels):
        return 0.5
    order = np.lexsort((chance, groups))
    sorted_groups, sorted_chance, positive = groups[order], chance[order], labels[order]
    new_group = np.concatenate([[True], sorted_groups[1:] != sorted_groups[:-1]])
    new_value = new_group | np.concatenate([[True], sorted_chance[1:] != sorted_chance[:-1]])
    starts = np.flatnonzero(new_value)
    # The mean position of the rows that share a value, from 0 within the group.
    middle = (starts + np.append(starts[1:], len(order)) - 1) / 2.0
    group_start = np.maximum.accumulate(np.where(new_group, np.arange(len(order)), 0))
    rank = middle[np.cumsum(new_value) - 1] - group_start
    begins = np.flatnonzero(new_group)
    num_rows = np.diff(np.append(begins, len(order)))
    num_positive = np.add.reduceat(positive.astype(np.float64), begins)
    rank_sum = np.add.reduceat(np.where(positive, rank, 0.0), begins)
    mixed = (num_positive > 0) & (num_positive < num_rows)
    if not mixed.any():
        return 0.5
    rows, hits, ranks = num_rows[mixed], num_positive[mixed], rank_sum[mixed]
    areas = (ranks - hits * (hits - 1) / 2.0) / (hits * (rows - hits))
    return float((areas * rows).sum() / rows.sum())
