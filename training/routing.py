"""Fits the router's gain model on held-out rows.

The tiers are exits of one network, so one request served by the deepest tier tells what every tier would have said: an
exploration slice on that tier gives the loss of all of them on the same rows, and needs no weighting. Held-out rows are
such a slice. ``training.policy_value`` is for logs in which only the served tier's loss is known.

Shape letters: N rows, K signals, D depths, P points.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from models.calibration import Calibration
from models.config import RankerConfig
from models.heads import CLICK
from models.inputs import NUM_SURPRISES, request_inputs
from models.routing import SIGNALS, WORTH_EQUAL, GainModel, surface_keys, tier_flops
from training.data import Dataset, HistoryReader, Rows, request_batches
from training.evaluate import Predictions, fit_calibration, predict
from training.model import TrainedModel

Floats = npt.NDArray[np.float64]

HIDDEN_UNITS = 128
HIDDEN_RIDGE = 1e-2
"""Of those that were tried on the earlier half of the validation rows, these predict the disagreement of the later half
best, and with every seed: 5% of its variance."""

SURFACE_ROWS = 100_000
"""Rows of a surface at which half of what it seems to gain is believed: a gain is a hundred times smaller than its
noise."""

NUM_CANDIDATES = 500
"""Candidates of the request whose cost is counted."""

ROWS_MIN = 500
"""With fewer held-out rows there is no gain model: a gain is a hundred times smaller than its noise."""

NUM_PRICES = 201
_SQUARES_MIN = 1e-12
_READ_ROWS = 4_096


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows that every depth has scored.

    Args:
        signals: float32 [N, K].
        surfaces: int64 [N], id keys.
        depths: D depths, ascending.
        logits: float64 [N, D], calibrated logits of a click.
        clicks: bool [N].
    """

    signals: npt.NDArray[np.float32]
    surfaces: npt.NDArray[np.int64]
    depths: tuple[int, ...]
    logits: Floats
    clicks: npt.NDArray[np.bool_]

    def losses(self) -> Floats:
        """Return the negative log likelihood of each row's click at each depth: [N, D], nats."""
        found: Floats = np.logaddexp(0.0, self.logits) - self.clicks[:, None] * self.logits
        return found

    def divergences(self) -> Floats:
        """Return how far each depth's chance of a click is from the first pass's, Kullback and Leibler: [N, D], nats.

        It is what the first pass loses where the depth is right.
        """
        first, click = self.logits[:, :1], self.logits
        found: Floats = (click - first) / (1.0 + np.exp(-click)) + np.logaddexp(0.0, first) - np.logaddexp(0.0, click)
        return found

    def entropy(self) -> float:
        """Return the entropy of the base rate of clicks: what turns a mean loss into NE."""
        base = float(self.clicks.mean())
        return float(-(base * np.log(base) + (1 - base) * np.log(1 - base)))

    def __len__(self) -> int:
        """Number of rows N."""
        return len(self.clicks)


def slice_of(
    dataset: Dataset, rows: Rows, history_length: int, predictions: Predictions, calibration: Calibration
) -> Slice:
    """Join what every depth said of rows with the request-only signals that a server has."""
    depths = tuple(sorted(predictions))
    logits = [calibration.apply(predictions[depth], depth)[:, CLICK] for depth in depths]
    return Slice(
        signals=read_signals(dataset, rows, history_length),
        surfaces=surface_keys(dataset.surfaces)[rows.surface],
        depths=depths,
        logits=np.stack(logits, axis=1).astype(np.float64),
        clicks=rows.click,
    )


def fit_on_held_out(model: TrainedModel, dataset: Dataset) -> TrainedModel:
    """Return the model with what its validation rows determine: calibration of every depth, and the gain model."""
    rows = dataset.split.valid
    predictions = predict(model, dataset, rows, "strict")
    calibration, config = fit_calibration(predictions, rows), model.ranker.config
    gain = None
    if len(rows) >= ROWS_MIN:
        held_out = slice_of(dataset, rows, config.history_length, predictions, calibration)
        gain = fit_gain_model(held_out, cost_shares(config))
    return replace(model, calibration=calibration, gain=gain)


def held_out_slice(model: TrainedModel, dataset: Dataset, rows: Rows) -> Slice:
    """Score rows at every depth, with the history that a server knows."""
    predictions = predict(model, dataset, rows, "strict")
    return slice_of(dataset, rows, model.ranker.config.history_length, predictions, model.calibration)


def read_signals(dataset: Dataset, rows: Rows, history_length: int) -> npt.NDArray[np.float32]:
    """Return the request-only signals of rows: float32 [N, K]."""
    reader = HistoryReader(dataset.log, history_length, "strict", align="right")
    parts = [np.zeros((0, len(SIGNALS)), np.float32)]
    unknown = np.zeros((1, NUM_SURPRISES), np.float32)
    for batch in request_batches(rows, reader, _READ_ROWS):
        history = batch.history
        nothing = np.zeros((batch.num_requests, 0), np.int64)
        inputs = request_inputs(
            nothing,
            np.zeros_like(history.item_ids),
            history.ratings,
            history.timestamps_s,
            history.mask,
            history.num_total,
            batch.timestamp_s,
            num_events=1,
            window_step=1,
            item_rates=unknown,
        )
        parts.append(inputs.dense[batch.request_index, : len(SIGNALS)])
    return np.concatenate(parts)


