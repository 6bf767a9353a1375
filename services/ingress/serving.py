"""Which weights version each request is ranked with, as the ingress was told by who rolls versions out."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from models.routing import GainModel
from services.ingress.directory import RolloutBody, UpdatesBody
from services.ingress.model_info import ModelInfo
from services.ingress.routing import Served, TierRouter
from shared.clock import Clock
from shared.errors import ConfigError, RankMeshError
from shared.hashing import EntityId
from shared.weights.deltas import parse_stamp
from shared.weights.held import Series

_BUCKETS = 1 << 32


class ServingOrder(BaseModel):
    """What requests are ranked with from now on.

    Args:
        version: Stamp of all requests but the canary's.
        canary: Stamp of a version that is tried; None: none is.
        share: Share of the users that get the canary.
        held: Every stamp that a request may still ask for; a replica that starts takes them all up.
        rollout: How it came to this, shown in status.
        updates: How deltas are followed, shown in status.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    canary: str | None = None
    share: float = Field(0.0, ge=0, le=1)
    held: tuple[str, ...] = ()
    rollout: RolloutBody = RolloutBody()
    updates: UpdatesBody = UpdatesBody()

    @classmethod
    def first(cls, version: str) -> ServingOrder:
        """Return the order of a mesh that has just started."""
        return cls(version=version, held=(version,))


@dataclass(frozen=True, slots=True)
class FrontModel:
    """What the ingress needs of a version.

    Args:
        info: Its names and limits.
        router: Chooses tiers with what the version says of them.
        gains: What deltas make of that; None: the version says nothing of tiers.
    """

    info: ModelInfo
    router: TierRouter
    gains: Series[GainModel] | None = None


