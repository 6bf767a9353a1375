"""Fits the router's gain model on held-out rows.

The tiers are exits of one network, so one request served by the deepest tier tells what every tier would have said: an
exploration slice on that tier gives the loss of all of them on the same rows, and needs no weighting. Held-out rows are
such a slice. ``training.policy_value`` is for logs in which only the served tier's loss is known.

A measured gain is a hundred times smaller than the noise of its label, so gains are not regressed on signals. Labels
are asked one question that they can answer: how much of each exit's correction of the one before is to be believed,
and how that turns with the signals::

    belief = sigmoid(first + sum_d (trust_d + signals @ turn_d) * (exit_d - exit_{d-1}))

a logistic regression whose prior is that every correction is right (trust 1, turn 0). What a depth gains by this
belief, each row's expectation over both labels, has no label noise left, and is regressed on the signals. It is
negative where a correction is believed less than half: such requests are better off with the cheaper tier.

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
from models.logistic import fit_logistic
from models.routing import SIGNALS, WORTH_EQUAL, GainModel, surface_keys, tier_flops
from training.data import Dataset, HistoryReader, Rows, request_batches
from training.evaluate import Predictions, fit_calibration, predict
from training.model import TrainedModel

Floats = npt.NDArray[np.float64]

HIDDEN_UNITS = 128
HIDDEN_RIDGE = 1.0
TRUST_PRECISION = 10.0
TURN_PRECISION = 100.0
"""How much of a correction is believed everywhere, and how that turns with a signal: what labels must outweigh.

Chosen on validation rows: fitted on either half and routed on the other, three seeds. Ridges of 0.3 to 3 and turns of
50 to 200 are alike; a ridge of 0.01 costs half of the gain, and a belief that does not turn never finds that the first
pass would be better."""

SIGNAL_MAX = 4.0
"""Deviations from the mean beyond which a signal turns the belief no further."""

SURFACE_ROWS = 100_000
"""Rows of a surface at which half of what it seems to gain is believed: a gain is a hundred times smaller than its
noise."""

NUM_CANDIDATES = 500
"""Candidates of the request whose cost is counted."""

ROWS_MIN = 500
"""With fewer held-out rows there is no gain model: a gain is a hundred times smaller than its noise."""

NUM_PRICES = 201
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

    def corrections(self) -> Floats:
        """Return what each exit adds to the logit of the one before: [N, D - 1]."""
        return np.asarray(np.diff(self.logits, axis=1), np.float64)

    def expected_gains(self, chance: Floats) -> Floats:
        """Return what each depth saves over the first pass if clicks come with these chances: [N] -> [N, D], nats."""
        expected = np.logaddexp(0.0, self.logits) - chance[:, None] * self.logits
        return np.asarray(expected[:, :1] - expected, np.float64)

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
    gains = held_out.expected_gains(believed(held_out, scaled))
    hidden, bias, out = _fit_gains(scaled, gains, seed)
    keys, num_depths = np.unique(held_out.surfaces), len(held_out.depths)
    model = GainModel(
        depths=held_out.depths,
        mean=mean,
        deviation=deviation,
        hidden=hidden,
        bias=bias,
        out=out,
        worth=np.ones(num_depths),
        unknown=gains.mean(axis=0),
        surface_keys=keys,
        surface=np.zeros((len(keys), num_depths)),
        prices=np.zeros((1, 2)),
    )
    model = replace(model, surface=_surfaces(model, held_out))
    return replace(model, prices=price_table(model.gains(held_out.signals, held_out.surfaces), costs))


def believed(rows: Slice, scaled: Floats) -> Floats:
    """Return the chance of a click when each exit's correction is believed as far as labels support it.

    Args:
        rows: N rows with their labels.
        scaled: [N, K], their signals, centred and scaled.

    Returns:
        [N], of the same rows: few coefficients for many labels, so that none knows its own.
    """
    turns = np.concatenate([np.ones((len(rows), 1)), np.clip(scaled, -SIGNAL_MAX, SIGNAL_MAX)], axis=1)
    corrections = rows.corrections()
    design = (corrections[:, :, None] * turns[:, None, :]).reshape(len(rows), -1)
    prior = np.zeros((corrections.shape[1], turns.shape[1]))
    precision = np.full_like(prior, TURN_PRECISION)
    prior[:, 0], precision[:, 0] = 1.0, TRUST_PRECISION
    first = rows.logits[:, 0]
    found = fit_logistic(design, first, rows.clicks, prior.ravel(), precision.ravel())
    return np.asarray(1.0 / (1.0 + np.exp(-(first + design @ found))), np.float64)


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


def _fit_gains(scaled: Floats, gains: Floats, seed: int) -> tuple[Floats, Floats, Floats]:
    """Fit ``relu(x @ hidden + bias) @ out`` to gains: random hidden units, and ridge regression on them.

    The last unit is 1 for every row, so that its coefficient is the mean, which the penalty leaves alone. Of a map this
    small and smooth, trained hidden units know no more; this one is solved in a tenth of a second, and the same on
    every machine.

    Source: Rahimi and Recht, Weighted Sums of Random Kitchen Sinks, 2008.
    """
    random = np.random.default_rng(seed)
    hidden = random.normal(size=(scaled.shape[1], HIDDEN_UNITS)) / np.sqrt(scaled.shape[1])
    bias = random.normal(size=HIDDEN_UNITS)
    units = np.maximum(scaled @ hidden + bias, 0.0)
    centre = units.mean(axis=0)
    units = units - centre
    penalty = HIDDEN_RIDGE * len(scaled) * np.eye(HIDDEN_UNITS)
    out = np.linalg.solve(units.T @ units + penalty, units.T @ (gains - gains.mean(axis=0)))
    level = gains.mean(axis=0) - centre @ out
    hidden, bias = np.concatenate([hidden, np.zeros((len(hidden), 1))], axis=1), np.concatenate([bias, [1.0]])
    return hidden, bias, np.concatenate([out, level[None]])
