"""Which version a request is ranked with, what an order changes, and what labelled events say of a canary."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, cast

import pytest

from models.config import RankerConfig
from services.ingress.config import FeedbackConfig
from services.ingress.feedback import Feedback
from services.ingress.model_info import ModelInfo
from services.ingress.routing import TierRouter
from services.ingress.serving import FrontModel, Serving, ServingOrder, in_share
from shared.clock import ManualClock
from shared.errors import ConfigError, StageUnavailableError, WeightsError
from shared.schema.api import Event

ROUTER = cast(TierRouter, object())


def front(version: str, **config: Any) -> FrontModel:
    return FrontModel(ModelInfo(version, RankerConfig.model_validate(config), {}, None), ROUTER)


def opened(version: str) -> FrontModel:
    """Read a version: ``w`` is well, ``narrow`` has a tier less, others are not there."""
    if version == "w":
        return front("w")
    if version == "narrow":
        tiers = {name: tier for name, tier in RankerConfig().tiers.items() if name != "light"}
        return front("narrow", tiers=tiers)
    raise WeightsError(f"{version} is not there")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def serving(clock: ManualClock) -> Serving:
    return Serving("v", front("v"), opened, ["full", "light"], clock)


async def test_a_share_of_the_users_gets_the_canary_always_the_same(serving: Serving) -> None:
    users = [*range(2000), *(f"user {number}" for number in range(2000))]
    assert {serving.choose(user) for user in users} == {"v"}
    await serving.hold(["v", "w"])
    await serving.take(ServingOrder(version="v+3", canary="w+1", share=0.1))
    chosen = {user: serving.choose(user) for user in users}
    share = sum(stamp == "w+1" for stamp in chosen.values()) / len(users)
    assert 0.08 < share < 0.12
    await serving.take(ServingOrder(version="v+4", canary="w+2", share=0.1))
    assert all((serving.choose(user) == "w+2") == (chosen[user] == "w+1") for user in users)
    others = sum(in_share(user, "x", 0.1) and chosen[user] == "w+1" for user in users) / len(users)
    assert others < 0.03, "of another version it is other users"
    assert [info.version for info in serving.infos()] == ["v", "w"]


async def test_what_cannot_be_served_is_refused_before_it_is_ordered(serving: Serving) -> None:
    said = await serving.hold(["v", "gone", "narrow"])
    assert said["held"] == ["v"]
    assert said["refused"]["gone"] == "gone is not there"
    assert "no tier light" in said["refused"]["narrow"]
    assert serving.status()["refused"] == said["refused"]
    with pytest.raises(ConfigError):
        await serving.take(ServingOrder(version="narrow"))
    assert serving.order.version == "v"
    assert (await serving.hold(["v"]))["refused"] == {}


async def test_what_is_in_use_is_told(serving: Serving) -> None:
    serving.begin("v")
    serving.begin("v")
    serving.begin("v+1")
    serving.end("v")
    report = await serving.take(ServingOrder(version="v+2"))
    assert report["in_flight"] == ["v", "v+1"]
    serving.end("v")
    serving.end("v+1")
    assert (await serving.take(ServingOrder(version="v+2")))["in_flight"] == []


async def test_a_state_settles_while_it_serves(serving: Serving, clock: ManualClock) -> None:
    assert serving.has_settled("v", 3600), "what a mesh starts with"
    assert not serving.has_settled("v+1", 0), "what no request is ranked with"
    await serving.take(ServingOrder(version="v+1"))
    assert serving.has_settled("v+1", 0)
    await clock.advance(5)
    await serving.take(ServingOrder(version="v+1", canary="w", share=0.1))
    await clock.advance(5)
    assert [serving.has_settled("v+1", limit_s) for limit_s in (10, 10.1)] == [True, False], "told twice, begun once"
    assert [serving.has_settled("w", limit_s) for limit_s in (5, 5.1)] == [True, False]
    assert not serving.has_settled("v", 0)
    await serving.take(ServingOrder(version="v"))
    assert not serving.has_settled("v", 1), "it serves anew"
    serving.start(ServingOrder(version="v", canary="w"))
    assert serving.has_settled("v", 3600)
    assert serving.has_settled("w", 3600)


class _Gains:
    """A series of gain models; the state after delta 3 is damaged."""

    def __init__(self) -> None:
        self.held = ["v"]
        self.models: dict[str, Any] = {"v": object()}

    def advance(self, sequence: int) -> None:
        if sequence >= 3:
            raise WeightsError(f"delta {sequence} is damaged")
        self.held.append(f"v+{sequence}")
        self.models[self.held[-1]] = object()

    def at(self, stamp: str) -> Any:
        return self.models[stamp]

    def stamps(self) -> tuple[str, ...]:
        return tuple(self.held)

    def keep(self, stamps: Collection[str]) -> None:
        """Nothing is let go of."""


class _Adopting:
    def __init__(self) -> None:
        self.adopted: list[Any] = []

    def adopt(self, model: Any) -> None:
        self.adopted.append(model)


async def test_the_router_goes_by_the_gain_model_of_the_state_that_serves(clock: ManualClock) -> None:
    gains, router = _Gains(), _Adopting()
    front_model = FrontModel(front("v").info, cast(TierRouter, router), gains)
    serving = Serving("v", front_model, opened, ["full", "light"], clock)
    assert (await serving.hold(["v", "v+2"]))["held"] == ["v", "v+2"]
    assert router.adopted == [], "held is not served"
    await serving.take(ServingOrder(version="v+2"))
    await serving.take(ServingOrder(version="v+2"))
    assert router.adopted == [gains.models["v+2"]]
    said = await serving.hold(["v+2", "v+3"])
    assert said["held"] == ["v+2"]
    assert said["refused"] == {"v+3": "delta 3 is damaged"}
    with pytest.raises(WeightsError):
        await serving.take(ServingOrder(version="v+3"))
    assert serving.order.version == "v+2"
    assert (await serving.hold(["v+2"]))["refused"] == {}
    late = Serving("v", FrontModel(front("v").info, cast(TierRouter, router), gains), opened, ["full"], clock)
    late.start(ServingOrder(version="v+2"))
    assert router.adopted[-1] is gains.models["v+2"], "a replica that starts goes by it too"


async def test_outcomes_count_from_when_the_canary_began(serving: Serving) -> None:
    serving.count("v", "failed")
    order = ServingOrder(version="v", canary="w", share=0.5)
    assert (await serving.take(order))["outcomes"] == {}
    for stamp, outcome in (("v", "whole"), ("v+1", "whole"), ("w", "degraded")):
        serving.count(stamp, outcome)
    assert (await serving.take(order))["outcomes"] == {"v": {"whole": 2}, "w": {"degraded": 1}}


def event(weight: float, user: int = 1) -> Event:
    return Event(event_id="e", user_id=user, item_id=7, weight=weight, timestamp_s=50)


async def test_both_versions_are_asked_about_the_same_events(serving: Serving) -> None:
    asked: list[tuple[int | str, str]] = []

    async def ask(one: Event, stamp: str) -> float:
        asked.append((one.user_id, stamp))
        if one.user_id == 13:
            raise StageUnavailableError("gone")
        return 0.9 if stamp == "w" else 0.8

    feedback = Feedback(ask, FeedbackConfig(in_flight_max=3), serving)
    feedback.offer([event(5)])
    assert asked == []
    assert feedback.sums() == {}, "no canary, no work"
    await serving.take(ServingOrder(version="v", canary="w", share=0.5))
    feedback.offer([event(5, 1), event(3, 2), event(5, 13), event(5, 4)])
    await feedback.drain()
    assert {user for user, _ in asked} == {1, 2, 13}, "more than fit are let go"
    sums = feedback.sums()
    assert (sums["labels"], sums["clicks"]) == (2, 1)
    assert sums["base_loss"] == pytest.approx(-math.log(0.8) - math.log(0.2))
    assert sums["canary_loss"] == pytest.approx(-math.log(0.9) - math.log(0.1))
    assert sums["canary_predicted"] == pytest.approx(1.8)
    assert (await serving.take(serving.order))["in_flight"] == []
    await serving.take(ServingOrder(version="v"))
    assert feedback.sums() == {}
