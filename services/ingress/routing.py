"""Which ranking tier a request goes to, and why.

A request that names a tier gets it. The others get the tier whose predicted worth, less its price, is largest::

    worth(tier) - price * cost(tier) / cost(best tier)

Worth is predicted from request-only signals (``models.routing``); cost is the measured compute time of a call to the
tier with this many candidates (``learned.TierCosts``); the price follows utilisation and missed deadlines
(``learned.PriceControl``). A tier that the remaining budget cannot pay for is no choice, and above a number of requests
in flight nothing but the lowest tier is: quality goes before answers do. A small share of requests explores: it is
served by the best tier whatever its worth, so that what every tier would have said of unselected requests can be
learned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from models.config import RankerConfig
from models.routing import WORTH_EQUAL, GainModel, surface_keys
from models.source import WeightSource
from services.ingress.config import IngressConfig, RouterConfig, TierConfig
from services.ingress.learned import PriceControl, RememberedSignals, Signals, TierCosts
from shared.clock import Clock
from shared.errors import ConfigError, InvalidRequestError
from shared.hashing import EntityId

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What a router may look at.

    Args:
        asked: ``auto`` or a tier name from the client.
        remaining_ms: Budget left, milliseconds.
        num_candidates: Candidates C of the request.
        in_flight: Rank requests in this ingress replica, this one included.
        load: Work in flight over what can be answered within its budgets, as admission measures it; 1 is full.
        surface: Surface name.
        user: Canonical user id.
        as_of_s: Request time, seconds since the epoch.
    """

    asked: str
    remaining_ms: float
    num_candidates: int
    in_flight: int
    surface: str = ""
    user: EntityId = ""
    as_of_s: int = 0
    load: float = 0.0


@dataclass(frozen=True, slots=True)
class TierChoice:
    """A decision.

    Args:
        tier: Chosen tier.
        reason: Why, for the response and the log.
        fallbacks: Tiers to try when it fails, in order: lower ones first, then higher ones.
        explores: Whether the request is served by the best tier to learn from it.
        is_open: Whether client and budget left every tier open: only then a missed deadline says something of the mesh.
    """

    tier: str
    reason: str
    fallbacks: tuple[str, ...]
    explores: bool = False
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Served:
    """What came of a request, for the router to learn from.

    Args:
        tier: Tier that served it; empty: none did.
        num_candidates: Candidates C.
        rank_ms: Compute time of the ranking call, milliseconds.
        busy_ms: Compute time of all stations together, milliseconds.
        missed: Whether the deadline cut the answer short, or there was none, though client and budget left every tier
            open.
        user: Canonical user id.
        as_of_s: Request time, seconds since the epoch.
        signals: float32 [K], what the user's state says; None: no state.
    """

    tier: str
    num_candidates: int
    rank_ms: float
    busy_ms: float
    missed: bool
    user: EntityId = ""
    as_of_s: int = 0
    signals: Signals | None = None


class TierRouter(Protocol):
    """Decides by request, and is told what came of it."""

    def choose(self, query: RouteQuery) -> TierChoice:
        """Return the tier for one request.

        Raises:
            InvalidRequestError: the client forces a tier that does not exist.
        """
        ...

    def observe(self, served: Served) -> None:
        """Learn from one request that has ended."""
        ...

    def bear(self, served: Served) -> None:
        """Take note of the load that a request of another version was: the stations are the same."""
        ...

    def forget(self, user: EntityId) -> None:
        """Drop what was learned of a user."""
        ...

    def adopt(self, model: GainModel) -> None:
        """Route by another gain model of the same weights version from now on."""
        ...


