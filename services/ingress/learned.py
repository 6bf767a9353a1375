"""What a router learns while it serves: users' signals, the tiers' costs, and the price of compute."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from models.routing import GainModel, aged
from services.ingress.config import RouterConfig
from shared.clock import Clock
from shared.hashing import EntityId

Signals: TypeAlias = npt.NDArray[np.float32]
"""Request-only signals [K] of a user, see ``models.routing``."""

_COST_MIN_MS = 1e-3


class RememberedSignals:
    """What the mesh said of users when it last ranked for them, a bounded number of users.

    The ingress reads no history before it chooses: it goes by the last answer, and lets its gaps in time grow.

    Args:
        users_max: Users; the one that was asked for longest ago goes first.
    """

    def __init__(self, users_max: int) -> None:
        self._users_max = users_max
        self._users: OrderedDict[EntityId, tuple[Signals, int]] = OrderedDict()

    def get(self, user: EntityId, as_of_s: int) -> Signals | None:
        """Return a user's signals as of a time; None when the user is not known."""
        if (found := self._users.get(user)) is None:
            return None
        self._users.move_to_end(user)
        signals, seen_s = found
        return aged(signals, as_of_s - seen_s)

    def remember(self, user: EntityId, signals: Signals, as_of_s: int) -> None:
        """Keep what a state said of a user at a time."""
        self._users[user] = (np.array(signals, np.float32), as_of_s)
        self._users.move_to_end(user)
        while len(self._users) > self._users_max:
            self._users.popitem(last=False)

    def forget(self, user: EntityId) -> None:
        """Drop what is known of a user."""
        self._users.pop(user, None)

    def __len__(self) -> int:
        """Number of users."""
        return len(self._users)


class TierCosts:
    """Compute time of a ranking call by tier and candidates, kept current: ``a + b * C`` by decayed least squares.

    Args:
        prior_ms: Tier -> milliseconds of a call, before anything is measured.
        num_candidates: Candidates that the prior is for.
        decay: What one more measurement leaves of the weight of the earlier ones.
    """

    def __init__(self, prior_ms: Mapping[str, float], num_candidates: int, decay: float = 0.98) -> None:
        self._names = tuple(prior_ms)
        self._decay = decay
        self._num_prior = num_candidates
        self._sums = {name: self._prior(ms) for name, ms in prior_ms.items()}
        self._unmeasured = set(prior_ms)

    def observe(self, tier: str, num_candidates: int, rank_ms: float) -> None:
        """Take in one measured call; the first says how large a tier's times are, the prior only gives their shape."""
        if tier in self._unmeasured:
            self._unmeasured.discard(tier)
            expected_ms = _line(self._sums[tier], num_candidates)
            self._sums[tier] = self._prior(_line(self._sums[tier], self._num_prior) * rank_ms / expected_ms)
        self._sums[tier] = self._decay * self._sums[tier] + _sums(num_candidates, rank_ms)

    def of(self, num_candidates: int) -> npt.NDArray[np.float64]:
        """Return the milliseconds of each tier, in the order of the prior; at least a microsecond."""
        return np.array([max(_line(self._sums[name], num_candidates), _COST_MIN_MS) for name in self._names])

    def _prior(self, ms: float) -> npt.NDArray[np.float64]:
        """Return two points of a line that has a tenth of its time at no candidates."""
        return _sums(self._num_prior, ms) + _sums(0.0, ms / 10)


class PriceControl:
    """Sets the price from utilisation, requests in flight and missed deadlines.

    An integral controller of the share of the best tier's cost that requests may take on average: it falls while
    utilisation or occupancy is above its target or too many deadlines are missed, and rises while there is room. The
    gain model's table says which price leads to a share, so the controller's steps are the same size everywhere.

    Args:
        config: Targets, limit of misses, period, step.
        model: Has the table.
        clock: Time.
    """

    def __init__(self, config: RouterConfig, model: GainModel, clock: Clock) -> None:
        self._config = config
        self._model = model
        self._clock = clock
        self.share = 1.0
        self.utilisation = self.occupancy = 0.0
        self._price = model.price(1.0)
        self._begin_s = clock.monotonic_s()
        self._busy_ms = 0.0
        self._num_served = self._num_missed = self._num_seen = 0
        self._occupied = 0.0

    def adopt(self, model: GainModel) -> None:
        """Go by another gain model's table, at the share that was reached."""
        self._model = model
        self._price = model.price(self.share)

    def observe(self, busy_ms: float, *, missed: bool) -> None:
        """Take in one request that has ended."""
        self._busy_ms += busy_ms
        self._num_served += 1
        self._num_missed += missed
        self._step()

    def price(self, occupancy: float = 0.0) -> float:
        """Return the present price: nats of logloss a request for the whole cost of the best tier.

        Args:
            occupancy: Requests in flight over the number above which nothing but the lowest tier is served.
        """
        self._occupied += occupancy
        self._num_seen += 1
        self._step()
        return self._price

    def _step(self) -> None:
        config, now_s = self._config, self._clock.monotonic_s()
        elapsed_s = now_s - self._begin_s
        if elapsed_s < config.period_s:
            return
        self.utilisation = self._busy_ms / 1e3 / (elapsed_s * config.cores)
        self.occupancy = self._occupied / max(self._num_seen, 1)
        missed = self._num_missed / max(self._num_served, 1)
        loads = (self.utilisation / config.utilisation_target, self.occupancy / config.occupancy_target)
        excess = max(loads) - 1.0
        if missed > config.miss_share_max:
            excess = max(excess, 1.0)
        # A silence of many periods counts as its number of steps, at most to the other end; what a few requests met
        # before it is no reason for more than one.
        steps = min(elapsed_s / config.period_s, 1.0 / config.step) if excess < 0 else 1.0
        change = -config.step * float(np.clip(excess, -1.0, 1.0)) * steps
        self.share = float(np.clip(self.share + change, 0.0, 1.0))
        self._price = self._model.price(self.share)
        self._begin_s, self._busy_ms, self._occupied = now_s, 0.0, 0.0
        self._num_served = self._num_missed = self._num_seen = 0


def _sums(x: float, y: float) -> npt.NDArray[np.float64]:
    return np.array([1.0, x, x * x, y, x * y])


def _line(sums: npt.NDArray[np.float64], x: float) -> float:
    """Return the value at ``x`` of the line of least squares; the mean where all points lie at one place."""
    n, sx, sxx, sy, sxy = sums
    spread = n * sxx - sx * sx
    slope = max((n * sxy - sx * sy) / spread, 0.0) if spread > 1e-9 * max(n * sxx, 1.0) else 0.0
    return float((sy - slope * sx) / n + slope * x)
