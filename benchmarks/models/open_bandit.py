"""Benchmark ``open_bandit``: the routing's offline estimates on a real log with true propensities.

The small version of the Open Bandit log (Y. Saito, S. Aihara, M. Matsutani and Y. Narita, *Open Bandit Dataset and
Pipeline*, arXiv 2008.07146; Apache-2.0): two policies showed fashion items side by side, one evenly (``random``), one
by Bernoulli Thompson sampling (``bts``), 10,000 impressions of each in three campaigns. It is not part of this
repository: ``open-bandit/<policy>/<campaign>/<campaign>.csv.gz`` in the data folder is read.

What one policy's log says of the other policy's click rate, against the click rate that the other one's own log has:

* ``{ips,dr}_bts_<campaign>``: of ``bts`` from the ``random`` log. Its chance of an item at a position is the item's
  share there in the ``bts`` log, since its true chances vary in time and are known for what it showed alone;
* ``{ips,dr}_uniform_<campaign>``: of ``random`` from the ``bts`` log, with that one's true propensities, not clipped.

The parameter ``z`` is the difference in standard errors, both logs' together. A log has 38 to 69 clicks, so its own
rate is known to 12 to 16% at best, and an error of that size is not seen. Where ``effective_sample_size`` is a few and
``weight_mean`` is far from 1, the estimate is worth little and so is its standard error: both rest on those few.

The model of the doubly robust form is the click rate by item and position of the log's other half, drawn towards that
half's own rate.
"""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from shared.errors import DataUnavailableError
from shared.settings import load_settings
from training.policy_value import (
    Columns,
    Estimate,
    Floats,
    PolicyLog,
    doubly_robust,
    effective_sample_size,
    importance_weights,
    inverse_propensity,
)

FOLDER: Final = "open-bandit"
CAMPAIGNS: Final = ("all", "men", "women")
PRIOR_IMPRESSIONS: Final = 100.0
"""Impressions at the log's own click rate that every item and position has beside its own in the model."""


