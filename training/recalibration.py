"""Follows what outcomes say of a version that serves: calibration of every depth, and what depth is worth.

Both are few numbers with a prior at what was published: a scale and an offset a depth and objective, one worth a depth.
Outcomes of explored answers count by their age, all of them anew each time, so the same outcomes give the same numbers
however often they are looked at, and without outcomes the numbers go back to the published ones. The result is an
ordinary delta (``training.deltas``): ordered, checked against the golden request, taken back like any other.

Outcomes of one tier's answers say nothing of another tier for requests that the router chose for their worth. Explored
answers are of requests that were not chosen, and hold what every tier would have said, so every depth is fitted on the
same outcomes.

Shape letters: N outcomes, D depths, O objectives, P prices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from models.calibration import Calibration
from models.config import OBJECTIVES, RankerConfig
from models.golden import DOCUMENT, Golden, add_golden
from models.heads import CLICK, CONVERSION
from models.logistic import fit_logistic
from models.routing import GROUP as ROUTING
from models.routing import GainModel
from models.source import MemorySource
from shared.clock import Clock
from shared.config import Config
from shared.weights import WeightStore
from shared.weights.deltas import Delta
from training.deltas import resume_series
from training.outcomes import Outcomes
from training.routing import Slice, cost_shares, price_table

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_CHANCE_SPREAD = 0.22
"""About p (1 - p) of a click: turns rows into information about an offset."""

_SCALE_WEIGHT = 4.0
"""The published scale is trusted so much more than the published offset: base rates drift, order less so."""


class RecalibrationConfig(Config):
    """How far outcomes move what was published.

    Prior and half-life were chosen on the later half of the validation rows, with the calibration of the earlier half:
    a half-life of 2 days follows the base rate closer and costs 0.0001 of NE, a prior of 5,000 follows it half as far.

    Args:
        half_life_s: Age at which an outcome counts half, seconds.
        prior_rows: Outcomes that the published calibration counts for.
        worth_deviation: Standard deviation of what depth is worth before any outcome; 1 is as published.
        offset_max: Furthest that an offset moves from the published one, logits.
        scale_max: Largest factor by which a scale moves, up or down.
        worth_max: Largest worth; the smallest is 0.
        outcomes_min: Fewer outcomes change nothing.
        users_min: Outcomes of fewer users change nothing.
        change_min: Relative change of a mean prediction, or of a worth by ten times as much, that is worth a delta.
    """

    half_life_s: float = Field(30 * 86_400, gt=0)
    prior_rows: float = Field(1_000, gt=0)
    worth_deviation: float = Field(0.5, gt=0)
    offset_max: float = Field(1.0, gt=0)
    scale_max: float = Field(1.5, gt=1)
    worth_max: float = Field(2.0, ge=1)
    outcomes_min: int = Field(500, ge=1)
    users_min: int = Field(20, ge=1)
    change_min: float = Field(0.002, ge=0)


@dataclass(frozen=True, slots=True)
class Refit:
    """What outcomes said.

    Args:
        calibration: Of every depth.
        gain: The gain model; None where the version has none.
        ratios: depth -> mean click prediction over the weighted click rate of the outcomes: as published, as refitted;
            empty where there is no click among them, and so no rate.
        num_outcomes: N.
    """

    calibration: Calibration
    gain: GainModel | None
    ratios: dict[int, tuple[float, float]]
    num_outcomes: int


def age_weights(age_s: Floats, config: RecalibrationConfig) -> Floats:
    """Return how much outcomes of these ages count: [N] -> [N], 0 to 1."""
    return np.asarray(0.5 ** (np.maximum(age_s, 0.0) / config.half_life_s), np.float64)


def refit_line(logits: Floats, labels: Bools, weights: Floats, config: RecalibrationConfig) -> tuple[float, float]:
    """Return factor and offset that outcomes ask of calibrated logits, within the limits.

    Args:
        logits: [N], calibrated as published.
        labels: bool [N].
        weights: [N].
        config: Prior and limits.

    Returns:
        Factor and offset; 1 and 0 without rows.
    """
    design = np.stack([logits, np.ones_like(logits)], axis=1)
    precision = config.prior_rows * _CHANCE_SPREAD * np.array([_SCALE_WEIGHT, 1.0])
    factor, offset = fit_logistic(
        design, np.zeros_like(logits), labels, np.array([1.0, 0.0]), precision, weights
    ).tolist()
    return (
        float(np.clip(factor, 1 / config.scale_max, config.scale_max)),
        float(np.clip(offset, -config.offset_max, config.offset_max)),
    )


def refit(
    calibration: Calibration, gain: GainModel | None, costs: Floats, outcomes: Outcomes, config: RecalibrationConfig
) -> Refit | None:
    """Return what outcomes make of a published calibration and gain model; None where they are too few.

    Args:
        calibration: As published.
        gain: As published.
        costs: [D], cost of each depth over the deepest's.
        outcomes: What was joined.
        config: Prior and limits.
    """
    if len(outcomes) < config.outcomes_min or outcomes.counts.get("users", 0) < config.users_min:
        return None
    weights = age_weights(outcomes.age_s, config)
    parameters: dict[int, npt.NDArray[np.float32]] = {}
    ratios: dict[int, tuple[float, float]] = {}
    rate = float(weights @ outcomes.clicks) / float(weights.sum())
    for column, depth in enumerate(outcomes.depths):
        raw = outcomes.logits[:, column].astype(np.float32)
        said = calibration.apply(raw, depth).astype(np.float64)
        lines = _lines(said, outcomes, weights, config)
        published = calibration.tensors()[f"calibration.{depth}"].astype(np.float64)
        factors, offsets = lines
        parameters[depth] = np.stack([factors * published[0], factors * published[1] + offsets]).astype(np.float32)
        means = [
            float(weights @ _chance(each)) / float(weights.sum())
            for each in (said[:, CLICK], factors[CLICK] * said[:, CLICK] + offsets[CLICK])
        ]
        if rate > 0:
            ratios[depth] = (means[0] / rate, means[1] / rate)
    found = Calibration(parameters)
    if gain is not None:
        gain = refit_worth(gain, _slice(found, outcomes), costs, weights, config)
    return Refit(found, gain, ratios, len(outcomes))


def refit_worth(gain: GainModel, rows: Slice, costs: Floats, weights: Floats, config: RecalibrationConfig) -> GainModel:
    """Return the gain model with what its gains have turned out to be worth, and prices for these requests.

    Worth is the slope of measured gains by predicted ones, through the origin, with a normal prior at 1.

    Args:
        gain: As published.
        rows: N outcomes, calibrated.
        costs: [D], cost of each depth over the deepest's.
        weights: [N].
        config: Prior and limits.
    """
    losses = rows.losses()
    measured, fitted = losses[:, :1] - losses, gain.fitted(rows.signals)
    noise = np.maximum(np.average((measured - fitted) ** 2, axis=0, weights=weights), 1e-12)
    information = (weights[:, None] * fitted**2).sum(axis=0) / noise
    told = (weights[:, None] * fitted * measured).sum(axis=0) / noise
    prior = 1.0 / config.worth_deviation**2
    worth = np.clip((told + prior) / (information + prior), 0.0, config.worth_max)
    found = replace(gain, worth=worth, unknown=gain.unknown * worth)
    table = price_table(found.gains(rows.signals, rows.surfaces), costs)
    return replace(found, prices=resampled(table, len(gain.prices)))


def resampled(table: Floats, num_prices: int) -> Floats:
    """Return a table of prices with so many rows, since a delta changes no shape: [P, 2] -> [num_prices, 2]."""
    places = np.linspace(0, len(table) - 1, num_prices)
    return np.stack([np.interp(places, np.arange(len(table)), column) for column in table.T], axis=1)


def is_news(store: WeightStore, base: str, found: Refit, outcomes: Outcomes, config: RecalibrationConfig) -> bool:
    """Return whether a refit changes what the newest state of a version predicts by as much as is worth a delta.

    Raises:
        WeightsError: the version or a delta is damaged.
    """
    state = resume_series(store, base).state
    source = MemorySource(base, state.groups(), dict(state.documents))
    now = Calibration.from_weights(source, outcomes.depths)
    weights = age_weights(outcomes.age_s, config)
    changes: list[float] = []
    for column, depth in enumerate(outcomes.depths):
        raw = outcomes.logits[:, column].astype(np.float32)
        means = [weights @ _chance(each.apply(raw, depth).astype(np.float64)) for each in (now, found.calibration)]
        changes += (np.abs(means[1] / np.maximum(means[0], 1e-12) - 1)).tolist()
    gain = GainModel.from_weights(source, outcomes.depths)
    if gain is not None and found.gain is not None:
        changes += (np.abs(found.gain.worth - gain.worth) / 10).tolist()
    return max(changes, default=0.0) >= config.change_min


def publish_refit(store: WeightStore, base: str, found: Refit, clock: Clock | None = None) -> Delta:
    """Publish a refit as the next delta of a version, with the golden answers that go with it.

    Args:
        store: Store of the version and its deltas.
        base: The version.
        found: What outcomes said.
        clock: Time of the delta.

    Raises:
        DeltaError: another writer was faster.
        WeightsError: the version or a delta is damaged, stations and oracle disagree, or the store refuses.
    """
    publisher = resume_series(store, base, clock)
    state = publisher.state
    groups = {name: dict(part) for name, part in state.groups().items()}
    groups["dense"] |= found.calibration.tensors()
    if found.gain is not None and ROUTING in groups:
        groups[ROUTING] = found.gain.tensors()
    source = MemorySource(base, groups, dict(state.documents))
    add_golden(source, Golden.from_weights(source).request)
    documents: Mapping[str, dict[str, Any]] = {DOCUMENT: source.documents[DOCUMENT]}
    return publisher.publish(source.groups, documents)


def published_parts(store: WeightStore, base: str) -> tuple[RankerConfig, Calibration, GainModel | None, Floats]:
    """Return what a version was published with: its configuration, calibration, gain model, and costs of depths.

    Raises:
        WeightsError: the version is missing or damaged.
    """
    reader = store.open(base)
    config = RankerConfig.model_validate(reader.json("model"))
    calibration = Calibration.from_weights(reader, config.depths)
    return config, calibration, GainModel.from_weights(reader, config.depths), cost_shares(config)


def _lines(said: Floats, outcomes: Outcomes, weights: Floats, config: RecalibrationConfig) -> tuple[Floats, Floats]:
    """Return factors [O] and offsets [O]; the conversion's on clicked outcomes, as it is trained."""
    lines: list[tuple[float, float]] = [(1.0, 0.0)] * len(OBJECTIVES)
    lines[CLICK] = refit_line(said[:, CLICK], outcomes.clicks, weights, config)
    clicked = outcomes.clicks
    lines[CONVERSION] = refit_line(said[clicked, CONVERSION], outcomes.conversions[clicked], weights[clicked], config)
    factors, offsets = np.array(lines, np.float64).T
    return factors, offsets


def _slice(calibration: Calibration, outcomes: Outcomes) -> Slice:
    columns = [
        calibration.apply(outcomes.logits[:, column].astype(np.float32), depth)[:, CLICK]
        for column, depth in enumerate(outcomes.depths)
    ]
    logits = np.stack(columns, axis=1).astype(np.float64)
    return Slice(outcomes.signals, outcomes.surfaces, outcomes.depths, logits, outcomes.clicks)


def _chance(logits: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(logits, -60.0, 60.0))), np.float64)
