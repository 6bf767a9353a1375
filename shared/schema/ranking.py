"""What a ranking tier is asked and answers (ingress <-> ranking); small on purpose, it passes through the ingress."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.schema.stamp import Stamp


@dataclass(frozen=True, slots=True)
class RankTask:
    """Control message to a ranking tier.

    Args:
        request_id: The request.
        version: Weights version that every input must carry.
        limit: K, how many candidates the answer may hold.
        remaining_ms: Budget left when the call was made.
        missing: Stations whose result the ingress gave up on, e.g. ``("embedding:1", "sequence")``.
        explores: Whether the answer is to say what every exit said of the head.
    """

    request_id: str
    version: str
    limit: int
    remaining_ms: float
    missing: tuple[str, ...] = ()
    explores: bool = False


@dataclass(frozen=True, slots=True)
class RankedList:
    """The ordered head of a request.

    Order: candidates of the full pass by combined value, then those of the first pass; ties by smaller id key.

    Args:
        stamp: Provenance.
        order: int32 [K], positions in the request's candidate list, best first.
        scores: float32 [K, O], probability per objective.
        values: float32 [K], combined value that the order follows within a pass.
        full_pass: bool [K], whether the tier's full pass scored the candidate.
        levels: int8 [K], ``HitLevel`` of the speculative embedding that was used.
        missing_shards: Embedding shards replaced by the out-of-vocabulary row.
        cold_start: Whether the learned cold-start state stood in for the user state.
        history_degraded: ``UserState.degraded`` of the state that was used.
        history_length: Events in the user state.
        upstream: Stamps of the inputs that were used, for versions and compute times.
        first_pass_ms: Milliseconds of the first pass over all candidates, top-k included.
        full_pass_ms: Milliseconds of the full pass over the head, 0 without one.
        num_oov: feature -> ids served by the out-of-vocabulary row.
        signals: float32 [K], request-only signals of the user state (``models.routing``); None without a state.
        exits: float32 [K, D, O], logits of every depth before calibration, NaN where the full pass did not come; None:
            not asked for.
    """

    stamp: Stamp
    order: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]
    full_pass: npt.NDArray[np.bool_]
    levels: npt.NDArray[np.int8]
    missing_shards: tuple[int, ...]
    cold_start: bool
    history_degraded: str
    history_length: int
    upstream: tuple[Stamp, ...]
    first_pass_ms: float
    full_pass_ms: float
    num_oov: dict[str, int]
    signals: npt.NDArray[np.float32] | None = None
    exits: npt.NDArray[np.float32] | None = None
