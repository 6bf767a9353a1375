"""Routing by worth: what a request is worth, what a tier costs, what the price does, within budget and load."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from cluster.cli.answer_view import tier_words
from models.config import RankerConfig
from models.routing import GROUP, SIGNALS, GainModel, surface_keys
from models.source import MemorySource
from services.ingress.config import IngressConfig, RouterConfig, TierConfig
from services.ingress.learned import PriceControl, RememberedSignals, TierCosts
from services.ingress.model_info import ModelInfo
from services.ingress.routing import BudgetRouter, GainRouter, RouteQuery, Served, router_for
from services.ingress.service import IngressService
from services.ingress.serving import FrontModel, Serving, ServingOrder
from shared.clock import ManualClock
from shared.errors import ConfigError, DeadlineExceededError, InvalidRequestError
from shared.schema.api import RankRequest
from tests.helpers.fake_stations import FakeMesh
from tests.helpers.faulty import HANG

K = len(SIGNALS)
TIERS = (
    TierConfig(name="full", cost_ms=100, rank_ms=50, timeout_ms=300),
    TierConfig(name="standard", cost_ms=60, rank_ms=25, timeout_ms=300),
    TierConfig(name="light", cost_ms=30, rank_ms=5, timeout_ms=300),
)
RANKER = RankerConfig()
CONFIG = RouterConfig(explore_share=0.0, period_s=1.0, step=0.25, cores=1.0)


def model(unknown: tuple[float, float, float] = (0.0, 0.01, 0.02)) -> GainModel:
    """Return a model: the full tier is worth the first signal, if that is positive, and the standard tier half."""
    hidden = np.zeros((K, 1))
    hidden[0] = 1.0
    return GainModel(
        depths=(0, 1, 2),
        mean=np.zeros(K),
        deviation=np.ones(K),
        hidden=hidden,
        bias=np.zeros(1),
        out=np.ones((1, 3)),
        worth=np.array([0.0, 0.5, 1.0]),
        unknown=np.array(unknown),
        surface_keys=surface_keys(("feed", "reels")),
        surface=np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 0.5]]),
        prices=np.array([[0.1, 1.0], [1.0, 0.0]]),
    )


def router(config: RouterConfig = CONFIG, clock: ManualClock | None = None, **changes: GainModel) -> GainRouter:
    return GainRouter(
        config, TIERS, BudgetRouter(TIERS, 10), changes.get("gain", model()), RANKER, clock or ManualClock()
    )


def query(user: int = 1, asked: str = "auto", remaining_ms: float = 1_000, in_flight: int = 1) -> RouteQuery:
    return RouteQuery(asked, remaining_ms, 500, in_flight, "feed", user, 1_000)


def served(user: int, worth: float, tier: str = "full", busy_ms: float = 0.0, *, missed: bool = False) -> Served:
    signals = np.zeros(K, np.float32)
    signals[0] = worth
    return Served(
        tier, 500, {"full": 50.0, "standard": 25.0, "light": 5.0}[tier], busy_ms, missed, user, 1_000, signals
    )


def test_without_a_price_a_request_goes_where_it_is_worth_most() -> None:
    asked = router()
    for user, worth in ((1, 0.3), (2, -0.3)):
        asked.observe(served(user, worth))
    assert asked.choose(query(1)).tier == "full"
    assert asked.choose(query(2)).tier == "light"
    assert asked.choose(query(3)).tier == "full", "of a user not seen yet the mean is known"


def test_the_reason_names_worth_price_and_cost() -> None:
    asked = router()
    asked.observe(served(1, 0.3))
    reason = asked.choose(query(1)).reason
    for word in ("full over light +3.00e-01", "this user's history", "price of 0.0e+00", "full takes 50.0 ms"):
        assert word in reason
    assert "a user not seen yet" in asked.choose(query(2)).reason
    assert tier_words("full", reason) == "what it adds for this user is worth its time now"
    asked.observe(served(2, -0.3))
    reason = asked.choose(query(2)).reason
    assert reason.endswith(" ms, full 50.0")
    assert tier_words("light", reason) == "what full would add for this user is not worth its time now"


def test_a_price_sends_requests_to_the_tier_that_pays() -> None:
    asked = router()
    asked.price._price = 0.4
    for user, worth in ((1, 0.5), (2, 0.3), (3, 0.1), (4, 0.45)):
        asked.observe(served(user, worth))
    # Worth less price: full w - .4, standard w / 2 - .2, light -.04.
    assert [asked.choose(query(user)).tier for user in (1, 2, 3, 4)] == ["full", "light", "light", "full"]


def test_a_surface_has_its_own_worth() -> None:
    asked = router()
    asked.observe(served(1, -0.3))
    reels = RouteQuery("auto", 1_000, 500, 1, "reels", 1, 1_000)
    assert (asked.choose(query(1)).tier, asked.choose(reels).tier) == ("light", "full")


@pytest.mark.parametrize("rounding", [0.0, 1.1e-17, -1.1e-17])
def test_of_two_tiers_that_are_worth_the_same_the_cheaper_one_serves(rounding: float) -> None:
    asked = router(gain=model(unknown=(0.0, rounding, 2 * rounding)))
    choice = asked.choose(query(9))
    assert choice.tier == "light"
    assert "full over light 0 for" in choice.reason


@pytest.mark.parametrize(
    ("given", "tier", "word"),
    [
        (query(remaining_ms=99), "standard", "budget"),
        (query(remaining_ms=1), "light", "budget"),
        (query(in_flight=11), "light", "load"),
        (query(asked="standard", remaining_ms=1, in_flight=99), "standard", "forced"),
    ],
)
def test_budget_load_and_client_come_before_worth(given: RouteQuery, tier: str, word: str) -> None:
    asked = router(CONFIG.model_copy(update={"explore_share": 1.0}))
    choice = asked.choose(given)
    assert choice.tier == tier
    assert word in choice.reason
    assert not choice.explores


def test_of_the_tiers_that_a_budget_pays_for_worth_decides() -> None:
    asked = router()
    for user, worth in ((1, 0.3), (2, -0.3)):
        asked.observe(served(user, worth))
    assert asked.choose(query(1, remaining_ms=99)).tier == "standard"
    choice = asked.choose(query(2, remaining_ms=99))
    assert (choice.tier, choice.is_open) == ("light", False)
    assert "budget: 99 ms left" in choice.reason
    assert "worth: full over light" in choice.reason
    asked.price._price = 0.4
    assert asked.choose(query(1, remaining_ms=99)).tier == "light"


def test_an_unknown_tier_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="tier must be one of"):
        router().choose(query(asked="huge"))


def test_a_share_of_the_requests_explores_on_the_best_tier() -> None:
    asked = router(CONFIG.model_copy(update={"explore_share": 0.1}), gain=model(unknown=(0.0, -1.0, -1.0)))
    choices = [asked.choose(query(user)) for user in range(4_000)]
    counts = Counter((choice.tier, choice.explores) for choice in choices)
    assert set(counts) == {("full", True), ("light", False)}
    assert counts["full", True] == pytest.approx(400, abs=80)


def test_signals_are_bounded_and_the_user_asked_for_longest_ago_goes() -> None:
    users, signals = RememberedSignals(2), np.zeros(K, np.float32)
    users.remember(1, signals, 0)
    users.remember(2, signals, 0)
    assert users.get(1, 5) is not None
    users.remember(3, signals, 0)
    assert len(users) == 2
    assert users.get(2, 5) is None
    assert users.get(1, 5) is not None
    users.forget(1)
    users.forget(9)
    assert users.get(1, 5) is None


def test_a_router_forgets_a_user() -> None:
    asked = router()
    asked.observe(Served("full", 500, 50.0, 0.0, False, 1, 1_000, np.zeros(K, np.float32)))
    assert asked.users.get(1, 1_000) is not None
    asked.forget(1)
    assert asked.users.get(1, 1_000) is None


def test_a_replaced_state_teaches_nothing() -> None:
    asked = router()
    asked.observe(Served("full", 500, 50.0, 0.0, False, 1, 1_000, None))
    assert asked.users.get(1, 1_000) is None


def test_costs_follow_measurements() -> None:
    costs = TierCosts({"full": 60.0, "light": 15.0}, 500)
    np.testing.assert_allclose(costs.of(500), [60.0, 15.0])
    costs.observe("full", 500, 6.0)
    np.testing.assert_allclose(costs.of(500), [6.0, 15.0], rtol=1e-6)
    assert costs.of(1_000)[0] == pytest.approx(11.4), "the first measurement scales the prior's shape"
    for number in range(400):
        count = 100 + number % 5 * 400
        costs.observe("full", count, 2.0 + 0.01 * count)
    np.testing.assert_allclose(costs.of(300)[0], 5.0, rtol=0.02)
    assert (costs.of(0) > 0).all()


def control(clock: ManualClock, **changes: float) -> PriceControl:
    return PriceControl(CONFIG.model_copy(update=changes), model(), clock)


async def test_the_price_rises_while_the_stations_are_busy_and_falls_when_they_are_not() -> None:
    clock = ManualClock()
    price = control(clock)
    assert price.price() == 0.0
    shares = []
    for _ in range(8):
        await clock.advance(1.0)
        price.observe(1_400.0, missed=False)  # twice the target of 0.7
        shares.append(price.share)
    assert shares[:5] == pytest.approx([0.75, 0.5, 0.25, 0.0, 0.0])
    assert price.utilisation == pytest.approx(1.4)
    assert price.price() == 1.0
    for _ in range(8):
        await clock.advance(1.0)
        price.observe(0.0, missed=False)
    assert (price.share, price.price()) == (1.0, 0.0)


async def test_at_its_target_the_price_stays() -> None:
    clock = ManualClock()
    price = control(clock)
    price.share = 0.5
    for _ in range(20):
        await clock.advance(1.0)
        price.observe(700.0, missed=False)
    assert price.share == pytest.approx(0.5)


@pytest.mark.parametrize("cause", ["missed", "occupancy"])
async def test_missed_deadlines_and_requests_in_flight_raise_the_price_too(cause: str) -> None:
    clock = ManualClock()
    price = control(clock)
    await clock.advance(0.5)
    price.price(1.0 if cause == "occupancy" else 0.0)
    await clock.advance(0.5)
    price.observe(0.0, missed=cause == "missed")
    assert price.share == pytest.approx(0.75)
    assert price.price() > 0


async def test_a_silence_brings_the_price_back() -> None:
    clock = ManualClock()
    price = control(clock)
    price.share = 0.0
    await clock.advance(60.0)
    assert price.price() == 0.0


async def test_what_a_few_met_before_a_silence_does_not_price_the_first_after_it() -> None:
    clock = ManualClock()
    price = control(clock)
    price.price(1.0)
    price.observe(0.0, missed=True)
    await clock.advance(3_600.0)
    price.price()
    assert price.share == pytest.approx(0.75)
    await clock.advance(60.0)
    assert price.price() == 0.0


async def test_while_load_decides_the_price_sees_the_load_too() -> None:
    """More requests are in flight than any but the lowest tier may serve; the stations wait and compute little."""
    clock = ManualClock()
    asked = router(clock=clock)
    for _ in range(4):
        await clock.advance(1.0)
        assert asked.choose(query(in_flight=11)).reason.startswith("load: ")
        asked.observe(served(1, 0.3, tier="light"))
    assert asked.price.share == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("fields", "is_priced"),
    [({"deadline_ms": 50}, False), ({"deadline_ms": 400, "tier": "full"}, False), ({"deadline_ms": 400}, True)],
)
async def test_a_client_whose_budgets_nothing_meets_lowers_nobodys_tier(
    fields: dict[str, Any], is_priced: bool
) -> None:
    mesh = FakeMesh(IngressConfig())
    limits = BudgetRouter(mesh.config.tiers, 10)
    asked = GainRouter(CONFIG, mesh.config.tiers, limits, model(), RANKER, mesh.manual)
    info = mesh.ingress.serving.info
    ingress = IngressService(mesh.config, mesh.stations, info, mesh.directory, mesh.manual, "ingress-1", router=asked)
    mesh.services["preprocess"].always("extract", HANG)
    for _ in range(4):
        asking = asyncio.create_task(ingress.rank(RankRequest(user_id=1, candidates=[1, 2], **fields)))
        await mesh.manual.advance(1.1)
        with pytest.raises(DeadlineExceededError):
            await asking
    assert (asked.price.share < 1.0) == is_priced


async def test_while_a_canary_has_half_of_the_requests_both_versions_see_the_whole_load() -> None:
    clock = ManualClock()
    routers = {version: router(clock=clock) for version in ("v", "w")}
    fronts = {version: FrontModel(ModelInfo(version, RANKER, {}, None), one) for version, one in routers.items()}
    serving = Serving("v", fronts["v"], fronts.__getitem__, [], clock)
    await serving.hold(["v", "w"])
    await serving.take(ServingOrder(version="v", canary="w", share=0.5))
    for _ in range(4):
        await clock.advance(0.5)
        serving.observe("v", served(1, 0.3, busy_ms=700.0))
        await clock.advance(0.5)
        serving.observe("w", served(2, 0.3, busy_ms=700.0))  # together twice the target
    for one in routers.values():
        assert one.price.share < 0.5
    assert routers["v"].users.get(2, 1_000) is None


async def test_requests_are_served_lower_as_the_load_rises() -> None:
    clock = ManualClock()
    asked = router(clock=clock)
    for user in range(100):
        asked.observe(served(user, user / 100))
    means = []
    for busy_ms in (0.0, 2_000.0, 2_000.0, 2_000.0, 2_000.0):
        await clock.advance(1.0)
        asked.observe(served(0, 0.0, busy_ms=busy_ms))
        tiers = Counter(asked.choose(query(user)).tier for user in range(100))
        means.append(tiers["full"])
    assert means == sorted(means, reverse=True)
    assert means[0] > 95
    assert means[-1] < 5


def test_a_tier_that_the_model_lacks_is_a_configuration_error() -> None:
    tiers = (TierConfig(name="huge", cost_ms=1, rank_ms=1, timeout_ms=1),)
    with pytest.raises(ConfigError, match="huge"):
        GainRouter(CONFIG, tiers, BudgetRouter(tiers, 10), model(), RANKER, ManualClock())


def test_the_weights_decide_who_routes() -> None:
    config = IngressConfig()
    document = {"model": RANKER.model_dump(mode="json")}
    plain, rich = MemorySource("v", {}, document), MemorySource("v", {GROUP: model().tensors()}, document)
    assert isinstance(router_for(config, plain, ManualClock()), BudgetRouter)
    assert isinstance(router_for(config, rich, ManualClock()), GainRouter)
    off = config.model_copy(update={"router": RouterConfig(enabled=False)})
    assert isinstance(router_for(off, rich, ManualClock()), BudgetRouter)
