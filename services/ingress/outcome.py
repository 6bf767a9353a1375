"""What the router learns of a request that has ended."""

from __future__ import annotations

from services.ingress.flow import Flow
from services.ingress.job import DEADLINE, RankJob
from services.ingress.routing import Served
from shared.schema.ranking import RankedList


def served(flow: Flow, ranked: RankedList) -> Served:
    """Return what an answer says: which tier, what it cost, and what is known of the user.

    The signals of a replaced state say nothing of the user, and are left out, as are those of one who was forgotten.
    """
    is_known = not (ranked.cold_start or ranked.history_degraded or flow.is_forgotten)
    return Served(
        tier=flow.tier,
        num_candidates=flow.job.num_candidates,
        rank_ms=ranked.stamp.compute_ms,
        busy_ms=ranked.stamp.compute_ms + sum(stamp.compute_ms for stamp in ranked.upstream),
        missed=DEADLINE in flow.marks.reasons and flow.job.choice.is_open,
        user=flow.job.user,
        as_of_s=flow.job.as_of_s,
        signals=ranked.signals if is_known else None,
    )


def unserved(job: RankJob, *, missed: bool) -> Served:
    """Return what a request without an answer says.

    Args:
        job: The request.
        missed: Whether it is the deadline that it failed by.
    """
    return Served("", job.num_candidates, 0.0, 0.0, missed and job.choice.is_open)
