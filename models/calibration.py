"""Publish-time calibration: a scale and an offset per depth and objective in logit space.

The network has no bias; this one affine map after it puts the first pass and the exits, and so the tiers, on one scale,
because their scores meet in one list and one auction. It is fitted on rows that training has not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import numpy as np
import numpy.typing as npt

from models.config import OBJECTIVES
from models.source import Tensors, WeightSource, tensor

GROUP = "dense"
_ROUNDS = 50
_STEP_MIN = 1e-12


class Calibration:
    """Scale and offset of each depth.

    Args:
        parameters: depth, 0 for the first pass -> float32 [2, O], scales and offsets.
    """

    def __init__(self, parameters: dict[int, npt.NDArray[np.float32]]) -> None:
        self._parameters = parameters

    @classmethod
    def identity(cls, depths: Iterable[int]) -> Self:
        """Return the calibration that changes nothing."""
        shape = (1, len(OBJECTIVES))
        return cls({depth: np.concatenate([np.ones(shape), np.zeros(shape)]).astype(np.float32) for depth in depths})

    @classmethod
    def from_weights(cls, source: WeightSource, depths: Iterable[int]) -> Self:
        """Read the calibration of the depths of a weights version.

        Raises:
            WeightsError: it has none for one of them.
        """
        return cls({depth: tensor(source, GROUP, f"calibration.{depth}", np.float32) for depth in depths})

    def apply(self, logits: npt.NDArray[np.float32], depth: int) -> npt.NDArray[np.float32]:
        """Calibrate the logits of one depth: float32 [C, O] -> float32 [C, O]."""
        scale, offset = self._parameters[depth]
        return np.asarray(logits * scale + offset, np.float32)

    def tensors(self) -> Tensors:
        """Return the arrays under the names that ``from_weights`` reads."""
        return {f"calibration.{depth}": values for depth, values in self._parameters.items()}


def fit_platt(logits: npt.NDArray[np.float64], labels: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Fit scale and offset of a logit by maximum likelihood (Newton's method, each step halved until it helps).

    Args:
        logits: float64 [N].
        labels: bool [N].

    Returns:
        Scale and offset; 1 and 0 where the rows cannot determine them (one label only, or constant logits).

    Source: Platt, Probabilistic Outputs for Support Vector Machines, 1999.
    """
    if labels.all() or not labels.any() or float(np.ptp(logits)) < 1e-9:
        return 1.0, 0.0
    design = np.stack([logits, np.ones_like(logits)], axis=1)
    parameters, loss = np.array([1.0, 0.0]), _mean_loss(logits, labels)
    for _ in range(_ROUNDS):
        chance = 1.0 / (1.0 + np.exp(-np.clip(design @ parameters, -60.0, 60.0)))
        gradient = design.T @ (chance - labels)
        curvature = (design * (chance * (1.0 - chance))[:, None]).T @ design + 1e-9 * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        # Where the logits say little, a whole step from scale 1 overshoots and would run away.
        while (next_loss := _mean_loss(design @ (parameters - step), labels)) > loss and np.abs(step).max() > _STEP_MIN:
            step = step / 2
        if next_loss >= loss:
            break
        parameters, loss = parameters - step, next_loss
    return float(parameters[0]), float(parameters[1])


def _mean_loss(logits: npt.NDArray[np.float64], labels: npt.NDArray[np.bool_]) -> float:
    return float((np.logaddexp(0.0, logits) - labels * logits).mean())
