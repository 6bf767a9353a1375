"""What a routing policy would have given, from a log in which only the served tier's loss is known.

Three estimates of the mean loss of a policy, from requests that were served at random with known propensities:

* replay: the mean over requests that were served as a policy that draws nothing would have;
* inverse propensity: each request weighted by the chance that the policy serves the same, over its propensity, which is
  right for any random log that can serve all that the policy does;
* doubly robust: what a model expects of the policy at every request, corrected by the model's weighted errors at what
  was served; right if either the propensities or the model are, and with less spread than the second where the model
  knows something.

A policy that draws has a chance for what was served; one that always does ``chosen`` has 1 or 0 (``served_as``). A loss
may be any outcome whose mean is asked, such as clicks.

Source: Dudik, Langford and Li, Doubly Robust Policy Evaluation and Learning, 2011.

Shape letters: N requests, D depths (or whatever else can be served).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Columns = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PolicyLog:
    """A log of served requests.

    Args:
        served: int64 [N], column of the depth that served each.
        propensity: [N], probability with which that depth was drawn, above 0.
        losses: [N], loss of the served depth.

    Raises:
        ValueError: lengths differ, or a propensity is not in (0, 1].
    """

    served: Columns
    propensity: Floats
    losses: Floats

    def __post_init__(self) -> None:
        """Check the log."""
        if not len(self.served) == len(self.propensity) == len(self.losses):
            lengths = (len(self.served), len(self.propensity), len(self.losses))
            raise ValueError(f"served, propensity and losses must have one length, have {lengths}")
        if len(self.propensity) and not (self.propensity.min() > 0 and self.propensity.max() <= 1):
            raise ValueError(
                f"propensity must be above 0 and at most 1, is {self.propensity.min()} to {self.propensity.max()}"
            )


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimated mean loss.

    Args:
        value: The mean.
        error: Its standard error.
    """

    value: float
    error: float


def replay(log: PolicyLog, chosen: Columns) -> Estimate:
    """Estimate by the requests that were served as the policy would have; right for a log drawn evenly.

    Raises:
        ValueError: there is none.
    """
    same = log.served == chosen
    if not same.any():
        raise ValueError(f"none of {len(same)} requests was served as the policy would have")
    return _estimate(log.losses[same])


def served_as(log: PolicyLog, chosen: Columns) -> Floats:
    """Return the chance that a policy that always does ``chosen`` serves what was served, 1 or 0: [N]."""
    return np.asarray(log.served == chosen, np.float64)


def importance_weights(log: PolicyLog, chance: Floats) -> Floats:
    """Return how much more often than the log the policy serves what was served: [N], 1 on average.

    Args:
        log: The log.
        chance: [N], probability with which the policy serves what was served.

    Raises:
        ValueError: it has another length than the log, or one is not in [0, 1].
    """
    if len(chance) != len(log.served):
        raise ValueError(f"chance must have the log's length {len(log.served)}, has {len(chance)}")
    if len(chance) and not (chance.min() >= 0 and chance.max() <= 1):
        raise ValueError(f"chance must be from 0 to 1, is {chance.min()} to {chance.max()}")
    weights: Floats = chance / log.propensity
    return weights


def effective_sample_size(weights: Floats) -> float:
    """Return how many requests of equal weight tell as much: the squared sum over the sum of squares (Kish, 1965).

    A few where N are many say that the estimate rests on those few, whatever its standard error is.
    """
    squares = float(weights @ weights)
    return float(weights.sum()) ** 2 / squares if squares > 0 else 0.0


def inverse_propensity(log: PolicyLog, chance: Floats) -> Estimate:
    """Estimate by importance weights.

    Args:
        log: The log.
        chance: [N], probability with which the policy serves what was served.
    """
    return _estimate(importance_weights(log, chance) * log.losses)


def doubly_robust(log: PolicyLog, chance: Floats, *, expected: Floats, predicted: Floats) -> Estimate:
    """Estimate by a model of the loss, fitted on other requests, and its weighted errors.

    Args:
        log: The log.
        chance: [N], probability with which the policy serves what was served.
        expected: [N], the model's mean loss under the policy.
        predicted: [N], the model's loss of what was served.
    """
    return _estimate(expected + importance_weights(log, chance) * (log.losses - predicted))


def draw_log(losses: Floats, propensities: Floats, seed: int) -> PolicyLog:
    """Serve requests whose losses are all known at random, and keep what such a log would.

    Args:
        losses: [N, D].
        propensities: [D] or [N, D], adding up to 1.
        seed: Of the draws.
    """
    chances = np.broadcast_to(propensities, losses.shape)
    drawn = np.random.default_rng(seed).random((len(losses), 1))
    served = np.minimum((np.cumsum(chances, axis=1) <= drawn).sum(axis=1), losses.shape[1] - 1)
    rows = np.arange(len(losses))
    return PolicyLog(served, np.array(chances[rows, served]), losses[rows, served])


def _estimate(terms: Floats) -> Estimate:
    return Estimate(float(terms.mean()), float(terms.std(ddof=1) / np.sqrt(len(terms))) if len(terms) > 1 else np.inf)
