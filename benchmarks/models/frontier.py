"""Benchmark ``frontier``: what routing requests to tiers gives on the T1 test rows, with three seeds.

Each seed trains the quick model. Its gain model is fitted on the validation rows; then the test rows are routed at
every price. Logits are kept (``benchmarks.models.predictions``): a later run of the same model trains nothing.

* ``flops_saved_at_equal_ne``: share of the full tier's FLOPs that the cheapest mix saves whose NE is no worse;
* ``flops_saved_mean_curve``: the same of the mean curve of all seeds, in which chance crossings of one seed count less;
* ``ne_change_at_75``: NE of the mix at three quarters of the full tier's FLOPs less that of the full tier;
* ``ne_gain_at_equal_flops``: NE of the full tier less that of the dearest mix that costs no more; and the same of the
  standard tier;
* ``ne_gain_over_lot_*``: NE of tiers drawn by lot less that of the router, at equal cost;
* ``dr_error_*``: how far estimates from logs of a random policy, which know the served tier's loss alone, are from what
  all tiers' losses say;
* ``calibration_error_max``: largest distance of a tier's mean prediction over the base rate from 1;
* ``refitted_*``: the same, and NE, where calibration and worth follow the outcomes of explored requests that are at
  least a day old (``benchmarks.models.prequential``), all of them or a share; beside it what was published.

The parameter ``standard_error`` of a difference is that of the mean over seeds, from sums over users: rows of one user
are not independent, and all seeds see the same users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.harness import quantiles
from benchmarks.models import prequential
from benchmarks.models.predictions import load_or_train
from benchmarks.record import RESULTS_DIR, Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from models.calibration import Calibration
from models.routing import GainModel
from shared.settings import load_settings
from training.config import TrainConfig, load_train_config
from training.data import Dataset, load_dataset
from training.evaluate import Predictions, fit_calibration
from training.frontier import Frontier, draw_frontier, frontier_chart
from training.outcomes import JoinConfig
from training.policy_value import doubly_robust, draw_log, inverse_propensity, replay, served_as
from training.recalibration import RecalibrationConfig
from training.routing import Floats, Slice, choose, cost_shares, fit_gain_model, slice_of

TRAIN_CONFIG = Path("configs/train/quick.yaml")
NUM_SEEDS = 3
TRAIN_SHARE, QUICK_SHARE = 1.0, 0.02
SHARES = (0.1, 0.25, 0.5, 0.75)
EXPLORED_SHARES = (1.0, 0.1)
"""Shares of the requests whose outcomes are known to the refit."""

REFIT_SHARES = np.linspace(0.03, 1.0, 98)
LOG_SHARE = 0.5
"""Share of the full tier's cost of the policy that is estimated from logs."""