@dataclass(frozen=True, slots=True)
class Impressions:
    """One policy's log of a campaign.

    Args:
        positions: int64 [N], 0 to P - 1.
        items: int64 [N], 0 to D - 1.
        clicks: float64 [N], 0 or 1.
        propensity: float64 [N], chance with which the item was drawn for the position.
    """

    positions: Columns
    items: Columns
    clicks: Floats
    propensity: Floats

    def rate(self) -> Estimate:
        """Return the log's own click rate: what its policy gave."""
        return Estimate(float(self.clicks.mean()), float(self.clicks.std(ddof=1) / np.sqrt(len(self.clicks))))

    def sums(self, values: Floats, shape: tuple[int, int]) -> Floats:
        """Return the sum of a value by position and item: [P, D]."""
        cells = np.ravel_multi_index((self.positions, self.items), shape)
        sums = np.bincount(cells, weights=values, minlength=shape[0] * shape[1])
        return np.asarray(sums, np.float64).reshape(shape)


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Estimate both policies of each campaign from the other one's log; seconds.

    Raises:
        DataUnavailableError: a file is missing or cannot be read; names it and the column.
    """
    folder = load_settings().data_dir / FOLDER
    figures: list[Measurement] = []
    for campaign in CAMPAIGNS:
        even, bts = (read_impressions(folder / name / campaign / f"{campaign}.csv.gz") for name in ("random", "bts"))
        shape = _shape(even, bts, folder / "random" / campaign / f"{campaign}.csv.gz")
        shown = bts.sums(np.ones(len(bts.items)), shape)
        figures += [
            *estimates(f"bts_{campaign}", even, shown / shown.sum(axis=1, keepdims=True), bts.rate(), options.seed),
            *estimates(f"uniform_{campaign}", bts, np.full(shape, 1 / shape[1]), even.rate(), options.seed),
        ]
    return BenchmarkReport(tuple(figures), "none")


def read_impressions(path: Path) -> Impressions:
    """Read one log.

    Raises:
        DataUnavailableError: the file cannot be read, or a column is missing, holds no number or one that cannot be;
            names the file, and the column and line.
    """
    columns: dict[str, list[float]] = {"position": [], "item_id": [], "click": [], "propensity_score": []}
    line, column = 1, "position"
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                line += 1
                for column, values in columns.items():
                    values.append(float(row[column]))
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, column, f"line {line}: {error!r}") from error
    except (OSError, EOFError, csv.Error) as error:
        raise DataUnavailableError(
            f"cannot read the impressions in {path}, line {line}: {error}", field="path", value=str(path)
        ) from error
    position, item, click, propensity = (np.asarray(values, np.float64) for values in columns.values())
    allowed = {
        "position": (position >= 1) & np.isfinite(position) & (position == np.floor(position)),
        "item_id": (item >= 0) & np.isfinite(item) & (item == np.floor(item)),
        "click": (click == 0) | (click == 1),
        "propensity_score": (propensity > 0) & (propensity <= 1),
    }
    for column, good in allowed.items():
        if not good.all():
            first = int(np.argmin(good))
            raise _unreadable(path, column, f"line {first + 2}: {columns[column][first]} cannot be")
    if len(set(columns["click"])) < 2:
        raise _unreadable(path, "click", f"the {line - 1} impressions must have some clicks and some without")
    return Impressions(position.astype(np.int64) - 1, item.astype(np.int64), click, propensity)


def estimates(name: str, log: Impressions, policy: Floats, truth: Estimate, seed: int) -> list[Measurement]:
    """Estimate a policy's click rate from another one's log, by both forms.

    Args:
        name: Of the policy and the campaign.
        log: The log.
        policy: [P, D], chance of each item at each position.
        truth: The policy's click rate in its own log.
        seed: Of the halves that the model is fitted on.
    """
    served = PolicyLog(log.items, log.propensity, log.clicks)
    chance = policy[log.positions, log.items]
    expected, predicted = _model(log, policy, seed)
    weights = importance_weights(served, chance)
    about: dict[str, Param] = {
        "own_click_rate": round(truth.value, 6),
        "own_standard_error": round(truth.error, 6),
        "effective_sample_size": round(effective_sample_size(weights), 1),
        "weight_mean": round(float(weights.mean()), 4),
        "weight_max": round(float(weights.max()), 4),
        "clicks": int(log.clicks.sum()),
        "items": policy.shape[1],
        "prior_impressions": PRIOR_IMPRESSIONS,
    }
    found = {
        "ips": inverse_propensity(served, chance),
        "dr": doubly_robust(served, chance, expected=expected, predicted=predicted),
    }
    return [
        Measurement(
            f"{form}_{name}",
            round(estimate.value, 6),
            "clicks/impression",
            num_samples=len(log.items),
            params={
                "standard_error": round(estimate.error, 6),
                "z": round((estimate.value - truth.value) / float(np.hypot(estimate.error, truth.error)), 3),
                **about,
            },
        )
        for form, estimate in found.items()
    ]


def _model(log: Impressions, policy: Floats, seed: int) -> tuple[Floats, Floats]:
    """Return the modelled click rate of the policy and of what was shown, each row from the other half: [N], [N]."""
    half = np.random.default_rng(seed).permutation(len(log.items)) % 2
    expected, predicted = np.empty(len(half)), np.empty(len(half))
    for each in (0, 1):
        fitted, rows = (half != each).astype(np.float64), half == each
        prior = float(log.clicks @ fitted) / max(float(fitted.sum()), 1.0)
        clicks, shown = log.sums(log.clicks * fitted, policy.shape), log.sums(fitted, policy.shape)
        rates = (clicks + PRIOR_IMPRESSIONS * prior) / (shown + PRIOR_IMPRESSIONS)
        expected[rows] = (policy * rates).sum(axis=1)[log.positions[rows]]
        predicted[rows] = rates[log.positions[rows], log.items[rows]]
    return expected, predicted


def _shape(even: Impressions, bts: Impressions, path: Path) -> tuple[int, int]:
    """Return the number of positions and items, and see that the even log is one."""
    if set(even.positions.tolist()) != set(bts.positions.tolist()):
        raise _unreadable(path, "position", "its positions are not those of the bts log")
    num_items = int(max(even.items.max(), bts.items.max())) + 1
    if not np.allclose(even.propensity, 1 / num_items):
        raise _unreadable(path, "propensity_score", f"must be one over {num_items} items everywhere")
    return int(even.positions.max()) + 1, num_items


def _unreadable(path: Path, column: str, reason: str) -> DataUnavailableError:
    return DataUnavailableError(
        f"cannot use column {column} of the impressions in {path}: {reason}", field=column, value=str(path)
    )
