from __future__ import annotations

from dataclasses import replace

import pytest

from services.ingress.config import IngressConfig, TierConfig
from services.ingress.routing import BudgetRouter, RouteQuery
from shared.errors import InvalidRequestError

TIERS = (
    TierConfig(name="full", cost_ms=100, rank_ms=50, timeout_ms=300),
    TierConfig(name="middle", cost_ms=60, rank_ms=30, timeout_ms=300),
    TierConfig(name="light", cost_ms=30, rank_ms=10, timeout_ms=300),
)
ROUTER = BudgetRouter(TIERS, light_above_in_flight=10)


def query(asked: str = "auto", remaining_ms: float = 1_000, in_flight: int = 1) -> RouteQuery:
    return RouteQuery(asked, remaining_ms, 500, in_flight)


@pytest.mark.parametrize(
    ("remaining_ms", "tier"),
    [(100.1, "full"), (100, "full"), (99.9, "middle"), (60, "middle"), (59, "light"), (30, "light"), (1, "light")],
)
def test_auto_takes_the_best_tier_that_the_budget_allows(remaining_ms: float, tier: str) -> None:
    choice = ROUTER.choose(query(remaining_ms=remaining_ms))

    assert choice.tier == tier
    assert ("budget" in choice.reason) == (tier != "full")


@pytest.mark.parametrize(("in_flight", "tier"), [(9, "full"), (10, "full"), (11, "light")])
def test_auto_goes_to_the_lowest_tier_under_load(in_flight: int, tier: str) -> None:
    assert ROUTER.choose(query(in_flight=in_flight)).tier == tier


@pytest.mark.parametrize(("load", "tier"), [(0.0, "full"), (0.5, "full"), (0.51, "light"), (3.0, "light")])
def test_auto_goes_to_the_lowest_tier_when_half_of_what_can_be_answered_is_in_flight(load: float, tier: str) -> None:
    router = BudgetRouter(TIERS, 10, light_above_load=0.5)
    choice = router.choose(replace(query(), load=load))
    assert choice.tier == tier
    assert choice.reason.startswith("load: ") == (tier == "light")


@pytest.mark.parametrize(("in_flight", "load", "expected"), [(5, 0.0, 0.5), (1, 0.4, 0.8), (20, 0.4, 2.0)])
def test_occupancy_is_the_larger_of_in_flight_and_load(in_flight: int, load: float, expected: float) -> None:
    router = BudgetRouter(TIERS, 10, light_above_load=0.5)
    assert router.occupancy(replace(query(in_flight=in_flight), load=load)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("asked", "fallbacks"),
    [("full", ("middle", "light")), ("middle", ("light", "full")), ("light", ("middle", "full"))],
)
def test_a_forced_tier_is_obeyed_and_falls_to_lower_ones_first(asked: str, fallbacks: tuple[str, ...]) -> None:
    choice = ROUTER.choose(query(asked, remaining_ms=1, in_flight=99))

    assert (choice.tier, choice.fallbacks) == (asked, fallbacks)
    assert choice.reason == "forced by the request"


def test_an_unknown_tier_is_refused_with_the_ones_that_exist() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ROUTER.choose(query("huge"))
    assert caught.value.context == {"field": "tier", "limit": "auto, full, middle, light", "value": "huge"}


@pytest.mark.parametrize("names", [("full", "full"), ("auto", "light")])
def test_tiers_must_be_distinct_and_not_auto(names: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="distinct"):
        IngressConfig(tiers=tuple(TierConfig(name=name, cost_ms=1, rank_ms=1, timeout_ms=1) for name in names))