@dataclass(frozen=True, slots=True)
class Seed:
    """What one seed gave: its frontier, its calibration and gain model, and the test rows."""

    frontier: Frontier
    model: GainModel
    test: Slice
    costs: Floats
    calibration: Calibration
    stream: prequential.Stream


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Train or read each seed, route, and write the chart of the first one beside the rows.

    Raises:
        DataUnavailableError: the data cannot be had.
    """
    share = QUICK_SHARE if options.quick else TRAIN_SHARE
    config = load_train_config(TRAIN_CONFIG).model_copy(update={"train_share": share})
    dataset = load_dataset(config.dataset, load_settings().data_dir, synthetic_fallback=config.synthetic_fallback)
    seeds = range(options.seed, options.seed + (1 if options.quick else NUM_SEEDS))
    configs = [config.model_copy(update={"seed": seed}) for seed in seeds]
    said = load_or_train(configs, dataset)
    found = [_seed(each, dataset, logits) for each, logits in zip(configs, said, strict=True)]
    params: dict[str, Param] = {"seeds": len(found), "train_share": share, "dataset": config.dataset}
    if not options.quick:
        chart = frontier_chart(found[0].frontier, "click NE on the T1 test rows by mean FLOPs of a request")
        (RESULTS_DIR / "frontier.svg").write_text(chart, encoding="utf-8")
    figures = [*_curve(found, params), *_followed(found, params), *_logs(found, params, options.seed)]
    return BenchmarkReport(tuple(figures), config.digest())


def _seed(config: TrainConfig, dataset: Dataset, said: Mapping[str, Predictions]) -> Seed:
    split, length = dataset.split, config.model.history_length
    calibration = fit_calibration(said["valid"], split.valid)
    costs = cost_shares(config.model)
    valid = slice_of(dataset, split.valid, length, said["valid"], calibration)
    test = slice_of(dataset, split.test, length, said["test"], calibration)
    model = fit_gain_model(valid, costs)
    stream = prequential.Stream.of(split.test, said["test"], test)
    return Seed(draw_frontier(config.model, model, test), model, test, costs, calibration, stream)


def _curve(found: Sequence[Seed], params: Mapping[str, Param]) -> list[Measurement]:
    frontiers = [each.frontier for each in found]
    columns: dict[str, list[float]] = {
        "flops_saved_at_equal_ne": [each.flops_saved_at_equal_ne for each in frontiers],
        "calibration_error_max": [_calibration_error(each.test) for each in found],
    }
    columns["flops_saved_mean_curve"] = [_saved_on_mean_curve(frontiers)]
    columns["ne_change_at_75"] = [each.at(0.75).ne - each.uniform[-1].ne for each in frontiers]
    depths = list(frontiers[0].flops)
    errors: dict[str, float] = {}
    for column, depth in enumerate(depths):
        columns[f"click_ne_depth_{depth}"] = [each.uniform[column].ne for each in frontiers]
        if column:
            name = "ne_gain_at_equal_flops" + ("" if depth == depths[-1] else f"_depth_{depth}")
            columns[name] = [each.ne_gains_at_equal_flops()[depth] for each in frontiers]
            errors[name] = _standard_error([_difference(each, column, each.costs[column]) for each in found], found)
    for share in SHARES:
        points = [each.at(share) for each in frontiers]
        columns[f"click_ne_routed_{share:.0%}"] = [point.ne for point in points]
        columns[f"ne_gain_over_lot_{share:.0%}"] = [
            each.ne_of_random_mix(point.share) - point.ne for each, point in zip(frontiers, points, strict=True)
        ]
        errors[f"click_ne_routed_{share:.0%}"] = _standard_error(
            [_difference(each, -1, share) for each in found], found
        )
    flops: dict[str, Param] = {f"flops_depth_{depth}": count for depth, count in frontiers[0].flops.items()}
    return [_mean(name, values, {**params, **flops}, errors.get(name)) for name, values in columns.items()]


def _difference(each: Seed, column: int, share: float) -> Floats:
    """Return by how much NE of each row is better with the mix of a cost than at a depth alone: [N]."""
    price = each.frontier.at(share).price
    losses, gains = each.test.losses() / each.test.entropy(), each.model.gains(each.test.signals, each.test.surfaces)
    chosen = choose(gains, each.costs, 0.0 if price is None else price)
    return np.asarray(losses[:, column] - losses[np.arange(len(losses)), chosen], np.float64)


def _standard_error(differences: Sequence[Floats], found: Sequence[Seed]) -> float:
    """Return the standard error of the mean over seeds and rows, rows of one user taken as one: [N] of each seed."""
    mean = np.mean(differences, axis=0)
    sums = np.bincount(found[0].stream.rows.user_index, weights=mean - mean.mean())
    return float(np.sqrt((sums**2).sum()) / len(mean))


def _followed(found: Sequence[Seed], params: Mapping[str, Param]) -> list[Measurement]:
    """Measure calibration and router that follow outcomes, beside what was published."""
    join, config = JoinConfig(), RecalibrationConfig()
    about: dict[str, Param] = {**params, "delay_s": join.delay_s, "half_life_s": config.half_life_s}
    figures: list[Measurement] = []
    depths = found[0].stream.depths
    for share in (0.0, *EXPLORED_SHARES):
        slices = [
            replace(
                each.test,
                logits=prequential.recalibrated(each.stream, each.calibration, share, 0, join, config)
                if share
                else each.test.logits,
            )
            for each in found
        ]
        name = "published" if not share else "refitted" if share == 1.0 else f"refitted_{share:.0%}"
        given = {**about, "explored_share": share}
        figures.append(_mean(f"{name}_calibration_error_max", [_calibration_error(each) for each in slices], given))
        for column, depth in enumerate(depths):
            ratios = [_calibration_ratio(each, column) for each in slices]
            nes = [float(each.losses()[:, column].mean() / each.entropy()) for each in slices]
            figures += [
                _mean(f"{name}_calibration_depth_{depth}", ratios, given),
                _mean(f"{name}_click_ne_depth_{depth}", nes, given),
            ]
    return [*figures, *_followed_router(found, about, join, config)]


def _followed_router(
    found: Sequence[Seed], params: Mapping[str, Param], join: JoinConfig, config: RecalibrationConfig
) -> list[Measurement]:
    gains: dict[int, list[float]] = {depth: [] for depth in found[0].stream.depths[1:]}
    differences: dict[int, list[Floats]] = {depth: [] for depth in gains}
    saved: list[float] = []
    for each in found:
        chosen = prequential.rerouted(each.stream, each.calibration, each.model, each.costs, REFIT_SHARES, join, config)
        losses, rows = each.test.losses() / each.test.entropy(), np.arange(len(each.test))
        costs, nes = each.costs[chosen].mean(axis=1), np.array([losses[rows, one].mean() for one in chosen])
        full = float(losses[:, -1].mean())
        saved.append(1.0 - min(costs[nes <= full], default=1.0 + 1.0))
        for column, depth in enumerate(gains, 1):
            best = int(np.argmax(np.where(costs <= each.costs[column] + 1e-9, costs, -1.0)))
            difference = np.asarray(losses[:, column] - losses[rows, chosen[best]], np.float64)
            differences[depth].append(difference)
            gains[depth].append(float(difference.mean()))
    figures = [_mean("refitted_flops_saved_at_equal_ne", saved, params)]
    for depth, values in gains.items():
        name = "refitted_ne_gain_at_equal_flops" + ("" if depth == max(gains) else f"_depth_{depth}")
        figures.append(_mean(name, values, params, _standard_error(differences[depth], found)))
    return figures


def _saved_on_mean_curve(frontiers: Sequence[Frontier]) -> float:
    """Return the share of FLOPs saved at equal NE on the mean over seeds of the difference to the full tier."""
    for share in np.linspace(0.01, 1.0, 100):
        if np.mean([each.at(share).ne - each.uniform[-1].ne for each in frontiers]) <= 0:
            return 1.0 - float(share)
    return 0.0


def _logs(found: Sequence[Seed], params: Mapping[str, Param], seed: int) -> list[Measurement]:
    """Estimate the routed policy's mean loss from logs of a policy that draws tiers by lot, and compare."""
    errors: dict[str, list[float]] = {"replay_error": [], "ips_error": [], "dr_error": []}
    spreads: dict[str, list[float]] = {name: [] for name in errors}
    for each in found:
        losses = each.test.losses()
        gains = each.model.gains(each.test.signals, each.test.surfaces)
        chosen = choose(gains, each.costs, each.model.price(LOG_SHARE))
        rows = np.arange(len(losses))
        truth = float(losses[rows, chosen].mean())
        log = draw_log(losses, np.full(losses.shape[1], 1 / losses.shape[1]), seed)
        # Every tier makes the first pass: what its score expects of its loss, less what depth is predicted to gain.
        said = _entropy(1 / (1 + np.exp(-each.test.logits[:, :1]))) - gains
        chance = served_as(log, chosen)
        robust = doubly_robust(log, chance, expected=said[rows, chosen], predicted=said[rows, log.served])
        for name, estimate in (
            ("replay_error", replay(log, chosen)),
            ("ips_error", inverse_propensity(log, chance)),
            ("dr_error", robust),
        ):
            errors[name].append(abs(estimate.value - truth))
            spreads[name].append(estimate.error)
    return [
        _mean(name, values, {**params, "standard_error": round(float(np.mean(spreads[name])), 6)})
        for name, values in errors.items()
    ]


def _entropy(chance: Floats) -> Floats:
    clipped = np.clip(chance, 1e-7, 1 - 1e-7)
    entropy: Floats = -(clipped * np.log(clipped) + (1 - clipped) * np.log1p(-clipped))
    return entropy


def _calibration_ratio(rows: Slice, column: int) -> float:
    """Return a depth's mean prediction over the base rate."""
    return float((1 / (1 + np.exp(-rows.logits[:, column]))).mean() / rows.clicks.mean())


def _calibration_error(rows: Slice) -> float:
    return max(abs(_calibration_ratio(rows, column) - 1) for column in range(len(rows.depths)))


def _mean(
    name: str, values: Sequence[float], params: Mapping[str, Param], standard_error: float | None = None
) -> Measurement:
    name = name.replace("%", "")
    told = {} if standard_error is None else {"standard_error": round(standard_error, 6)}
    each: dict[str, Param] = {f"seed_{number}": round(float(value), 6) for number, value in enumerate(values)}
    about: dict[str, Param] = {**params, **told, **each}
    return Measurement(name, round(float(np.mean(values)), 6), "1", quantiles(values), len(values), about)
