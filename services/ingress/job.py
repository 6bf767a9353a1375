"""What the parts of the ingress tell one another about a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from models.payload import PayloadSizes
from services.ingress.routing import TierChoice
from shared.breaker import Breakers
from shared.deadline import Deadline
from shared.handle import Handle
from shared.hashing import EntityId
from shared.schema.speculative import SpeculativeTask

DEADLINE = "deadline"
"""Mark of an answer that the request's own deadline made smaller."""


@dataclass(frozen=True, slots=True)
class Stations:
    """Handles of every station that the ingress calls.

    Args:
        preprocess: Features.
        sequence: User states and the user log.
        embedding: One handle a shard, in order.
        speculative: The speculative-embedding cache.
        ranking: One handle a tier, by tier name.
        foundation: Precomputation; None where a mesh has none.
        breakers: What is known of silent replicas, by station; empty where calls have no replica.
    """

    preprocess: Handle
    sequence: Handle
    embedding: tuple[Handle, ...]
    speculative: Handle
    ranking: dict[str, Handle]
    foundation: Handle | None = None
    breakers: Mapping[str, Breakers] = field(default_factory=dict)

    def all(self) -> tuple[Handle, ...]:
        """Return every handle, in the order of a request."""
        last = () if self.foundation is None else (self.foundation,)
        return (self.preprocess, self.sequence, *self.embedding, self.speculative, *self.ranking.values(), *last)


@dataclass(frozen=True, slots=True)
class RankJob:
    """One admitted request.

    Args:
        request_id: Unique in the mesh; made by the ingress, so that two requests can never be taken for one another.
        version: Weights version of the whole request.
        user: Canonical user id.
        surface: Surface name.
        block: The candidates, distinct, as a block of ``shared.wire``.
        num_candidates: C.
        limit: Candidates in the answer.
        as_of_s: Request time, seconds since the epoch.
        deadline: When the answer must be out.
        choice: Ranking tier and its fall-backs.
        speculative: Whether the speculative cache is read and filled.
        sizes: Of the model's messages.
    """

    request_id: str
    version: str
    user: EntityId
    surface: str
    block: bytes
    num_candidates: int
    limit: int
    as_of_s: int
    deadline: Deadline
    choice: TierChoice
    speculative: bool
    sizes: PayloadSizes

    @property
    def whole_bytes(self) -> int:
        """About how large the largest message of this request is: one size for all calls, so that they travel alike."""
        return max(self.num_candidates * self.sizes.candidate_bytes, self.sizes.state_bytes)

    def speculative_task(self, budget_ms: float) -> SpeculativeTask:
        """Return the task that names this request's user and time to the speculative stations."""
        return SpeculativeTask(self.request_id, self.version, self.user, self.as_of_s, budget_ms)


@dataclass(slots=True)
class Marks:
    """What an answer was made without, and why."""

    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, station: str, reason: str) -> None:
        """Mark a station; the first reason stays."""
        self.reasons.setdefault(station, reason)

    def add_deadline(self, deadline: Deadline) -> None:
        """Mark the answer as cut short by the request's own deadline."""
        self.add(DEADLINE, f"the budget of {deadline.budget_ms:.0f} ms did not suffice for every stage")

    def missing(self) -> tuple[str, ...]:
        """Return the marked stations that are inputs of ranking."""
        return tuple(name for name in self.reasons if name != DEADLINE and not name.startswith("ranking:"))
