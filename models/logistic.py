"""Logistic regression with a normal prior: what labels say of a few coefficients, and what was believed before them.

Shape letters: N rows, P coefficients.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_ROUNDS = 50
_GRADIENT_MIN = 1e-9
_HALVINGS = 30
_LOGIT_MAX = 60.0


def fit_logistic(
    design: Floats,
    offset: Floats,
    labels: npt.NDArray[np.bool_],
    prior: Floats,
    precision: Floats,
    weights: Floats | None = None,
) -> Floats:
    """Return the most probable coefficients (Newton's method, each step halved until it helps).

    Args:
        design: [N, P].
        offset: [N], logits that are taken as they are.
        labels: bool [N].
        prior: [P], where the coefficients are without a row.
        precision: [P], above 0: one over the variance of the prior, in rows of information.
        weights: [N], how much each row counts; None: 1.

    Returns:
        [P].
    """
    weights = np.ones(len(labels)) if weights is None else weights

    def loss(found: Floats) -> float:
        logits = offset + design @ found
        data = weights * (np.logaddexp(0.0, logits) - labels * logits)
        return float(data.sum() + 0.5 * (precision * (found - prior) ** 2).sum())

    found = np.array(prior, np.float64)
    now = loss(found)
    for _ in range(_ROUNDS):
        chance = 1.0 / (1.0 + np.exp(-np.clip(offset + design @ found, -_LOGIT_MAX, _LOGIT_MAX)))
        gradient = design.T @ (weights * (chance - labels)) + precision * (found - prior)
        if np.abs(gradient).max() < _GRADIENT_MIN * max(len(labels), 1):
            break
        curvature = (design * (weights * chance * (1.0 - chance))[:, None]).T @ design + np.diag(precision)
        step = np.linalg.solve(curvature, gradient)
        for _ in range(_HALVINGS):
            if (then := loss(found - step)) < now:
                break
            step = step / 2
        else:
            break
        found, now = found - step, then
    return np.asarray(found, np.float64)