class BudgetRouter:
    """The best tier that the remaining budget and the present load allow; a tier that the client names is obeyed.

    What routes where there is no gain model, and the limits within which ``GainRouter`` chooses.

    Args:
        tiers: Best first.
        light_above_in_flight: Requests in flight above which the lowest tier is taken.
        light_above_load: Load above which it is taken: below 1, so that quality goes before answers do.
    """

    def __init__(
        self, tiers: Sequence[TierConfig], light_above_in_flight: int, light_above_load: float = math.inf
    ) -> None:
        self._tiers = tuple(tiers)
        self._names = tuple(tier.name for tier in tiers)
        self._light_above = light_above_in_flight
        self._light_above_load = light_above_load

    def occupancy(self, query: RouteQuery) -> float:
        """Return in flight and load over their limits, the larger; above 1 nothing but the lowest tier is served."""
        return max(query.in_flight / self._light_above, query.load / self._light_above_load)

    def choose(self, query: RouteQuery) -> TierChoice:
        """Return the tier for one request.

        Raises:
            InvalidRequestError: the client forces a tier that does not exist.
        """
        return self.forced(query) or self.limited(query) or self.decide(self._names[0], "default")

    def observe(self, served: Served) -> None:
        """Nothing is learned."""

    def bear(self, served: Served) -> None:
        """No load is looked at but that of the moment."""

    def forget(self, user: EntityId) -> None:
        """Nothing was learned."""

    def adopt(self, model: GainModel) -> None:
        """No gain is looked at."""

    def forced(self, query: RouteQuery) -> TierChoice | None:
        """Return the only choice that client or load leave; None: every tier is open that the budget pays for.

        Raises:
            InvalidRequestError: the client forces a tier that does not exist.
        """
        if query.asked != AUTO:
            if query.asked not in self._names:
                allowed = ", ".join((AUTO, *self._names))
                raise InvalidRequestError(
                    f"tier must be one of {allowed}, is {query.asked!r}", field="tier", limit=allowed, value=query.asked
                )
            return self.decide(query.asked, "forced by the request", is_open=False)
        if query.in_flight > self._light_above:
            allowed_for = f"{self._light_above} allowed for {self._names[0]}"
            return self.decide(self._names[-1], f"load: {query.in_flight} requests in flight, {allowed_for}")
        if query.load > self._light_above_load:
            full = f"load: {query.load:.0%} of what may wait is in flight"
            return self.decide(self._names[-1], f"{full}, {self._light_above_load:.0%} allowed for {self._names[0]}")
        return None

    def limited(self, query: RouteQuery) -> TierChoice | None:
        """Return the best choice that the budget leaves; None: it leaves every tier."""
        best = self._tiers[0]
        if query.remaining_ms >= best.cost_ms:
            return None
        affordable = (tier for tier in self._tiers if query.remaining_ms >= tier.cost_ms)
        tier = next(affordable, self._tiers[-1])
        needs = f"{best.name} needs {best.cost_ms:.0f} ms at the 99th percentile"
        return self.decide(tier.name, f"budget: {query.remaining_ms:.0f} ms left, {needs}", is_open=False)

    def decide(self, tier: str, reason: str, *, explores: bool = False, is_open: bool = True) -> TierChoice:
        """Return a choice with its fall-backs."""
        index = self._names.index(tier)
        fallbacks = self._names[index + 1 :] + tuple(reversed(self._names[:index]))
        return TierChoice(tier, reason, fallbacks, explores, is_open)


