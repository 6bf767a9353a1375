"""Who has how much of the work in flight: a caller may use what nobody else wants, and its own share when all want.

Tenants share first, then the surfaces of a tenant share what is the tenant's: a surface is a word of the request, and
who makes up more of them has no more for it.

What is kept for another is half as much again as it has lately wanted at once, and at most its share: a single request
of somebody else costs a busy caller a place or two, not half of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.clock import Clock


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks.

    Args:
        tenant: As the client names itself; empty: nobody in particular.
        surface: Where the answer is shown.
    """

    tenant: str
    surface: str


@dataclass(slots=True)
class _Holding:
    """What a tenant, or a surface of one, has in flight, and has wanted of late."""

    seen_s: float
    num: int = 0
    work: float = 0.0
    wanted: float = 0.0

    def want(self, work: float, now_s: float, memory_s: float) -> None:
        self.wanted = max(self.wanted_at(now_s, memory_s), self.work + work)
        self.seen_s = now_s

    def wanted_at(self, now_s: float, memory_s: float) -> float:
        return self.wanted * math.exp((self.seen_s - now_s) / memory_s)

    def add(self, work: float) -> None:
        self.num += 1
        self.work += work

    def take(self, work: float) -> None:
        self.num -= 1
        # Sums of floats drift: what is left where no request is would keep this holding for ever.
        self.work = max(self.work - work, 0.0) if self.num else 0.0


@dataclass(slots=True)
class _Tenant:
    all: _Holding
    surfaces: dict[str, _Holding] = field(default_factory=dict)


