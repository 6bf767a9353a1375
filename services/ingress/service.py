"""The ingress: admits a request, chooses its tier, makes its calls and says how the answer came to be."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from models.routing import GainModel
from services.ingress.admission import Gate, Place, RankGate
from services.ingress.approach import Approach
from services.ingress.background import Precompute
from services.ingress.checks import check_candidates, check_events, check_limits
from services.ingress.config import IngressConfig
from services.ingress.directory import DeploymentStatus, Directory, ModelsBody, ReadyBody, StatusBody
from services.ingress.exploration import Exploration
from services.ingress.feedback import Feedback
from services.ingress.flow import Flow
from services.ingress.hedge import Hedger
from services.ingress.job import DEADLINE, RankJob, Stations
from services.ingress.leg import Leg, all_ended
from services.ingress.model_info import ModelInfo
from services.ingress.outcome import served, unserved
from services.ingress.question import RankQuestion
from services.ingress.render import candidate_rows, waterfall
from services.ingress.routing import BudgetRouter, RouteQuery, TierRouter
from services.ingress.serving import FrontModel, Serving
from services.ingress.stats import IngressStats
from services.ingress.under_way import UnderWay
from services.ingress.vain import rest_in_vain
from shared.clock import Clock
from shared.deadline import Deadline
from shared.errors import ConfigError, DeadlineExceededError, RankMeshError, StageUnavailableError, WeightsError
from shared.handle import Handle
from shared.hashing import EntityId, canonical_id
from shared.log import JsonLogger
from shared.schema.api import Event, EventsRequest, RankRequest
from shared.schema.ranking import RankedList
from shared.weights.held import Series

NEEDED = ("preprocess",)
"""Deployments without which no rank request can be answered, beside one ranking tier."""


class IngressService:
    """Front door of the mesh; one object a replica.

    Args:
        config: Configuration.
        stations: Handles of the other stations.
        model: The weights version that requests are ranked with first.
        directory: Who is in the mesh.
        clock: Time.
        replica: Name of this replica, unique in the mesh's life.
        router: Chooses the tier; default by budget and load.
        logger: One line a request, and one for each that failed.
        open_model: Reads another version that is rolled out; None: there is none.
        gains: What the deltas of the first version make of its router; None: nothing.

    Raises:
        ConfigError: a tier or shard of the configuration has no station.
    """

    def __init__(
        self,
        config: IngressConfig,
        stations: Stations,
        model: ModelInfo,
        directory: Directory,
        clock: Clock,
        replica: str,
        router: TierRouter | None = None,
        logger: JsonLogger | None = None,
        open_model: Callable[[str], FrontModel] | None = None,
        gains: Series[GainModel] | None = None,
    ) -> None:
        tiers = [tier.name for tier in config.tiers]
        if set(tiers) != set(stations.ranking):
            raise ConfigError(
                f"tiers are {tiers}, ranking stations {sorted(stations.ranking)}", field="tiers", value=str(tiers)
            )
        self.config = config
        self.replica = replica
        self.clock = clock
        self._stations = stations
        self._directory = directory
        limits = (config.tiers, config.light_above_in_flight, config.light_above_load)
        first = FrontModel(model, router or BudgetRouter(*limits), gains)
        self.serving = Serving(model.version, first, open_model or _nothing_else, tiers, clock)
        self._logger = (logger or JsonLogger(clock=clock)).bind(service="ingress", replica=replica)
        self._ids = itertools.count(1)
        self._hedger = Hedger(config.hedge, [f"embedding:{shard}" for shard in range(len(stations.embedding))])
        self._stats = IngressStats(tiers, clock)
        self.rank_gate = RankGate(config.in_flight_max, config.retry_after_s, config.admission, self._stats, clock)
        self.events_gate = Gate("events", config.events_in_flight_max, config.retry_after_s, self._stats)
        self.precompute = Precompute(stations, config.precompute, clock, self.serving)
        self.feedback = Feedback(self._click_probability, config.feedback, self.serving)
        self.exploration = Exploration(stations.sequence, config.exploration, clock)
        self._under_way = UnderWay()

    async def rank(self, request: RankRequest, received_s: float | None = None) -> dict[str, Any]:
        """Rank the candidates of a request in its document form; see ``answer``."""
        return await self.answer(RankQuestion.of(request, self.config.limits), received_s)

    async def answer(
        self, question: RankQuestion, received_s: float | None = None, approach: Approach | None = None
    ) -> dict[str, Any]:
        """Rank the candidates of one request.

        Args:
            question: The parsed body.
            received_s: Monotonic seconds at which the body was complete; the budget counts from there. Default now.
            approach: As what admission has counted it until now.

        Returns:
            The fields of ``RankResponse`` as plain values.

        Raises:
            InvalidRequestError: a field breaks a limit of this deployment.
            OverloadedError: it would not be answered in time, or its caller has its share.
            DeadlineExceededError: the budget went before there was any answer.
            RankMeshError: a needed station failed.
        """
        received_s = self.clock.monotonic_s() if received_s is None else received_s
        limits = self.config.limits
        check_limits(question, limits)
        with self.rank_gate.admit(question.ask(limits), approach) as place, self._stats.request("rank", received_s):
            job = self._job(question, received_s)
            job.deadline.check("admission")
            flow = Flow(job, self._stations, self.config, self.clock, self._hedger)
            self.serving.begin(job.version)
            resting = self._rest_in_vain(flow, place)
            try:
                with self._under_way.of(flow):
                    ranked = await flow.run()
                self.precompute.offer(flow, ranked)
                self.exploration.offer(flow, ranked, question.ids, self.serving.model(job.version).info.config.depths)
            except RankMeshError as error:
                self._logger.warning("rank_failed", request_id=job.request_id, code=error.code, error=error)
                missed = isinstance(error, DeadlineExceededError)
                self.serving.observe(job.version, unserved(job, missed=missed))
                self.serving.count(job.version, "failed")
                raise
            finally:
                self.serving.end(job.version)
                self._stats.retried(flow.retried)
                self._stats.hedged(flow.inputs.hedged)
                resting.cancel()
                flow.close()
            self.serving.observe(job.version, served(flow, ranked))
            body = self._body(question, flow, ranked, received_s)
            place.is_served, place.is_late = True, DEADLINE in flow.marks.reasons
        self.serving.count(job.version, "degraded" if body["degraded"] else "whole")
        self._stats.answered(body)
        self._logger.info(
            "ranked",
            request_id=job.request_id,
            client_request_id=question.fields.request_id,
            num_candidates=body["num_candidates"],
            tier=body["tier"],
            explores=job.choice.explores,
            degraded=body["degraded"],
            total_ms=body["total_ms"],
        )
        return body

    async def append(self, request: EventsRequest) -> dict[str, int]:
        """Append events to users' logs; tried twice, which is safe because an event id is kept once.

        Returns:
            The fields of ``EventsResponse``.

        Raises:
            InvalidRequestError: more events than the deployment allows.
            OverloadedError: too many appends are in flight.
            RankMeshError: the events could not be stored or buffered.
        """
        check_events(request, self.config.limits, self.clock.now_s())
        with self._events():
            result: dict[str, int] = await self._twice(self._stations.sequence, "append", list(request.events))
        self.feedback.offer(request.events)
        return result

    async def forget(self, user: EntityId) -> dict[str, Any]:
        """Delete a user's events and profile, and what was made of them; safe to repeat, since what is gone stays gone.

        Each station is tried twice, also after one that failed. The log comes first: what is made of it from then on is
        made of nothing.

        Returns:
            The fields of ``ForgetResponse``.

        Raises:
            OverloadedError: too many changes of logs are in flight.
            RankMeshError: the store is out of reach, or a station; ``left`` of its context names those that still hold
                something of the user, for a repetition.
        """
        known = canonical_id(user)
        found: list[bool] = []
        left: dict[str, RankMeshError] = {}
        with self._events(), self._under_way.forgetting(known):
            self.exploration.forget(known)
            self.serving.forget(known)
            for station in (self._stations.sequence, self._stations.speculative):
                try:
                    found.append(await self._twice(station, "forget", known))
                except RankMeshError as error:
                    left[station.name] = error
            if left:
                first, names = next(iter(left.values())), ", ".join(left)
                message = f"{first.message}; what {names} holds of the user is not deleted yet: ask again"
                raise type(first)(message, **{**first.context, "left": names}) from first
        return {"user_id": user, "deleted": any(found)}

    @contextmanager
    def _events(self) -> Iterator[None]:
        with self.events_gate.enter(), self._stats.request("events", self.clock.monotonic_s()):
            yield

    async def _twice(self, station: Handle, method: str, argument: object) -> Any:
        deadline = Deadline.after_ms(self.config.budgets.events_ms, self.clock)
        leg = await self._call_once(station, method, argument, deadline)
        if leg.error is not None and leg.error.retryable:
            self._stats.retried([leg.name])
            leg = await self._call_once(station, method, argument, deadline)
        if leg.value is None:
            raise leg.error or deadline.error(leg.name)
        return leg.value

    async def _call_once(self, station: Handle, method: str, argument: object, deadline: Deadline) -> Leg:
        leg = Leg(station.name, station.call(method, argument, needed=True), self.clock, fetch=True)
        try:
            await all_ended([leg], deadline.at_s, self.clock)
        finally:
            leg.cancel()
        return leg

    def _rest_in_vain(self, flow: Flow, place: Place) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(rest_in_vain(flow.running, place, self.clock))

    async def _click_probability(self, event: Event, version: str) -> float:
        """Return what a version says of an event: of its item, for its user, just before it; on the best tier."""
        tier = self.config.tiers[0].name
        request = RankRequest(
            user_id=event.user_id,
            candidates=[event.item_id],
            timestamp_s=event.timestamp_s,
            tier=tier,
            speculative=False,
        )
        question = RankQuestion.of(request, self.config.limits)
        job = self._job(question, self.clock.monotonic_s(), version, self.config.feedback.timeout_ms)
        flow = Flow(job, self._stations, self.config, self.clock, self._hedger)
        try:
            ranked = await flow.run()
        finally:
            flow.close()
        if flow.marks.reasons or ranked.history_degraded:
            raise StageUnavailableError("a part of the answer is missing", stage="feedback")
        return float(ranked.scores[0][self.serving.info.objectives.index("click")])

    async def models(self) -> ModelsBody:
        """Return the models that this mesh ranks with, and how its stations execute them."""
        tiers = [tier.name for tier in self.config.tiers]
        said = {
            each.name: replica.execution
            for each in await self._directory.deployments()
            for replica in reversed(each.replicas)
            if replica.execution is not None
        }
        bodies = [info.body(tiers) for info in self.serving.infos()]
        return ModelsBody(
            models=[
                body.model_copy(update={"execution": said, "current": index == 0}) for index, body in enumerate(bodies)
            ]
        )

    async def ready(self) -> ReadyBody:
        """Say that rank requests are answered.

        Raises:
            StageUnavailableError: names the stations without a live replica that no answer can do without.
        """
        if missing := self._missing(await self._directory.deployments()):
            raise StageUnavailableError(f"no live replica of {', '.join(missing)}", stage=missing[0])
        return ReadyBody(version=self.serving.order.version)

    async def mesh_status(self) -> StatusBody:
        """Return every deployment, replica and weights version of the mesh."""
        deployments, order = await self._directory.deployments(), self.serving.order
        return StatusBody(
            name=self.config.mesh,
            ready=not self._missing(deployments),
            version=order.version,
            rollout=order.rollout,
            updates=order.updates,
            replica=self.replica,
            counters=self.counters(),
            silent={name: each.open for name, each in self._stations.breakers.items() if each.open},
            store=await self._directory.store(),
            deployments=deployments,
        )

    def counters(self) -> dict[str, int]:
        """Return what this replica counted since it started."""
        self._stats.breakers(self._stations.breakers.values())
        return {
            **self._stats.counters(),
            **self.rank_gate.counters(),
            "precompute_in_flight": self.precompute.in_flight,
            "precompute_started": self.precompute.num_started,
            "precompute_stored": self.precompute.num_stored,
            "precompute_dropped": self.precompute.num_dropped,
            "precompute_failed": self.precompute.num_failed,
            "explored_kept": self.exploration.num_kept,
            "explored_dropped": self.exploration.num_dropped,
            "explored_failed": self.exploration.num_failed,
        }

    def metrics(self) -> bytes:
        """Return the metrics of this replica in Prometheus' text format."""
        self._stats.breakers(self._stations.breakers.values())
        return self._stats.render()

    def status(self) -> dict[str, Any]:
        """Return version and counters of this replica."""
        return {
            "station": "ingress",
            "replica": self.replica,
            **self.serving.status(),
            "counters": self.counters(),
        }

    async def check_health(self) -> None:
        """Answer the mesh's health check: an event loop that runs is all that the ingress needs."""

    async def aclose(self) -> None:
        """Stop what runs in the background."""
        for background in (self.precompute, self.feedback, self.exploration):
            background.close()
            await background.drain()

    def _job(
        self,
        question: RankQuestion,
        received_s: float,
        version: str | None = None,
        budget_ms: float | None = None,
    ) -> RankJob:
        limits, request, num_candidates = self.config.limits, question.fields, len(question.ids)
        user = canonical_id(request.user_id)
        version = version or self.serving.choose(user)
        model = self.serving.model(version)
        check_candidates(question, model.info.config)
        budget_ms = budget_ms or question.budget_ms(limits)
        deadline = Deadline(received_s + budget_ms / 1e3, budget_ms, self.clock)
        as_of_s = int(self.clock.now_s()) if request.timestamp_s is None else request.timestamp_s
        query = RouteQuery(
            asked=request.tier,
            remaining_ms=deadline.remaining_ms(),
            num_candidates=num_candidates,
            in_flight=self.rank_gate.in_flight,
            load=self.rank_gate.load,
            surface=request.surface,
            user=user,
            as_of_s=as_of_s,
        )
        return RankJob(
            request_id=f"{self.replica}/{next(self._ids)}",
            version=version,
            user=user,
            surface=request.surface,
            block=question.block,
            num_candidates=num_candidates,
            limit=min(request.limit or limits.limit_default, num_candidates),
            as_of_s=as_of_s,
            deadline=deadline,
            choice=model.router.choose(query),
            speculative=request.speculative and self.serving.has_settled(version, self.config.precompute.settle_s),
            sizes=model.info.sizes,
        )

    def _body(self, question: RankQuestion, flow: Flow, ranked: RankedList, received_s: float) -> dict[str, Any]:
        reasons = dict(flow.marks.reasons)
        if ranked.history_degraded:
            reasons.setdefault("sequence", ranked.history_degraded)
        elif ranked.cold_start:
            reasons.setdefault("sequence", "the user state did not arrive")
        for shard in ranked.missing_shards:
            reasons.setdefault(f"embedding:{shard}", "its rows did not arrive")
        candidates = candidate_rows(question.ids, ranked, self.serving.info.objectives)
        ended_s = self.clock.monotonic_s()
        return {
            "request_id": question.fields.request_id or flow.job.request_id,
            "user_id": question.fields.user_id,
            "weights_version": ranked.stamp.version,
            "tier": flow.tier,
            "tier_reason": flow.job.choice.reason,
            "candidates": candidates,
            "num_candidates": flow.job.num_candidates,
            "history_length": ranked.history_length,
            "degraded": list(reasons),
            "reasons": reasons,
            "num_oov": ranked.num_oov,
            "stages": waterfall(flow, ranked, received_s, ended_s),
            "total_ms": round((ended_s - received_s) * 1e3, 3),
        }

    def _missing(self, deployments: list[DeploymentStatus]) -> list[str]:
        live = {each.name for each in deployments if any(replica.state == "ready" for replica in each.replicas)}
        missing = [name for name in NEEDED if name not in live]
        tiers = [f"ranking:{tier.name}" for tier in self.config.tiers]
        return missing if live.intersection(tiers) else [*missing, *tiers]


def _nothing_else(version: str) -> FrontModel:
    raise WeightsError(f"this ingress has one version, is asked for {version}", version=version, file="")