class GainRouter:
    """The tier whose predicted worth less its price is largest, within the limits of budget and load.

    Args:
        config: The router's configuration.
        tiers: Best first.
        limits: What load and budget leave.
        model: What each depth is worth.
        ranker: The ranker's configuration, which says the depth of each tier.
        clock: Time.
        seed: Of exploration.

    Raises:
        ConfigError: a tier is none of the model's.
    """

    def __init__(
        self,
        config: RouterConfig,
        tiers: Sequence[TierConfig],
        limits: BudgetRouter,
        model: GainModel,
        ranker: RankerConfig,
        clock: Clock,
        seed: int = 0,
    ) -> None:
        names = [tier.name for tier in tiers]
        if unknown := sorted(set(names) - set(ranker.tiers)):
            raise ConfigError(f"tiers {unknown} are none of the model's", field="tiers", value=str(names))
        self._limits = limits
        self._names = names
        self._columns = [model.depths.index(ranker.depth(name)) for name in names]
        self._model = model
        self._config = config
        self._random = np.random.default_rng(seed)
        self.costs = TierCosts({tier.name: tier.rank_ms for tier in tiers}, config.cost_candidates)
        self.price = PriceControl(config, model, clock)
        self.users = RememberedSignals(config.remembered_users_max)

    def choose(self, query: RouteQuery) -> TierChoice:
        """Return the tier for one request.

        Raises:
            InvalidRequestError: the client forces a tier that does not exist.
        """
        # Of every request: while load leaves the lowest tier only, the price has to see that load as well.
        price = self.price.price(self._limits.occupancy(query))
        if (forced := self._limits.forced(query)) is not None:
            return forced
        limited = self._limits.limited(query)
        first = 0 if limited is None else self._names.index(limited.tier)
        if limited is not None and first == len(self._names) - 1:
            return limited
        if limited is None and self._random.random() < self._config.explore_share:
            return self._limits.decide(self._names[0], "exploration", explores=True)
        signals = self.users.get(query.user, query.as_of_s)
        worth = self._worth(signals, query.surface)
        costs = self.costs.of(query.num_candidates)
        value = (worth - price * costs / costs[0])[first:]
        # The cheapest tier of those that are worth the same.
        index = first + int(np.flatnonzero(value >= value.max() - WORTH_EQUAL)[-1])
        reason = self._reason(index, worth, costs, price, signals is not None)
        if limited is None:
            return self._limits.decide(self._names[index], reason)
        return self._limits.decide(self._names[index], f"{limited.reason}; {reason}", is_open=False)

    def observe(self, served: Served) -> None:
        """Learn what the tier cost, what the stations had to do, and what is known of the user."""
        if served.tier in self._names and served.rank_ms > 0:
            self.costs.observe(served.tier, served.num_candidates, served.rank_ms)
        self.bear(served)
        if served.signals is not None:
            self.users.remember(served.user, served.signals, served.as_of_s)

    def bear(self, served: Served) -> None:
        """Take note of what a request cost the stations, whichever version it was of."""
        self.price.observe(served.busy_ms, missed=served.missed)

    def forget(self, user: EntityId) -> None:
        """Drop the signals of a user."""
        self.users.forget(user)

    def adopt(self, model: GainModel) -> None:
        """Route by another gain model from now on; what was learned of users, costs and load stays."""
        self._model = model
        self.price.adopt(model)

    def _worth(self, signals: Signals | None, surface: str) -> npt.NDArray[np.float64]:
        if signals is None:
            return self._model.unknown[self._columns]
        gains = self._model.gains(signals[None], surface_keys((surface,)))
        return np.asarray(gains[0][self._columns], np.float64)

    def _reason(
        self, index: int, worth: npt.NDArray[np.float64], costs: npt.NDArray[np.float64], price: float, is_known: bool
    ) -> str:
        who = "this user's history" if is_known else "a user not seen yet"
        best, lowest = self._names[0], self._names[-1]
        gain = worth[0] - worth[-1]
        told = f"{gain:+.2e}" if abs(gain) > WORTH_EQUAL else "0"
        spared = f", {best} {costs[0]:.1f}" if index else ""
        return (
            f"worth: {best} over {lowest} {told} for {who}, at a price of {price:.1e}; "
            f"{self._names[index]} takes {costs[index]:.1f} ms{spared}"
        )


def router_for(config: IngressConfig, weights: WeightSource, clock: Clock) -> TierRouter:
    """Return what routes the requests of a weights version: by worth where it has a gain model and it is wanted.

    Raises:
        ConfigError: a tier is none of the model's.
        WeightsError: the gain model is of another form.
    """
    ranker = RankerConfig.model_validate(weights.json("model"))
    limits = BudgetRouter(config.tiers, config.light_above_in_flight, config.light_above_load)
    model = GainModel.from_weights(weights, ranker.depths) if config.router.enabled else None
    if model is None:
        return limits
    return GainRouter(config.router, config.tiers, limits, model, ranker, clock)
