"""What a tier is worth to a request and what it costs: the router's model. Numpy only, the ingress reads it.

Worth is the click logloss that a deeper exit saves over the first pass, predicted from request-only signals: how much
history there is and how recent and dense it is, what the user's events were worth, and the surface::

    fitted [N, D] = relu(signals @ hidden + bias) @ out    what each depth saves, as of the publication
    gain   [N, D] = worth * fitted + surface's own part

``worth`` is 1 a depth when a version is published, and follows what outcomes say later (``training.recalibrate``). A
gain may be negative: some requests are served better by a cheaper tier (``training.routing`` says how it is fitted).

Shape letters: N requests, K signals, D depths (the first pass and the exits), H hidden units, P prices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from models.config import RankerConfig
from models.flops import candidate_flops, request_flops
from models.inputs import DENSE_FEATURES, GAP_SCALE, NUM_SURPRISES
from models.source import Tensors, WeightSource, tensor
from shared.errors import WeightsError
from shared.hashing import id_keys

GROUP = "routing"
SIGNALS = DENSE_FEATURES[:-NUM_SURPRISES]
"""Request-only signals, what ``models.inputs`` makes of a history without the items; the order of axis K."""

WORTH_EQUAL = 1e-9
"""Tiers whose values differ by less are worth the same: it is rounding, which must not buy the dearer one."""

Floats = npt.NDArray[np.float64]

_NEWEST, _OLDEST = SIGNALS.index("log_gap_newest"), SIGNALS.index("log_gap_oldest")
_HAS_HISTORY = SIGNALS.index("has_history")
_FIELDS = ("mean", "deviation", "hidden", "bias", "out", "worth", "unknown", "surface", "prices")


@dataclass(frozen=True, slots=True)
class GainModel:
    """The router's model of one weights version.

    Args:
        depths: D depths, ascending, 0 first; gains are over depth 0, whose own is 0.
        mean: [K], what signals are centred by.
        deviation: [K], what they are scaled by.
        hidden: [K, H].
        bias: [H].
        out: [H, D].
        worth: [D], what a nat of the fitted gain has turned out to be worth, 1 as published.
        unknown: [D], gains of a request about whose user nothing is known: the means.
        surface_keys: int64 [S], id keys of the surfaces it was trained on.
        surface: [S, D], what each surface adds.
        prices: [P, 2], ascending shares of the deepest tier's cost, and the price at which the mean cost is that share;
            a price is nats of logloss a request for the whole cost of the deepest tier.
    """

    depths: tuple[int, ...]
    mean: Floats
    deviation: Floats
    hidden: Floats
    bias: Floats
    out: Floats
    worth: Floats
    unknown: Floats
    surface_keys: npt.NDArray[np.int64]
    surface: Floats
    prices: Floats

    def gains(self, signals: npt.NDArray[np.floating], surfaces: npt.NDArray[np.int64]) -> Floats:
        """Predict what every depth saves over the first pass.

        Args:
            signals: [N, K].
            surfaces: int64 [N], id keys; one that is unknown adds nothing.

        Returns:
            [N, D], nats of click logloss a candidate; column 0 is 0.
        """
        known = surfaces[:, None] == self.surface_keys
        found: Floats = self.fitted(signals) * self.worth + known.astype(np.float64) @ self.surface
        found[:, 0] = 0.0
        return found

    def fitted(self, signals: npt.NDArray[np.floating]) -> Floats:
        """Return what each depth saves over the first pass, before ``worth`` and surface: [N, K] -> [N, D], nats."""
        scaled = (signals.astype(np.float64) - self.mean) / self.deviation
        found: Floats = np.maximum(scaled @ self.hidden + self.bias, 0.0) @ self.out
        return found

    def price(self, share: float) -> float:
        """Return the price at which the mean cost is this share of the deepest tier's, 0 to 1."""
        return float(np.interp(share, self.prices[:, 0], self.prices[:, 1]))

    @classmethod
    def from_weights(cls, source: WeightSource, depths: tuple[int, ...]) -> Self | None:
        """Read the model of a weights version; None when it has none (it was published without held-out rows).

        Raises:
            WeightsError: it is of other depths or signals.
        """
        try:
            source.tensors(GROUP)
        except WeightsError:
            return None
        values = {name: tensor(source, GROUP, name, np.float64) for name in _FIELDS}
        keys = tensor(source, GROUP, "surface_keys", np.int64)
        num_signals, num_depths = len(SIGNALS), len(depths)
        wanted = {"worth": (num_depths,), "mean": (num_signals,)}
        for name, shape in wanted.items():
            if values[name].shape != shape:
                raise WeightsError(
                    f"tensor {GROUP}/{name} of weights {source.version} must be {shape}, is {values[name].shape}",
                    version=source.version,
                    file=GROUP,
                )
        return cls(depths=depths, surface_keys=keys, **values)

    def tensors(self) -> Tensors:
        """Return the arrays under the names that ``from_weights`` reads."""
        return {name: getattr(self, name) for name in (*_FIELDS, "surface_keys")}


def surface_keys(names: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """Return the id keys by which the model knows surfaces."""
    return id_keys(names)


def aged(signals: npt.NDArray[np.floating], elapsed_s: float) -> npt.NDArray[np.float32]:
    """Return signals as they would be some seconds later without a new event: [K] or [N, K].

    The gaps to the newest and the oldest event grow; the share of events of the last hour is left as it was.
    """
    later = np.array(signals, np.float32)
    for column in (_NEWEST, _OLDEST):
        gap_s = np.exp(later[..., column] * GAP_SCALE) + max(elapsed_s, 0.0)
        later[..., column] = np.where(later[..., _HAS_HISTORY] > 0, np.log(gap_s) / GAP_SCALE, 0.0)
    return later


def tier_flops(config: RankerConfig, tier: str, num_candidates: int) -> int:
    """Count one request on a tier: the request side, the first pass of all candidates, the full pass of the head.

    Raises:
        KeyError: there is no such tier.
    """
    num_tokens = config.encoder.num_tokens
    depth, head = config.depth(tier), min(config.tiers[tier].head_max, num_candidates)
    total = sum(request_flops(config, num_tokens).values())
    total += sum(candidate_flops(config, 0, num_tokens, num_candidates).values())
    return total + (sum(candidate_flops(config, depth, num_tokens, head).values()) if depth else 0)
