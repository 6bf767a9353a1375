"""One rank request from its first call to its ordered head.

The chosen tier ranks what the inputs brought. When that call fails, the inputs are asked first (``Inputs.repair``) and
it is made once more; then the lower tiers follow, then the higher ones, while there is time. A tier that is merely late
is not cancelled when the next one is asked: the better of those that have answered by then is the answer. A tier whose
replicas have all fallen silent is passed over, unless there is no other left to ask.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.ingress.config import IngressConfig
from services.ingress.hedge import Hedger
from services.ingress.inputs import Inputs
from services.ingress.job import Marks, RankJob, Stations
from services.ingress.leg import Leg, is_past, wait_until
from shared.clock import Clock
from shared.errors import (
    DeadlineExceededError,
    RankMeshError,
    StageSilentError,
    StageUnavailableError,
    VersionMismatchError,
)
from shared.schema.ranking import RankedList, RankTask

ATTEMPTS_MAX = 3
"""Calls of one tier for one request; see ``Flow._rank_on``."""


class Flow:
    """The calls of one request; ``close`` it whatever happens.

    Args:
        job: The request.
        stations: Whom to call.
        config: The ingress's configuration.
        clock: Time.
        hedger: Decides which slow look-ups are made twice.

    Attributes:
        is_forgotten: Whether its user was forgotten while it was under way: nothing of the user may be kept.
    """

    def __init__(self, job: RankJob, stations: Stations, config: IngressConfig, clock: Clock, hedger: Hedger) -> None:
        self.job = job
        self.marks = Marks()
        self.is_forgotten = False
        self.tier = job.choice.tier
        self.started_s = clock.monotonic_s()
        self.gathered_s = self.ranked_s = self.started_s
        self._stations = stations
        self._tiers = {tier.name: tier for tier in config.tiers}
        self._render_ms = config.budgets.render_ms
        self._clock = clock
        self._asked: dict[str, Leg] = {}
        self._failed: dict[str, RankMeshError] = {}
        self._retried: list[str] = []
        rank_ms = self._tiers[self.tier].rank_ms
        self.inputs = Inputs(job, stations, config.budgets, rank_ms, self.marks, clock, hedger)

    @property
    def retried(self) -> list[str]:
        """Stations of the calls that were made a second time."""
        return self.inputs.retried + self._retried

    async def run(self) -> RankedList:
        """Carry the request through and return the ordered head.

        Raises:
            DeadlineExceededError: the budget went before there was any answer.
            RankMeshError: a needed station failed, twice where a second attempt may help.
        """
        await self.inputs.gather()
        self.gathered_s = self._clock.monotonic_s()
        ranked = await self._rank()
        self.ranked_s = self._clock.monotonic_s()
        return ranked

    def running(self) -> Iterator[Leg]:
        """Yield the calls that have not ended."""
        yield from self.inputs.running()
        yield from self._running()

    def close(self) -> None:
        """Cancel every call that has not ended."""
        self.inputs.close()
        for leg in self._asked.values():
            leg.cancel()

    async def _rank(self) -> RankedList:
        order = (self.job.choice.tier, *self.job.choice.fallbacks)
        for index, tier in enumerate(order):
            end_s = self._wait_end_s(tier, order[index + 1 :])
            if is_past(end_s, self._clock):
                self._failed[tier] = self.job.deadline.error(f"ranking:{tier}")
                continue
            if (ranked := await self._rank_on(tier, order[index + 1 :], end_s)) is not None:
                return ranked
        last_s = self.job.deadline.share(self._render_ms).at_s
        if (ranked := await self._first_answer(None, last_s)) is not None:
            return ranked
        if is_past(last_s, self._clock):
            raise self.job.deadline.error("ranking")
        raise self._failed[order[-1]]

    async def _rank_on(self, tier: str, rest: tuple[str, ...], end_s: float) -> RankedList | None:
        """Ask one tier, a second time if that may help; None when it failed or is late.

        A third time only when an input broke meanwhile that seemed well before the second: a replica that is dying can
        fail a request twice, and its failure is not the tier's.
        """
        for attempt in range(ATTEMPTS_MAX):
            try:
                leg = self._start(tier, needed=not rest and not any(self._running()))
            except StageSilentError as error:
                self._failed[tier] = error
                return None
            if (ranked := await self._first_answer(leg, end_s)) is not None:
                return ranked
            self._failed[tier] = leg.error or self._late(tier)
            if leg.error is None or attempt == ATTEMPTS_MAX - 1:
                return None
            repaired = await self.inputs.repair()
            self.gathered_s = self._clock.monotonic_s()
            if repaired:  # the time went into the inputs: this tier has not had its own yet
                end_s = self._wait_end_s(tier, rest)
            may_help = repaired or (leg.error.retryable and attempt == 0)
            if not may_help or is_past(end_s, self._clock):
                return None
            self._retried.append(leg.name)
        return None

    def _wait_end_s(self, tier: str, rest: tuple[str, ...]) -> float:
        """Return when to stop waiting for one tier alone: its own limit, or when a cheaper one needs what is left."""
        cheaper = [self._tiers[name].rank_ms for name in rest if self._tiers[name].rank_ms < self._tiers[tier].rank_ms]
        reserve_ms = self._render_ms + min(cheaper, default=0.0)
        return min(
            self._clock.monotonic_s() + self._tiers[tier].timeout_ms / 1e3, self.job.deadline.share(reserve_ms).at_s
        )

    def _running(self) -> Iterator[Leg]:
        return (leg for leg in self._asked.values() if not leg.watcher.done())

    def _start(self, tier: str, *, needed: bool) -> Leg:
        job = self.job
        explores = job.choice.explores and tier == job.choice.tier
        remaining_ms, missing = job.deadline.to_wire_ms(), self.marks.missing()
        task = RankTask(job.request_id, job.version, job.limit, remaining_ms, missing, explores)
        call = self._stations.ranking[tier].call(
            "rank", task, *self.inputs.calls(), payload_bytes=job.whole_bytes, needed=needed
        )
        self._asked[tier] = leg = Leg(f"ranking:{tier}", call, self._clock, fetch=True)
        return leg

    async def _first_answer(self, current: Leg | None, until_s: float) -> RankedList | None:
        """Wait until a tier has answered, the current one has failed, or time is up."""
        while True:
            for tier, leg in self._asked.items():  # in the order of preference: the chosen one first
                if leg.value is not None and self._is_sound(leg):
                    self._accept(tier)
                    ranked: RankedList = leg.value
                    return ranked
            running = [leg.watcher for leg in self._running()]
            if not running or (current is not None and current.watcher.done()) or is_past(until_s, self._clock):
                return None
            await wait_until(running, until_s, self._clock, first=True)

    def _is_sound(self, leg: Leg) -> bool:
        """Check that an answer is this request's and of its version: a wrong answer is worse than none."""
        stamp = leg.value.stamp
        if stamp.request_id == self.job.request_id and stamp.version == self.job.version:
            return True
        leg.error = VersionMismatchError(
            f"{leg.name} answered for request {stamp.request_id} with weights {stamp.version}",
            asked=self.job.version, held=stamp.version, station=leg.name,
        )  # fmt: skip
        leg.value = None
        return False

    def _late(self, tier: str) -> RankMeshError:
        timeout_ms = self._tiers[tier].timeout_ms
        if self.job.deadline.remaining_ms() > min(each.rank_ms for each in self._tiers.values()) + self._render_ms:
            return StageUnavailableError(
                f"ranking:{tier} did not answer within {timeout_ms:.0f} ms", stage=f"ranking:{tier}"
            )
        return self.job.deadline.error(f"ranking:{tier}")

    def _accept(self, tier: str) -> None:
        self.tier = tier
        if tier == self.job.choice.tier:
            return
        for name, error in self._failed.items():
            if isinstance(error, DeadlineExceededError):
                self.marks.add_deadline(self.job.deadline)
            self.marks.add(f"ranking:{name}", f"{error.code}: {error.message}")
