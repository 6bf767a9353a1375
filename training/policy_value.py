"""What a routing policy would have given, from a log in which only the served tier's loss is known.

Three estimates of the mean loss of a policy that always does ``chosen``, from requests that were served at random with
known propensities:

* replay: the mean over requests that were served as the policy would have;
* inverse propensity: the same, each request weighted by one over its propensity, which is right for any random log;
* doubly robust: a model's prediction for every request, corrected by its weighted errors on those; right if either the
  propensities or the model are, and with less spread than the second where the model knows something.

Source: Dudik, Langford and Li, Doubly Robust Policy Evaluation and Learning, 2011.

Shape letters: N requests, D depths.
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


def inverse_propensity(log: PolicyLog, chosen: Columns) -> Estimate:
    """Estimate by weights of one over the propensity."""
    return _estimate((log.served == chosen) / log.propensity * log.losses)


def doubly_robust(log: PolicyLog, chosen: Columns, predicted: Floats) -> Estimate:
    """Estimate by a model of the loss and its weighted errors.

    Args:
        log: The log.
        chosen: int64 [N], what the policy does.
        predicted: [N, D], the model's loss of every depth; fitted on other requests.
    """
    rows = np.arange(len(chosen))
    weights = (log.served == chosen) / log.propensity
    return _estimate(predicted[rows, chosen] + weights * (log.losses - predicted[rows, log.served]))


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