class Shares:
    """Weighted shares among the tenants of late, and among the surfaces of each.

    Args:
        weights: Tenant or surface -> weight, 1 for those not named; a tenant counts its own times the largest of its
            surfaces'.
        memory_s: Time in which what a caller wanted is forgotten to a third, seconds.
        callers_max: Tenants that are told apart, and surfaces of one tenant; all beyond are one.
        clock: Time.
    """

    def __init__(self, weights: Mapping[str, float], memory_s: float, callers_max: int, clock: Clock) -> None:
        self._weights = weights
        self._memory_s = memory_s
        self._max = callers_max
        self._clock = clock
        self._held: dict[str, _Tenant] = {}
        self._forgot_s = clock.monotonic_s()

    def ask(self, caller: Caller, work: float) -> Caller:
        """Note that a caller wants this much more, whether it gets it or not; return as whom it is counted."""
        name, tenant = self.want(caller.tenant, work)
        surface = caller.surface if name == caller.tenant else _OTHERS
        if surface not in tenant.surfaces and len(tenant.surfaces) >= self._max:
            surface = _OTHERS
        now_s = self._clock.monotonic_s()
        tenant.surfaces.setdefault(surface, _Holding(now_s)).want(work, now_s, self._memory_s)
        return Caller(name, surface)

    def want(self, tenant: str, work: float) -> tuple[str, _Tenant]:
        """Note that a tenant wants this much more, on a surface that is not known yet; return as whom it is counted."""
        now_s = self._clock.monotonic_s()
        self._forget(now_s)
        name = self.name_of(tenant)
        found = self._held.setdefault(name, _Tenant(_Holding(now_s)))
        found.all.want(work, now_s, self._memory_s)
        return name, found

    def name_of(self, tenant: str) -> str:
        """Return as whom a tenant is counted."""
        return tenant if tenant in self._held or len(self._held) < self._max else _OTHERS

    def begin(self, caller: Caller, work: float) -> None:
        """Count work in; ``caller`` as ``ask`` returned it."""
        for holding in self._of(caller):
            holding.add(work)

    def end(self, caller: Caller, work: float) -> None:
        """Count work out."""
        for holding in self._of(caller):
            holding.take(work)

    def has_room(self, caller: Caller, work: float, total: float) -> bool:
        """Return whether ``total`` leaves a caller this much more beside what is kept for the others.

        Who has nothing in flight has room for one request, however little of ``total`` many others leave to each.
        """
        of_tenant, of_surface = self._of(caller)
        left = self._left_to_tenant(caller.tenant, total)
        if len(self._held) > 1 and not _fits(of_tenant, work, left):
            return False
        own = self._held[caller.tenant].surfaces
        surfaces = {name: (holding, self._weights.get(name, 1.0)) for name, holding in own.items()}
        return _fits(of_surface, work, left - self._kept(surfaces, caller.surface, left))

    def tenant_has_room(self, tenant: str, work: float, total: float) -> bool:
        """Return whether the same is true of the tenant, before its surface is known."""
        name = tenant if tenant in self._held else _OTHERS
        return len(self._held) <= 1 or _fits(self._held[name].all, work, self._left_to_tenant(name, total))

    def owns(self, caller: Caller, work: float, total: float) -> bool:
        """Return whether this much more is of a caller's own share of ``total``, whatever others have in flight."""
        left = self._left_to_surfaces(caller.tenant, work, total)
        return work <= left[caller.surface]

    def may_own(self, tenant: str, work: float, total: float) -> bool:
        """Return the same where the surface is not known yet: whether it is true of one that the tenant has had."""
        name = tenant if tenant in self._held else _OTHERS
        return any(work <= left for left in self._left_to_surfaces(name, work, total).values())

    def _left_to_tenant(self, tenant: str, total: float) -> float:
        if len(self._held) <= 1:
            return total
        tenants = {name: (held.all, self._tenant_weight(name)) for name, held in self._held.items()}
        return total - self._kept(tenants, tenant, total)

    def _left_to_surfaces(self, tenant: str, work: float, total: float) -> dict[str, float]:
        """Return what a tenant's surfaces, or one that is new, have left of their own shares of ``total``."""
        held, mine = self._held[tenant], total
        if len(self._held) > 1:
            weights = sum(map(self._tenant_weight, self._held)) if self._weights else len(self._held)
            mine *= self._tenant_weight(tenant) / weights
            if held.all.work + work > mine:
                return dict.fromkeys(held.surfaces, 0.0)
        surfaces = held.surfaces or {"": held.all}
        weight_of = {name: self._weights.get(name, 1.0) for name in surfaces}
        one = mine / sum(weight_of.values())
        return {name: one * weight_of[name] - holding.work for name, holding in surfaces.items()}

    def __len__(self) -> int:
        """Number of tenants and surfaces that are held."""
        return sum(1 + len(tenant.surfaces) for tenant in self._held.values())

    def _of(self, caller: Caller) -> tuple[_Holding, _Holding]:
        tenant = self._held[caller.tenant]
        return tenant.all, tenant.surfaces[caller.surface]

    def _kept(self, held: Mapping[str, tuple[_Holding, float]], but: str, total: float) -> float:
        """Return what is kept of ``total`` for all but one."""
        now_s = self._clock.monotonic_s()
        share = total / sum(weight for _, weight in held.values())
        return sum(
            min(_ROOM_TO_GROW * max(holding.wanted_at(now_s, self._memory_s), holding.work), share * weight)
            for name, (holding, weight) in held.items()
            if name != but
        )

    def _tenant_weight(self, tenant: str) -> float:
        if not self._weights:
            return 1.0
        own = self._weights.get(tenant, 1.0)
        return own * max(self._weights.get(surface, 1.0) for surface in self._held[tenant].surfaces or ("",))

    def _forget(self, now_s: float) -> None:
        if now_s - self._forgot_s < self._memory_s:  # looking through hundreds of callers costs more than a refusal
            return
        self._forgot_s, oldest_s = now_s, now_s - _MEMORIES * self._memory_s
        for name, tenant in list(self._held.items()):
            if not tenant.all.num and tenant.all.seen_s < oldest_s:
                del self._held[name]
                continue
            for surface, holding in list(tenant.surfaces.items()):
                if not holding.num and holding.seen_s < oldest_s:
                    del tenant.surfaces[surface]


def _fits(holding: _Holding, work: float, room: float) -> bool:
    return holding.work + work <= (room if holding.num else max(room, _ONE_REQUEST))


_MEMORIES = 3.0
_ROOM_TO_GROW = 1.5
_ONE_REQUEST = 2.5
"""Work of one request of some two thousand candidates."""

_OTHERS = "others"
