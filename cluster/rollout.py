"""Brings weights to a running mesh: the deltas of the version that serves, and whole versions behind a canary.

One loop in the process that owns the mesh. In each round it looks at the log of deltas, tells every replica which
states to hold, and once all hold them tells the ingress replicas what to rank with. What requests may still ask for is
named in every order, so no replica lets go of it; what a replica refuses is not served, and the reason is shown.

::

    none ──▶ loading ──▶ canary ──▶ served ──▶ (roll-back) rolled_back
                │           └── alarm ──────▶ rolled_back
                └── refused
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from pydantic import Field, ValidationError

from cluster.canary import CanaryConfig, alarm, figures
from cluster.desk import LATEST, Desk, RolloutRequest
from models.updates.live import LiveConfig
from services.ingress.directory import RolloutBody, RolloutPhase, UpdatesBody
from services.ingress.serving import ServingOrder
from shared.clock import Clock
from shared.config import Config
from shared.errors import RankMeshError
from shared.log import JsonLogger
from shared.weights.deltas import parse_stamp, version_stamp
from shared.weights.held import BASES_MAX

TURN_S = 0.25
"""A station that has not answered by then keeps the next one waiting no longer."""

Replies: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]
"""Station -> what each of its replicas said: ``held``, ``refused``, ``loading``, or ``error``."""


class UpdatesConfig(Config):
    """How weights reach a running mesh.

    Args:
        follow: Whether the deltas of the served version are followed.
        period_s: Time between rounds: what came in between is applied together.
        confirm_s: After so long without news every replica is told again what to hold, and the ingress what to rank
            with: a replica that began to serve just when the others were told has missed it.
        busy_share: Share of the time in which one station or another takes deltas up: they do so one after the other,
            with pauses between them that are as much longer than what the last one took. Where cores are scarce that
            takes longer, so fewer states come, each of all deltas that came meanwhile. 1: without pauses.
        spread_s_max: Longest time of all pauses for one state: by about twice that and ``period_s`` answers may lag
            behind the log. Below ``ingress.service.precompute.settle_s``, or embeddings are made for states that go.
        hold_timeout_s: Longest wait for the replicas in one round; what takes longer is found by the next.
        load_timeout_s: Longest time until every replica holds a version that is rolled out.
        live: Limits of each replica.
        canary: When a version that is tried is taken back.
    """

    follow: bool = True
    period_s: float = Field(1.0, gt=0, le=3600)
    confirm_s: float = Field(10.0, gt=0, le=3600)
    busy_share: float = Field(0.1, gt=0, le=1)
    spread_s_max: float = Field(8.0, ge=0, le=3600)
    hold_timeout_s: float = Field(5.0, gt=0)
    load_timeout_s: float = Field(1800.0, gt=0)
    live: LiveConfig = LiveConfig()
    canary: CanaryConfig = CanaryConfig()


class MeshControl(Protocol):
    """Speaks to the replicas of a mesh."""

    def stations(self) -> Sequence[str]:
        """Return the stations that have replicas, the ingress included."""
        ...

    async def hold(self, station: str, stamps: Sequence[str], wait_s: float) -> Sequence[Mapping[str, Any]]:
        """Tell every replica of a station which states to hold; returns what each says, or its error."""
        ...

    async def serve(self, order: ServingOrder) -> Sequence[Mapping[str, Any]]:
        """Tell every ingress replica what to rank with; returns what each says, or its error."""
        ...

    def publish(self, order: ServingOrder) -> None:
        """Put the order where a replica that starts finds it."""
        ...


@dataclass(slots=True)
class _Try:
    """A version that is on its way."""

    request: RolloutRequest
    since_s: float
    phase: Literal["loading", "canary"] = "loading"


@dataclass(slots=True)
class _Round:
    """What a round found out."""

    replies: Replies = field(default_factory=dict)
    reports: Sequence[Mapping[str, Any]] = ()


class Rollouts:
    """The loop of one mesh.

    Args:
        desk: What there is, and what is asked for.
        version: Version that the mesh has started with.
        control: Its replicas.
        config: Periods and limits.
        clock: Time.
        logger: Told of every change and refusal.
    """

    def __init__(
        self,
        desk: Desk,
        version: str,
        control: MeshControl,
        config: UpdatesConfig,
        clock: Clock,
        logger: JsonLogger,
    ) -> None:
        self._desk = desk
        self._control = control
        self._config = config
        self._clock = clock
        self._logger = logger.bind(service="rollout")
        self._base = version
        self._sent: frozenset[str] = frozenset({version})  # what the ingress was last told to rank with
        self._replaced: frozenset[str] = frozenset()  # and before that
        self._before: frozenset[str] = frozenset()  # what an ingress may rank with that does not know better yet
        self._previous: str | None = None  # what a roll-back returns to
        self._back: str | None = None  # a roll-back to it is asked for
        self._back_since_s = 0.0
        self._try: _Try | None = None
        self._in_flight: frozenset[str] = frozenset()
        self._told: frozenset[str] = frozenset({version})
        self._is_stale = False
        self._told_s = clock.monotonic_s()
        self.order = ServingOrder.first(version)

    async def run(self) -> None:
        """Do rounds until cancelled; a round that fails is logged, and the next one tries again."""
        while True:
            # Whatever Ray or a store raises: the mesh serves on as it is.
            (failure,) = await asyncio.gather(self.round(), return_exceptions=True)
            if isinstance(failure, RankMeshError):
                self._logger.warning("round_failed", error=failure)
                self._note_updates(reason=failure.message)
            elif failure is not None:
                self._logger.error("round_failed", error=failure)
            await self._clock.sleep_s(self._config.period_s)

    async def round(self) -> None:
        """Take one step towards what is asked for."""
        self._take_request()
        newest = {base: self._newest(base) for base in self._bases()}
        target = version_stamp(self._base, newest[self._base])
        canary = None
        if self._try is not None:
            canary = version_stamp(self._try.request.version, newest[self._try.request.version])
        wanted = [target, canary]
        if self._now_s() - self._told_s >= self._config.confirm_s:
            self._told, self._is_stale = frozenset(), True
        if self._is_settled(wanted):
            return
        found = _Round()
        if (hold := self._to_hold(wanted)) != self._told:
            self._publish(self.order.model_copy(update={"held": tuple(sorted(hold))}))
            found.replies = await self._hold(sorted(hold))
            self._told_s = self._now_s()
            # Refused, late or lost: the next round asks again.
            self._told = hold if all(_hold(found.replies, stamp) for stamp in hold) else frozenset()
        self._advance(target, canary, found.replies)
        found.reports = await self._serve()
        self._judge(found)

    def _now_s(self) -> float:
        """Return the seconds that periods are measured by: a clock that is set must not end a watch."""
        return self._clock.monotonic_s()

    # --- what is wanted -------------------------------------------------------------------------------------------

    def _bases(self) -> list[str]:
        return [self._base, *(() if self._try is None else (self._try.request.version,))]

    def _newest(self, base: str) -> int:
        """Return the number of the newest delta of a version, 0 where they are not followed."""
        return self._desk.newest_delta(base) if self._config.follow else 0

    def _to_hold(self, wanted: Iterable[str | None]) -> frozenset[str]:
        """Return every state that is asked for, may be, or shall be soon."""
        held = (self.order.version, self.order.canary, self._previous, *wanted)
        return frozenset(stamp for stamp in held if stamp is not None) | self._before | self._in_flight

    def _is_settled(self, wanted: Iterable[str | None]) -> bool:
        """Return whether there is nothing to do: all is held and served, nothing is tried, nothing has changed."""
        asked = {stamp for stamp in wanted if stamp is not None}
        served = {stamp for stamp in (self.order.version, self.order.canary) if stamp is not None}
        if not asked <= served or self._try is not None or self._back is not None or self._is_stale:
            return False
        # States of one version are let go of with the next delta, a whole version at once.
        return _bases(self._told) == _bases(self._to_hold(wanted))

    # --- steps ----------------------------------------------------------------------------------------------------

    async def _hold(self, stamps: Sequence[str]) -> Replies:
        """Tell the stations what to hold, one after the other: all at once would be felt by the requests of the moment.

        What a version takes (minutes, at low priority) is waited for together, and what somebody has asked for is not
        kept waiting.
        """
        calls: dict[str, asyncio.Task[Sequence[Mapping[str, Any]]]] = {}
        left_s = 0.0 if self._is_loading() else self._config.spread_s_max
        try:
            for name in self._control.stations():
                begin_s = self._clock.monotonic_s()
                calls[name] = asyncio.create_task(self._control.hold(name, stamps, self._config.hold_timeout_s))
                await asyncio.wait([calls[name]], timeout=TURN_S)
                took_s = self._clock.monotonic_s() - begin_s
                pause_s = 0.0 if self._desk.is_asked() else min(took_s * (1 / self._config.busy_share - 1), left_s)
                left_s -= pause_s
                await self._clock.sleep_s(pause_s)
            return dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
        finally:
            for call in calls.values():
                call.cancel()

    def _is_loading(self) -> bool:
        return self._try is not None and self._try.phase == "loading"

    def _advance(self, target: str, canary: str | None, replies: Replies) -> None:
        """Order what all replicas hold."""
        order, held = self.order, self._told | _held_by_all(replies)
        update: dict[str, Any] = {}
        if target != order.version and target in held:
            update["version"] = target
        if canary is not None and order.canary is not None and canary != order.canary and canary in held:
            update["canary"] = canary
        if update:
            self._retire()
            self.order = order.model_copy(update=update)
            self._is_stale = True
        base, served = parse_stamp(self.order.version)
        reason = "" if target == self.order.version else _why_not(replies, target)
        newest = parse_stamp(target)[1] if parse_stamp(target)[0] == base else 0
        self._note_updates(newest=newest, served=served, reason=reason)
        if self._try is not None and self._try.phase == "loading":
            self._follow_load(self._try, canary or self._try.request.version, replies, held)
        elif self._back is not None:
            self._go_back(self._back, replies, held)

    def _go_back(self, back: str, replies: Replies, held: frozenset[str]) -> None:
        if back not in held:
            limit_s, reason = self._config.load_timeout_s, _why_not(replies, back)
            if self._now_s() - self._back_since_s > limit_s:
                self._back = None
                self._change("refused", reason=f"not every replica holds {back} after {limit_s:.0f} s: {reason}")
            elif self.order.rollout.phase == "loading":
                self._tell(reason=reason)
            return
        self._back = self._previous = None
        self._base = parse_stamp(back)[0]
        self._change("rolled_back", version=back, previous=None, reason="asked for")

    def _follow_load(self, tried: _Try, newest: str, replies: Replies, held: frozenset[str]) -> None:
        version, request = tried.request.version, tried.request
        if refusal := _refusal(replies, (version, newest)):
            self._drop("refused", refusal)
        elif ready := sorted((stamp for stamp in held if parse_stamp(stamp)[0] == version), key=parse_stamp):
            if request.share > 0:
                tried.phase, tried.since_s = "canary", self._now_s()
                self._change("canary", canary=ready[-1], share=request.share)
            else:
                self._promote(tried, ready[-1])
        elif self._now_s() - tried.since_s > self._config.load_timeout_s:
            limit_s = self._config.load_timeout_s
            self._drop("refused", f"not every replica holds it after {limit_s:.0f} s: {_why_not(replies, newest)}")
        else:
            self._tell(reason=_why_not(replies, newest))

    async def _serve(self) -> Sequence[Mapping[str, Any]]:
        """Tell the ingress replicas, and learn which states their requests use."""
        if not self._is_stale and self._try is None:
            return ()
        self._publish(self.order.model_copy(update={"held": tuple(sorted(self._to_hold([])))}))
        if (asked := _asked(self.order)) != self._sent:
            self._replaced, self._sent = self._sent, asked
        reports = await self._control.serve(self.order)
        in_flight = {stamp for report in reports for stamp in report.get("in_flight", ())}
        if failed := [report["error"] for report in reports if "error" in report]:
            # It may still rank with the order before: nothing that was held is let go of before it has answered.
            self._in_flight |= frozenset(in_flight) | self._told
            self._logger.warning("ingress_not_told", reason=failed[0], version=self.order.version)
            return ()
        self._in_flight = frozenset(in_flight)
        self._is_stale = False
        # The state before stays for an ingress that starts just now; a whole version would be too much for that.
        bases = _bases(self._sent)
        self._before = frozenset(stamp for stamp in self._replaced if parse_stamp(stamp)[0] in bases)
        return reports

    def _retire(self) -> None:
        """Keep what requests are ranked with now until no ingress replica can choose it any more."""
        self._before |= _asked(self.order) | self._sent

    def _judge(self, found: _Round) -> None:
        """Watch the canary: take it back, go on watching, or give it to all."""
        if self._try is None or self._try.phase != "canary" or not found.reports:
            return
        version, base = self._try.request.version, self._base
        measured = figures(found.reports, base, version)
        self._tell(figures=measured)
        if reason := alarm(self._config.canary, measured):
            self._drop("rolled_back", reason)
        elif self._now_s() - self._try.since_s >= self._try.request.watch_s:
            self._promote(self._try, self.order.canary or version)

    def _promote(self, tried: _Try, stamp: str) -> None:
        version = tried.request.version
        self._previous = self.order.version
        self._base = version
        self._try = None
        self._change("served", version=stamp, canary=None, previous=self._previous)

    def _drop(self, phase: RolloutPhase, reason: str) -> None:
        """End a try: the version before has served all the time."""
        self._try = None
        self._change(phase, canary=None, reason=reason)

    def _take_request(self) -> None:
        if (text := self._desk.take()) is None:
            return
        try:
            request = RolloutRequest.model_validate_json(text)
        except ValidationError as error:
            self._logger.warning("request_refused", reason=str(error))
            return
        self._roll_back(request) if request.action == "rollback" else self._begin(request)

    def _begin(self, request: RolloutRequest) -> None:
        rollout = RolloutBody(id=request.id, version=request.version, previous=self._previous)
        if self._try is not None:
            self._answer(rollout, f"{self._try.request.version} is being rolled out; roll it back first")
            return
        if self._back is not None:
            self._answer(rollout, f"{self._back} is being gone back to")
            return
        try:
            if request.version == LATEST:
                request = request.model_copy(update={"version": self._desk.latest()})
                rollout = rollout.model_copy(update={"version": request.version})
            self._desk.check(request.version)
        except RankMeshError as error:
            self._answer(rollout, error.message)
            return
        if request.version == self._base:
            self._answer(rollout, "it is the version that serves")
            return
        # One version at most is held beside the one that serves and the one that comes.
        previous, self._previous = self._previous, None
        if (number := len(_bases(self._to_hold([])) | {request.version})) > BASES_MAX:
            self._previous = previous
            reason = f"{number} versions would be held, limit {BASES_MAX}: requests may still ask for the one before"
            self._answer(rollout, reason)
            return
        self._try = _Try(request, self._now_s())
        self.order = self.order.model_copy(
            update={"rollout": rollout.model_copy(update={"previous": self.order.version})}
        )
        self._change("loading", reason="")

    def _answer(self, rollout: RolloutBody, reason: str) -> None:
        refused: RolloutPhase = "refused"
        update = {"phase": refused, "reason": reason, "since_s": self._clock.now_s()}
        self._logger.warning("rollout_refused", version=rollout.version, reason=reason)
        self.order = self.order.model_copy(update={"rollout": rollout.model_copy(update=update)})
        self._is_stale = True

    def _roll_back(self, request: RolloutRequest) -> None:
        if self._try is None and self._previous is None:
            reason = "there is no version to go back to: none has been rolled out over another"
            self._answer(RolloutBody(id=request.id, version=self._base), reason)
            return
        rollout = self.order.rollout.model_copy(update={"id": request.id})
        self.order = self.order.model_copy(update={"rollout": rollout})
        if self._try is not None:
            self._drop("rolled_back", "asked for")
        elif self._previous is not None:
            self._back, self._told = self._previous, frozenset()  # a replica that started since may lack it
            self._back_since_s = self._now_s()
            self._change("loading")

    # --- words ----------------------------------------------------------------------------------------------------

    def _change(self, phase: RolloutPhase, **changes: Any) -> None:
        """Come into a phase; ``version``, ``canary`` and ``share`` are of the order, the rest of its roll-out."""
        ordered: dict[str, Any] = {
            name: changes.pop(name) for name in ("version", "canary", "share") if name in changes
        }
        if ordered.get("canary", "") is None:
            ordered["share"] = 0.0
        self._retire()
        shown = {"phase": phase, "since_s": self._clock.now_s(), "share": ordered.get("share", 0.0), "reason": ""}
        shown |= changes
        rollout = self.order.rollout.model_copy(update=shown)
        self.order = self.order.model_copy(update={**ordered, "rollout": rollout})
        self._is_stale = True
        self._logger.info("rollout", phase=phase, version=rollout.version, serves=self.order.version, **changes)

    def _tell(self, **shown: Any) -> None:
        rollout = self.order.rollout.model_copy(update=shown)
        if rollout != self.order.rollout:
            self.order = self.order.model_copy(update={"rollout": rollout})
            self._is_stale = True

    def _note_updates(self, **shown: Any) -> None:
        updates: UpdatesBody = self.order.updates.model_copy(update=shown)
        if updates != self.order.updates:
            self.order = self.order.model_copy(update={"updates": updates})
            self._is_stale = True
            if updates.reason:
                self._logger.warning("update_not_served", newest=updates.newest, reason=updates.reason)

    def _publish(self, order: ServingOrder) -> None:
        self.order = order
        self._control.publish(order)


class RolloutThread(threading.Thread):
    """Runs the loop beside its process's own work.

    Args:
        rollouts: The loop.
    """

    def __init__(self, rollouts: Rollouts) -> None:
        super().__init__(name="rollouts", daemon=True)
        self.rollouts = rollouts
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Do rounds until ``stop``."""
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self.rollouts.run())
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the loop; a round that hangs is left behind, its process ends."""
        if self._task is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self.join(timeout_s)


def _asked(order: ServingOrder) -> frozenset[str]:
    """Return the stamps that an ingress ranks with by an order."""
    return frozenset(stamp for stamp in (order.version, order.canary) if stamp is not None)


def _bases(stamps: Iterable[str]) -> set[str]:
    return {parse_stamp(stamp)[0] for stamp in stamps}


def _hold(replies: Replies, stamp: str) -> bool:
    """Return whether every replica of every station holds a state."""
    return bool(replies) and all(
        said and all(stamp in reply.get("held", ()) for reply in said) for said in replies.values()
    )


def _held_by_all(replies: Replies) -> frozenset[str]:
    stamps = {stamp for said in replies.values() for reply in said for stamp in reply.get("held", ())}
    return frozenset(stamp for stamp in stamps if _hold(replies, stamp))


def _refusal(replies: Replies, stamps: Collection[str]) -> str:
    """Return why a replica does not take one of these states up, empty when none says so."""
    for station, said in replies.items():
        for reply in said:
            for stamp, reason in reply.get("refused", {}).items():
                if stamp in stamps:
                    return f"{station}: {reason}"
    return ""


def _why_not(replies: Replies, stamp: str) -> str:
    """Return why a state is not served yet, of the first station that does not hold it."""
    for station, said in replies.items():
        if not said:
            return f"{station}: no replica answers"
        for reply in said:
            if stamp not in reply.get("held", ()):
                refused = reply.get("refused", {})
                base = parse_stamp(stamp)[0]
                reason = refused.get(stamp) or refused.get(base) or next(iter(refused.values()), "")
                return f"{station}: {reply.get('error') or reason or 'is reading it'}"
    return ""
