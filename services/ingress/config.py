"""Configuration of the ingress."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator, model_validator

from services.ingress.hedge import HedgeConfig
from shared.breaker import BreakerConfig
from shared.config import Config
from shared.schema.api import ApiLimits

TierName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]


class TierConfig(Config):
    """What the ingress knows about one ranking tier.

    Args:
        name: Tier; its deployment is ``ranking:<name>``.
        cost_ms: 99th percentile of a whole request on this tier, milliseconds; a request with less budget goes lower.
        rank_ms: 99th percentile of the ranking call alone, milliseconds; kept back for it while inputs are gathered.
        timeout_ms: Longest wait for one ranking call before the next tier is asked as well, milliseconds.
    """

    name: TierName
    cost_ms: float = Field(gt=0)
    rank_ms: float = Field(gt=0)
    timeout_ms: float = Field(gt=0)


class StageBudgets(Config):
    """Longest wait for each stage, milliseconds; the request's deadline may end it earlier.

    The defaults are far above the usual times (single milliseconds): they end a hang, they do not shape latency.

    Args:
        preprocess_ms: One attempt; a second replica is asked after it.
        sequence_ms: From the start of the request.
        embedding_ms: A shard, from the moment the features are ready.
        speculative_ms: From the moment the features are ready.
        render_ms: Kept back for building the answer.
        events_ms: The whole of one append.
    """

    preprocess_ms: float = Field(600, gt=0)
    sequence_ms: float = Field(500, gt=0)
    embedding_ms: float = Field(400, gt=0)
    speculative_ms: float = Field(400, gt=0)
    render_ms: float = Field(3, ge=0)
    events_ms: float = Field(5_000, gt=0)


class PrecomputeConfig(Config):
    """Speculative embeddings that are computed after an answer is out.

    Args:
        enabled: Whether answers are followed by precomputation.
        settle_s: How long a state of the weights must have served before embeddings are made, and looked for, with it:
            they end with their state, so those of one that is soon replaced would be work for nobody. 0: at once. The
            state with which a mesh or a replica starts is taken as settled.
        in_flight_max: Precomputations at once; more are dropped and counted.
        candidates_max: Head candidates of one answer that are precomputed.
        timeout_ms: Longest time of one, milliseconds.
    """

    enabled: bool = True
    settle_s: float = Field(10.0, ge=0, le=86_400)
    in_flight_max: int = Field(4, ge=1)
    candidates_max: int = Field(128, ge=1, le=10_000)
    timeout_ms: float = Field(2_000, gt=0)


class ExplorationConfig(Config):
    """Explored answers that are kept for their outcomes; how many are explored says ``RouterConfig.explore_share``.

    Args:
        in_flight_max: Answers that are handed to the store at once in one replica; more are dropped and counted.
        candidates_max: Candidates of one answer that are kept, its head.
        timeout_ms: Longest time of one, milliseconds.
    """

    in_flight_max: int = Field(4, ge=1)
    candidates_max: int = Field(64, ge=1, le=10_000)
    timeout_ms: float = Field(1_000, gt=0)


class RouterConfig(Config):
    """How requests are routed to tiers by what they are worth; see ``services.ingress.routing``.

    Args:
        enabled: Whether a gain model among the weights is used; without it every request takes the best tier that its
            budget and the load allow.
        explore_share: Share of requests that are served by the best tier whatever they are worth.
        remembered_users_max: Users whose signals one ingress replica remembers; about 300 bytes each.
        cost_candidates: Candidates that the tiers' ``rank_ms`` count for until calls are measured.
        cores: Cores that the stations have for the requests of one ingress replica.
        utilisation_target: Share of them that computing may take before quality is given up.
        occupancy_target: Requests in flight over ``light_above_in_flight`` before quality is given up.
        miss_share_max: Share of requests that may miss their deadline before quality is given up.
        period_s: Time between two steps of the price, seconds.
        step: Largest step of the mean share of the best tier's cost.
    """

    enabled: bool = True
    explore_share: float = Field(0.01, ge=0, le=1)
    remembered_users_max: int = Field(50_000, ge=1, le=10_000_000)
    cost_candidates: int = Field(500, ge=1)
    cores: float = Field(1.0, gt=0)
    utilisation_target: float = Field(0.7, gt=0, le=1)
    occupancy_target: float = Field(0.5, gt=0, le=1)
    miss_share_max: float = Field(0.01, ge=0, le=1)
    period_s: float = Field(1.0, gt=0)
    step: float = Field(0.1, gt=0, le=1)


class AdmissionConfig(Config):
    """Which rank requests are let in; see ``services.ingress.admission``.

    Args:
        work_start: Work at once in one replica before its capacity is measured; a request is 1 and more by its
            candidates. Little: what comes to a mesh that has just started meets cold stations.
        in_flight_min: Rank requests at once in one replica that are no queue: what it takes to keep every station and
            core at work. For them only the budget counts.
        candidates_per_work: So many candidates cost as much again as a request without any. Measured on two cores:
            34, 39 and 56 ms for 20, 500 and 1,000 candidates.
        window_s: Busy time over which work is counted, seconds.
        num_windows: Windows, of which the median is the capacity.
        budget_share: Share of its budget that a request may be expected to take; the rest is for what is not expected.
        wait_ms_max: A larger budget counts as this one: in a queue of more seconds the stations' own limits
            (``StageBudgets``) fail what was let in, after the work, which is better refused before it.
        standing_ms_max: And as this one where the queue stands: a longer one answers no more requests, only later
            ones, and with inputs that were given up.
        standing_s: A queue stands when it was never below a quarter of what is allowed for so long. A stall, such as
            the death of a replica, is over sooner, and what waits for it meanwhile will be answered.
        contended_share: Share of what fits from which on each caller has its own share only.
        weights: Tenant or surface -> weight of its share; 1 for those not named. A tenant counts its own times the
            largest of its surfaces'.
        memory_s: How long what a caller wanted is kept for it after its last request, seconds.
        callers_max: Tenants that are told apart, and surfaces of one tenant.
    """

    work_start: float = Field(12, ge=1)
    in_flight_min: int = Field(6, ge=1)
    candidates_per_work: float = Field(1_500, gt=0)
    window_s: float = Field(0.5, gt=0)
    num_windows: int = Field(10, ge=1, le=1_000)
    budget_share: float = Field(0.8, gt=0, le=1)
    wait_ms_max: float = Field(2_000, gt=0)
    standing_ms_max: float = Field(500, gt=0)
    standing_s: float = Field(0.7, gt=0)
    contended_share: float = Field(0.5, ge=0, le=1)
    weights: dict[str, float] = Field(default_factory=dict)
    memory_s: float = Field(2.0, gt=0)
    callers_max: int = Field(256, ge=1)

    @field_validator("weights")
    @classmethod
    def _weights_are_positive(cls, weights: dict[str, float]) -> dict[str, float]:
        if bad := {name: weight for name, weight in weights.items() if not 0 < weight <= 1_000}:
            raise ValueError(f"weights must be above 0 and at most 1000, are {bad}")
        return weights


class FeedbackConfig(Config):
    """Labelled events that compare a version that is tried with the one that serves.

    Args:
        click_weight_min: Smallest weight of an event that counts as a click.
        in_flight_max: Events that are compared at once in one replica; more are let go.
        timeout_ms: Longest time of one prediction, milliseconds.
    """

    click_weight_min: float = 4.0
    in_flight_max: int = Field(2, ge=1)
    timeout_ms: float = Field(1_000, gt=0)


class IngressConfig(Config):
    """The ingress.

    Args:
        mesh: Name of this mesh, shown in status.
        limits: What a client may send. The smallest budget is about what the lowest tier needs: less can only end in
            504, so it is refused as the client's mistake.
        tiers: Ranking tiers, best first.
        budgets: Time limits of the stages.
        num_shards: Embedding shards S, deployments ``embedding:0`` .. ``embedding:S-1``.
        in_flight_max: Rank requests at once in one replica, whatever its measured capacity: a bound on memory.
        admission: Which of them are let in; the others are shed with 429.
        events_in_flight_max: Event appends at once in one replica; more are shed with 429.
        light_above_in_flight: Rank requests at once above which ``auto`` goes to the lowest tier; shedding quality
            first keeps answers coming under a burst.
        light_above_load: Load, as admission measures it, above which it does so too; at 1 a queue that stands is full.
        retry_after_s: What a shed client is told to wait at least, seconds.
        body_timeout_s: Longest time a client may take to send its body, seconds.
        precompute: Work after the answer.
        feedback: Labelled events while a version is tried.
        hedge: Second calls for slow look-ups.
        breaker: When a replica that answers nobody is left out.
        router: Choice of tiers by worth.
        exploration: What is kept of explored answers.
    """

    mesh: str = Field("rankmesh", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    limits: ApiLimits = ApiLimits(deadline_ms_min=50)
    tiers: tuple[TierConfig, ...] = Field(
        (
            TierConfig(name="full", cost_ms=120, rank_ms=60, timeout_ms=500),
            TierConfig(name="light", cost_ms=40, rank_ms=15, timeout_ms=500),
        ),
        min_length=1,
        max_length=8,
    )
    budgets: StageBudgets = StageBudgets()
    num_shards: int = Field(2, ge=1, le=64)
    in_flight_max: int = Field(128, ge=1)
    admission: AdmissionConfig = AdmissionConfig()
    events_in_flight_max: int = Field(32, ge=1)
    light_above_in_flight: int = Field(16, ge=1)
    light_above_load: float = Field(0.5, gt=0, le=1)
    retry_after_s: int = Field(1, ge=1)
    body_timeout_s: float = Field(10, gt=0)
    precompute: PrecomputeConfig = PrecomputeConfig()
    feedback: FeedbackConfig = FeedbackConfig()
    hedge: HedgeConfig = HedgeConfig()
    breaker: BreakerConfig = BreakerConfig()
    router: RouterConfig = RouterConfig()
    exploration: ExplorationConfig = ExplorationConfig()

    @model_validator(mode="after")
    def _tiers_are_distinct(self) -> IngressConfig:
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names) or "auto" in names:
            raise ValueError(f"tier names must be distinct and not 'auto', have {names}")
        return self

    def limit_ms(self, station: str) -> float:
        """Return the longest wait for a call of a station; ``station`` as in handles, e.g. ``embedding:1``."""
        kind = station.partition(":")[0]
        limits_ms = {
            "preprocess": self.budgets.preprocess_ms,
            "sequence": self.budgets.sequence_ms,
            "embedding": self.budgets.embedding_ms,
            "speculative": self.budgets.speculative_ms,
            "foundation": self.precompute.timeout_ms,
        }
        limits_ms |= {f"ranking:{tier.name}": tier.timeout_ms for tier in self.tiers}
        return limits_ms.get(station, limits_ms.get(kind, math.inf))