def fit_gain_model(held_out: Slice, costs: Floats, seed: int = 0) -> GainModel:
    """Fit the gain model.

    Args:
        held_out: Rows that training has not seen.
        costs: [D], cost of each depth over the deepest's.
        seed: Of the hidden units.
    """
    mean = held_out.signals.mean(axis=0).astype(np.float64)
    deviation = held_out.signals.std(axis=0).astype(np.float64) + 1e-6
    scaled = (held_out.signals - mean) / deviation
    hidden, bias, out = _fit_disagreement(scaled, held_out.divergences(), seed)
    keys, num_depths = np.unique(held_out.surfaces), len(held_out.depths)
    model = GainModel(
        depths=held_out.depths,
        mean=mean,
        deviation=deviation,
        hidden=hidden,
        bias=bias,
        out=out,
        worth=np.zeros(num_depths),
        unknown=_gains(held_out).mean(axis=0),
        surface_keys=keys,
        surface=np.zeros((len(keys), num_depths)),
        prices=np.zeros((1, 2)),
    )
    model = replace(model, worth=_worth(model, held_out))
    model = replace(model, surface=_surfaces(model, held_out))
    return replace(model, prices=price_table(model.gains(held_out.signals, held_out.surfaces), costs))


def _worth(model: GainModel, rows: Slice) -> Floats:
    """Return the slope of measured gains by predicted disagreement, through the origin, at least 0: [D]."""
    disagreement = model.disagreement(rows.signals)
    products, squares = (disagreement * _gains(rows)).sum(axis=0), (disagreement**2).sum(axis=0)
    found: Floats = np.maximum(products / np.maximum(squares, _SQUARES_MIN), 0.0)
    return found


def _surfaces(model: GainModel, rows: Slice) -> Floats:
    """Return what each surface gains beyond all surfaces together and its requests' signals, shrunk: [S, D]."""
    rest = _gains(rows) - model.gains(rows.signals, rows.surfaces)
    rest -= rest.mean(axis=0)
    rest[:, 0] = 0.0
    known = (rows.surfaces[:, None] == model.surface_keys).astype(np.float64)
    found: Floats = (known.T @ rest) / (known.sum(axis=0)[:, None] + SURFACE_ROWS)
    return found


def _gains(rows: Slice) -> Floats:
    losses = rows.losses()
    return losses[:, :1] - losses


def price_table(gains: Floats, costs: Floats, num_prices: int = NUM_PRICES) -> Floats:
    """Return ascending shares of the deepest depth's cost with the price that leads to each: [P, 2].

    Args:
        gains: [N, D] predicted gains.
        costs: [D], cost of each depth over the deepest's.
        num_prices: Prices to look at.
    """
    spans = np.diff(costs)
    steps = np.diff(gains, axis=1) / np.where(spans > 0, spans, np.inf)
    top = max(float(steps.max(initial=0.0)), float((gains[:, 1:] / (costs[1:] - costs[0])).max(initial=0.0)))
    # Quantiles: most requests gain little, so even steps of the price would jump over them.
    worth = np.maximum(gains[:, 1:] / (costs[1:] - costs[0]), 0.0).ravel()
    prices = np.unique(np.concatenate([[0.0], np.quantile(worth, np.linspace(0, 1, num_prices)), [top * 1.001]]))
    shares = np.array([costs[choose(gains, costs, price)].mean() for price in prices])
    order = np.argsort(shares, kind="stable")
    # Of equal shares the lowest price: it takes the better depths.
    shares, first = np.unique(shares[order], return_index=True)
    return np.stack([shares, np.minimum.accumulate(prices[order][first])], axis=1)


def choose(gains: Floats, costs: Floats, price: float) -> npt.NDArray[np.int64]:
    """Return the depth of each row that is worth most after its price: [N, D] -> int64 [N], columns.

    Of depths worth the same the cheapest, as the router chooses.
    """
    value = gains - price * costs
    found: npt.NDArray[np.int64] = np.argmax(value >= value.max(axis=1, keepdims=True) - WORTH_EQUAL, axis=1)
    return found


def cost_shares(config: RankerConfig) -> Floats:
    """Return the cost of each depth over the deepest's: [D]."""
    flops = np.array(list(depth_costs(config).values()), np.float64)
    shares: Floats = flops / flops[-1]
    return shares


def depth_costs(config: RankerConfig, num_candidates: int = NUM_CANDIDATES) -> dict[int, int]:
    """Return the FLOPs of one request by the depth of its tier: the cheapest tier of each depth."""
    flops: dict[int, int] = {}
    for tier in config.tiers:
        depth, cost = config.depth(tier), tier_flops(config, tier, num_candidates)
        flops[depth] = min(cost, flops.get(depth, cost))
    return dict(sorted(flops.items()))


def _fit_disagreement(scaled: Floats, targets: Floats, seed: int) -> tuple[Floats, Floats, Floats]:
    """Fit ``relu(x @ hidden + bias) @ out`` to targets: random hidden units, and ridge regression on them.

    Of a map this small and smooth, trained hidden units know no more; this one is solved in a tenth of a second, and
    the same on every machine.

    Source: Rahimi and Recht, Weighted Sums of Random Kitchen Sinks, 2008.
    """
    random = np.random.default_rng(seed)
    hidden = random.normal(size=(scaled.shape[1], HIDDEN_UNITS)) / np.sqrt(scaled.shape[1])
    bias = random.normal(size=HIDDEN_UNITS)
    units = np.maximum(scaled @ hidden + bias, 0.0)
    penalty = HIDDEN_RIDGE * len(scaled) * np.eye(HIDDEN_UNITS)
    out: Floats = np.linalg.solve(units.T @ units + penalty, units.T @ targets)
    return hidden, bias, out