class Serving:
    """The versions of one ingress replica.

    Args:
        version: The first one.
        model: What is known of it.
        open_model: Reads another version; blocks.
        tiers: Tiers that a version must have.
        clock: Measures for how long a state has served.
    """

    def __init__(
        self,
        version: str,
        model: FrontModel,
        open_model: Callable[[str], FrontModel],
        tiers: Sequence[str],
        clock: Clock,
    ) -> None:
        self._models = {parse_stamp(version)[0]: model}
        self._open = open_model
        self._tiers = tuple(tiers)
        self._in_flight: Counter[str] = Counter()
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._refused: dict[str, str] = {}
        self._routed_by: dict[str, GainModel] = {}
        self._clock = clock
        self._since_s: dict[str, float] = {version: -math.inf}
        self._num_orders = 0
        self.order = ServingOrder.first(version)

    def start(self, order: ServingOrder) -> None:
        """Obey an order before the first request; blocks.

        Raises:
            RankMeshError: the order names a version that this replica cannot serve.
        """
        for stamp in (order.version, order.canary):
            if stamp is not None and (base := parse_stamp(stamp)[0]) not in self._models:
                self._models[base] = self._checked(base)
            if stamp is not None:
                self._advance(stamp)
                self._adopt(stamp)
        self.order = order
        self._since_s = dict.fromkeys(self._asked(), -math.inf)

    @property
    def info(self) -> ModelInfo:
        """What is known of the version that most requests are ranked with."""
        return self._models[parse_stamp(self.order.version)[0]].info

    def infos(self) -> list[ModelInfo]:
        """Return what is known of all versions that requests are ranked with, the current one first."""
        stamps = (self.order.version, self.order.canary)
        return [self._models[parse_stamp(stamp)[0]].info for stamp in stamps if stamp is not None]

    def choose(self, user: EntityId) -> str:
        """Return the stamp that a request is ranked with: of one user always the same while a canary is tried."""
        order = self.order
        if order.canary is not None and in_share(user, parse_stamp(order.canary)[0], order.share):
            return order.canary
        return order.version

    def model(self, stamp: str) -> FrontModel:
        """Return what is known of the version of a stamp."""
        return self._models[parse_stamp(stamp)[0]]

    def observe(self, stamp: str, served: Served) -> None:
        """Let the router of a request's version learn from it, and the others know what it cost all of them."""
        own = self._models[parse_stamp(stamp)[0]].router
        own.observe(served)
        for model in self._models.values():
            if model.router is not own:
                model.router.bear(served)

    def forget(self, user: EntityId) -> None:
        """Drop what the routers of all versions learned of a user."""
        for model in self._models.values():
            model.router.forget(user)

    def has_settled(self, stamp: str, settle_s: float) -> bool:
        """Return whether requests have been ranked with a state for so long, and new ones still are."""
        since_s = self._since_s.get(stamp)
        return since_s is not None and self._clock.monotonic_s() - since_s >= settle_s

    def begin(self, stamp: str) -> None:
        """Note that a request, or work after one, uses a stamp."""
        self._in_flight[stamp] += 1

    def end(self, stamp: str) -> None:
        """Note that it does not use it any more."""
        self._in_flight[stamp] -= 1
        if self._in_flight[stamp] <= 0:
            del self._in_flight[stamp]

    def count(self, stamp: str, outcome: str) -> None:
        """Count how a request ended: ``whole``, ``degraded`` or ``failed``."""
        self._outcomes[parse_stamp(stamp)[0], outcome] += 1

    async def hold(self, stamps: Sequence[str]) -> dict[str, Any]:
        """Get to know the versions of these stamps; one that cannot be served is refused by its reason.

        The order that came last decides what is let go of.
        """
        self._num_orders = number = self._num_orders + 1
        for base in dict.fromkeys(parse_stamp(stamp)[0] for stamp in stamps):
            if base in self._models:
                continue
            # A foreign version may break in any way; the one that serves goes on.
            (model,) = await asyncio.gather(asyncio.to_thread(self._checked, base), return_exceptions=True)
            if isinstance(model, FrontModel):
                self._models[base] = model
                self._refused.pop(base, None)
            else:
                told = model.message if isinstance(model, RankMeshError) else f"{type(model).__name__}: {model}"
                self._refused[base] = told
        for stamp in sorted(stamps, key=parse_stamp):
            if parse_stamp(stamp)[0] not in self._models:
                continue
            (failure,) = await asyncio.gather(asyncio.to_thread(self._advance, stamp), return_exceptions=True)
            self._refused.pop(stamp, None)
            if isinstance(failure, BaseException):
                told = failure.message if isinstance(failure, RankMeshError) else f"{type(failure).__name__}: {failure}"
                self._refused[stamp] = told
        if number == self._num_orders:
            bases = {parse_stamp(stamp)[0] for stamp in (*stamps, *self._in_flight, *self._asked())}
            self._models = {base: model for base, model in self._models.items() if base in bases}
            known = {*bases, *stamps}
            self._refused = {name: reason for name, reason in self._refused.items() if name in known}
        held = [stamp for stamp in stamps if parse_stamp(stamp)[0] in self._models and stamp not in self._refused]
        return {"held": held, "refused": dict(self._refused), "loading": []}

    async def take(self, order: ServingOrder) -> dict[str, Any]:
        """Obey an order; returns what is in use and how requests ended since the canary began.

        Raises:
            RankMeshError: the order names a version that this replica cannot serve; the old order stays.
        """
        asked = [stamp for stamp in (order.version, order.canary) if stamp is not None]
        for base in dict.fromkeys(parse_stamp(stamp)[0] for stamp in asked):
            if base not in self._models:  # an ingress that has just started
                self._models[base] = await asyncio.to_thread(self._checked, base)
        for stamp in asked:
            await asyncio.to_thread(self._advance, stamp)
            self._adopt(stamp)
        if (order.canary is None) != (self.order.canary is None):
            self._outcomes.clear()
        self.order = order
        now_s = self._clock.monotonic_s()
        self._since_s = {stamp: self._since_s.get(stamp, now_s) for stamp in asked}
        outcomes: dict[str, dict[str, int]] = {}
        for (base, outcome), number in self._outcomes.items():
            outcomes.setdefault(base, {})[outcome] = number
        return {"in_flight": sorted(self._in_flight), "outcomes": outcomes}

    def status(self) -> dict[str, Any]:
        """Return the fields of a replica's status."""
        return {
            "version": self.order.version,
            "held": list(self._asked()),
            "refused": dict(self._refused),
            "loading": [],
        }

    def _asked(self) -> tuple[str, ...]:
        return tuple(stamp for stamp in (self.order.version, self.order.canary) if stamp is not None)

    def _advance(self, stamp: str) -> None:
        """Take up what the deltas up to a stamp say of tiers; blocks. An older state is no news: deltas only go on."""
        base, sequence = parse_stamp(stamp)
        gains = self._models[base].gains if base in self._models else None
        if gains is not None and parse_stamp(gains.stamps()[-1])[1] < sequence:
            gains.advance(sequence)

    def _adopt(self, stamp: str) -> None:
        base = parse_stamp(stamp)[0]
        model = self._models[base]
        if model.gains is None:
            return
        newest = model.gains.at(model.gains.stamps()[-1])
        if self._routed_by.get(base) is not newest:
            self._routed_by = {name: one for name, one in self._routed_by.items() if name in self._models}
            self._routed_by[base] = newest
            model.router.adopt(newest)

    def _checked(self, base: str) -> FrontModel:
        model = self._open(base)
        if missing := sorted(set(self._tiers) - set(model.info.config.tiers)):
            raise ConfigError(
                f"weights {base} have no tier {', '.join(missing)}, which this mesh serves", field="tiers", value=base
            )
        return model


def in_share(user: EntityId, salt: str, share: float) -> bool:
    """Return whether a user is among a share of all users; which users these are depends on the salt."""
    return zlib.crc32(f"{salt}:{user}".encode()) < share * _BUCKETS
