"""The frontier of quality against cost: what a routed mix of the tiers gives beside each tier alone.

Cost is counted FLOPs of a whole request (``models.routing.tier_flops``), quality the click NE of held-out rows. Along
the curve only the price changes; a point is read off by its cost, never by its quality, where two are compared at equal
cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from models.config import RankerConfig
from models.routing import GainModel
from models.source import WeightSource
from shared.errors import ConfigError
from training.chart import line_chart
from training.evaluate import dataset_of
from training.model import TrainedModel
from training.routing import NUM_CANDIDATES, Floats, Slice, choose, cost_shares, depth_costs, held_out_slice

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of the deepest tier's cost at which the table shows the mix."""

_NUM_CHART_POINTS = 61


@dataclass(frozen=True, slots=True)
class Point:
    """One way of serving all requests.

    Args:
        share: Mean cost over the deepest tier's.
        ne: Click NE.
        mix: Share of the rows by depth.
        price: Price that led to it; None for one tier alone.
    """

    share: float
    ne: float
    mix: dict[int, float]
    price: float | None = None


@dataclass(frozen=True, slots=True)
class Frontier:
    """What a model's tiers and their routed mixes give on held-out rows.

    Args:
        flops: depth -> FLOPs of one request.
        uniform: Each depth alone, the cheapest first.
        routed: Mixes, the cheapest first.
    """

    flops: dict[int, int]
    uniform: tuple[Point, ...]
    routed: tuple[Point, ...]

    def at(self, share: float) -> Point:
        """Return the dearest mix that costs no more than a share of the deepest tier."""
        return [self.routed[0], *(point for point in self.routed if point.share <= share + 1e-9)][-1]

    @property
    def flops_saved_at_equal_ne(self) -> float:
        """Share of the deepest tier's FLOPs that the cheapest mix saves that is no worse; negative: none is."""
        full = self.uniform[-1]
        return 1.0 - min((point.share for point in self.routed if point.ne <= full.ne), default=1.0 + full.share)

    def ne_gains_at_equal_flops(self) -> dict[int, float]:
        """Return by how much the mix of a tier's cost is better in NE than that tier: depth -> difference."""
        depths = list(self.flops)
        pairs = zip(depths[1:], self.uniform[1:], strict=True)
        return {depth: point.ne - self.at(point.share).ne for depth, point in pairs}

    def ne_of_random_mix(self, share: float) -> float:
        """Return the NE of a mix of the same cost drawn by lot: between the tiers, along their convex hull."""
        best = np.inf
        for low in self.uniform:
            for high in self.uniform:
                if low.share <= share <= high.share:
                    span = high.share - low.share
                    weight = (share - low.share) / span if span else 0.0
                    best = min(best, (1 - weight) * low.ne + weight * high.ne)
        return float(best)

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""

        def row(point: Point) -> dict[str, Any]:
            return {"share": point.share, "ne": point.ne, "mix": point.mix, "price": point.price}

        return {
            "num_candidates": NUM_CANDIDATES,
            "flops": self.flops,
            "uniform": [row(point) for point in self.uniform],
            "routed": [row(point) for point in self.routed],
            "flops_saved_at_equal_ne": self.flops_saved_at_equal_ne,
            "ne_gain_at_equal_flops": self.ne_gains_at_equal_flops(),
        }


def frontier_of_version(reader: WeightSource, data_dir: Path) -> Frontier:
    """Draw the frontier of a published version on the test rows of the data that it was trained on.

    Raises:
        ConfigError: it was published without a gain model.
        DataUnavailableError: the data cannot be had.
        WeightsError: the weights do not fit their model.
    """
    dataset = dataset_of(reader, data_dir)
    model = TrainedModel.from_weights(reader, dataset)
    if model.gain is None:
        raise ConfigError(
            f"weights {reader.version} do not say what each tier is worth: train again", field="routing", value="none"
        )
    return draw_frontier(model.ranker.config, model.gain, held_out_slice(model, dataset, dataset.split.test))


def draw_frontier(config: RankerConfig, model: GainModel, rows: Slice) -> Frontier:
    """Route rows at every price of the model's table.

    Args:
        config: The ranker.
        model: Its gain model, fitted on other rows.
        rows: Held-out rows.
    """
    flops, costs = depth_costs(config), cost_shares(config)
    losses, entropy = rows.losses(), rows.entropy()
    gains = model.gains(rows.signals, rows.surfaces)
    depths = list(flops)
    uniform = [
        Point(float(cost), float(losses[:, column].mean() / entropy), {depth: 1.0})
        for column, (depth, cost) in enumerate(zip(depths, costs, strict=True))
    ]
    routed = [_routed(gains, losses / entropy, costs, depths, float(price)) for price in model.prices[:, 1]]
    return Frontier(flops, tuple(uniform), tuple(sorted(routed, key=lambda point: point.share)))


def _routed(gains: Floats, ne: Floats, costs: Floats, depths: list[int], price: float) -> Point:
    chosen = choose(gains, costs, price)
    counts = np.bincount(chosen, minlength=len(depths)) / len(chosen)
    mix = {depth: round(float(share), 4) for depth, share in zip(depths, counts, strict=True)}
    return Point(float(costs[chosen].mean()), float(ne[np.arange(len(ne)), chosen].mean()), mix, price)


def show_frontier(frontier: Frontier, title: str, console: Console) -> None:
    """Print each tier alone, the mix at some costs, and what the comparison comes to."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("served by", no_wrap=True)
    for name in ("FLOPs", "of full", "click NE", "against full", "drawn by lot"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("rows by depth", no_wrap=True)
    total, full = list(frontier.flops.values())[-1], frontier.uniform[-1]

    def add(name: str, point: Point) -> None:
        mix = " ".join(f"{depth}: {share:.0%}" for depth, share in point.mix.items())
        by_lot = "" if point.price is None else f"{frontier.ne_of_random_mix(point.share):.5f}"
        change = f"{point.ne - full.ne:+.5f}"
        table.add_row(name, f"{point.share * total:,.0f}", f"{point.share:.0%}", f"{point.ne:.5f}", change, by_lot, mix)

    for depth, point in zip(frontier.flops, frontier.uniform, strict=True):
        add(f"depth {depth}", point)
    for share in SHARES:
        add(f"router, at most {share:.0%}", frontier.at(share))
    console.print(f"[bold]{title}[/bold], FLOPs of a request with {NUM_CANDIDATES} candidates")
    console.print(table)
    console.print(f"FLOPs saved at equal NE: {frontier.flops_saved_at_equal_ne:.0%}")
    for depth, gain in frontier.ne_gains_at_equal_flops().items():
        console.print(f"NE gained at the cost of depth {depth}: {gain:+.5f}")


def frontier_chart(frontier: Frontier, title: str) -> str:
    """Return the routed curve beside mixes drawn by lot, as SVG."""
    low = frontier.uniform[0].share
    shares = np.linspace(low, frontier.uniform[-1].share, _NUM_CHART_POINTS)
    lines = {
        "router": [frontier.at(float(share)).ne for share in shares],
        "by lot": [frontier.ne_of_random_mix(float(share)) for share in shares],
    }
    return line_chart(list(map(float, shares)), lines, title, "mean FLOPs of a request over the deepest tier's", "NE")
