"""Which ranking tier a request goes to, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.ingress.config import TierConfig
from shared.errors import InvalidRequestError

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What a router may look at.

    Args:
        asked: ``auto`` or a tier name from the client.
        remaining_ms: Budget left, milliseconds.
        num_candidates: Candidates C of the request.
        in_flight: Rank requests in this ingress replica, this one included.
    """

    asked: str
    remaining_ms: float
    num_candidates: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class TierChoice:
    """A decision.

    Args:
        tier: Chosen tier.
        reason: Why, for the response and the log.
        fallbacks: Tiers to try when it fails, in order: lower ones first, then higher ones.
    """

    tier: str
    reason: str
    fallbacks: tuple[str, ...]


class TierRouter(Protocol):
    """Decides by request."""

    def choose(self, query: RouteQuery) -> TierChoice:
        """Return the tier for one request.

        Raises:
            InvalidRequestError: the client forces a tier that does not exist.
        """
        ...


class BudgetRouter:
    """The best tier that the remaining budget and the present load allow; a tier that the client names is obeyed.

    Args:
        tiers: Best first.
        light_above_in_flight: Requests in flight above which the lowest tier is taken.
    """

    def __init__(self, tiers: Sequence[TierConfig], light_above_in_flight: int) -> None:
        self._tiers = tuple(tiers)
        self._names = tuple(tier.name for tier in tiers)
        self._light_above = light_above_in_flight

    def choose(self, query: RouteQuery) -> TierChoice:
        """Return the tier for one request.

        Raises:
            InvalidRequestError: the client forces a tier that does not exist.
        """
        if query.asked != AUTO:
            if query.asked not in self._names:
                allowed = ", ".join((AUTO, *self._names))
                raise InvalidRequestError(
                    f"tier must be one of {allowed}, is {query.asked!r}", field="tier", limit=allowed, value=query.asked
                )
            return self._decide(query.asked, "forced by the request")
        lowest = self._names[-1]
        if query.in_flight > self._light_above:
            return self._decide(
                lowest, f"load: {query.in_flight} requests in flight, {self._light_above} allowed for {self._names[0]}"
            )
        for tier in self._tiers:
            if query.remaining_ms >= tier.cost_ms:
                if tier.name == self._names[0]:
                    return self._decide(tier.name, "default")
                break
        else:
            tier = self._tiers[-1]
        best = self._tiers[0]
        return self._decide(
            tier.name,
            f"budget: {query.remaining_ms:.0f} ms left, {best.name} needs {best.cost_ms:.0f} ms at the 99th percentile",
        )

    def _decide(self, tier: str, reason: str) -> TierChoice:
        index = self._names.index(tier)
        return TierChoice(tier, reason, self._names[index + 1 :] + tuple(reversed(self._names[:index])))
