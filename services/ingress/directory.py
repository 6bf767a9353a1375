"""Who is in the mesh: what ``GET /v1/status`` and ``/readyz`` answer, and where the ingress learns it."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

ReplicaState: TypeAlias = Literal["ready", "starting", "down"]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReplicaStatus(_Body):
    """One replica."""

    id: str
    state: ReplicaState
    pid: int | None = None
    version: str | None = Field(None, description="weights that it took up last, a version or version+delta")
    held: list[str] = Field(default_factory=list, description="weights that it answers for")
    refused: dict[str, str] = Field(default_factory=dict, description="weights that it does not take up, and why")
    loading: list[str] = Field(default_factory=list, description="versions that it reads now")
    counters: dict[str, int] = Field(default_factory=dict, description="what it counted since it started")
    execution: str | None = Field(None, description="kernels and dtype, and why; null for stations without a network")


class DeploymentStatus(_Body):
    """One deployment and its replicas."""

    name: str
    target: int = Field(ge=0, description="replicas wanted")
    replicas: list[ReplicaStatus]
    reason: str = Field("", description="why the last replica of it that failed to start did; empty once all run")


class StoreStatus(_Body):
    """The Redis-protocol store behind user log and speculative cache."""

    kind: str = Field(description="embedded, or redis for one that is not ours")
    url: str = Field(description="without credentials")
    healthy: bool
    pid: int | None = None


RolloutPhase: TypeAlias = Literal["none", "loading", "canary", "served", "refused", "rolled_back"]


class RolloutBody(_Body):
    """The last roll-out of a weights version over the mesh."""

    id: str = Field("", description="of the request for it; empty before the first")
    phase: RolloutPhase = Field("none", description="how far it is, or how it ended")
    version: str = Field("", description="version that is, or was to be, rolled out")
    previous: str | None = Field(None, description="version that a roll-back returns to")
    share: float = Field(0.0, description="share of the users that get it while it is a canary")
    reason: str = Field("", description="why it was refused or taken back, or what it waits for")
    since_s: float = Field(0.0, description="when it came into this phase, seconds since the epoch")
    figures: dict[str, float] = Field(default_factory=dict, description="what was measured of the canary")


class UpdatesBody(_Body):
    """How the deltas of the served version are followed."""

    newest: int = Field(0, description="number of the newest delta in the log")
    served: int = Field(0, description="number of the last delta that answers are made with")
    reason: str = Field("", description="why a newer one is not served; empty when nothing is wrong")


class StatusBody(_Body):
    """The whole mesh, from one ingress replica."""

    name: str
    ready: bool
    version: str
    replica: str = Field(description="ingress replica that answers")
    counters: dict[str, int] = Field(description="what that replica counted since it started")
    silent: dict[str, list[str]] = Field(
        default_factory=dict,
        description="station -> replicas that have not answered that one of late, and are left out",
    )
    store: StoreStatus
    deployments: list[DeploymentStatus]
    rollout: RolloutBody = RolloutBody()
    updates: UpdatesBody = UpdatesBody()


class ModelBody(_Body):
    """One model that this mesh can rank with."""

    version: str
    current: bool
    objectives: list[str]
    objective_weights: dict[str, float]
    tiers: list[str] = Field(description="ranking tiers, best first")
    history_length: int
    speculative_width: int
    metrics: dict[str, float | int | str | None] = Field(description="offline metrics, published with the weights")
    execution: dict[str, str] = Field(
        default_factory=dict, description="station -> kernels and dtype of its first live replica, and why"
    )


class ModelsBody(_Body):
    """The models of a mesh."""

    models: list[ModelBody]


class HealthBody(_Body):
    """The process answers."""

    status: Literal["ok"] = "ok"


class ReadyBody(_Body):
    """The mesh answers rank requests."""

    status: Literal["ready"] = "ready"
    version: str


class Directory(Protocol):
    """Knows the deployments and the store; answers from memory or within a fraction of a second, and never raises."""

    async def deployments(self) -> list[DeploymentStatus]:
        """Return every deployment of the mesh, the ingress included."""
        ...

    async def store(self) -> StoreStatus:
        """Return the state of the store."""
        ...
