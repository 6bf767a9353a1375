"""One answer of the mesh against the oracle: what is wrong, how far the scores are off, how many equal ones swapped."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from typing import Literal

import numpy as np
import numpy.typing as npt

from benchmarks.cases import Case
from benchmarks.checks import echo_faults, number_faults, stage_fault
from benchmarks.client import Answer
from models.config import OBJECTIVES
from models.execution_config import Precision
from models.oracle import Oracle, OracleAnswer, compare, tolerance
from models.source import WeightSource
from services.sequence.service import STALE_HISTORY
from shared.schema.api import RankRequest, RankResponse
from shared.schema.speculative import HitLevel
from shared.schema.user import UserHistory

_LEVELS = {level.label: int(level) for level in HitLevel}


@dataclass(frozen=True, slots=True)
class SpeculativeInputs:
    """What the cache gave a request.

    Args:
        vectors: float32 [C, E].
        levels: int8 [C], ``HitLevel``.
    """

    vectors: npt.NDArray[np.float32]
    levels: npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one answer is worth.

    Args:
        name: Case and cell, for messages.
        faults: What is wrong; empty when nothing is.
        degraded: Whether the answer is marked. It must then be what the oracle says without some of the marked parts.
        max_abs_error: Largest distance of a score from the oracle's.
        num_ties: Ranks at which another candidate of equal value stands.
        stages_add_up: Whether the critical stages add up to the total.
    """

    name: str
    faults: tuple[str, ...]
    degraded: bool = False
    max_abs_error: float = 0.0
    num_ties: int = 0
    stages_add_up: bool = True


@dataclass(frozen=True, slots=True)
class Loss:
    """One way in which an answer may have been made without some parts.

    Args:
        shards: Embedding shards whose rows are the out-of-vocabulary row.
        user: ``whole``; ``empty``: no history and no profile, as the user log is out of reach; ``cold``: the state of
            an unknown user.
        no_speculative: No speculative embedding was used.
    """

    shards: tuple[int, ...] = ()
    user: Literal["whole", "empty", "cold"] = "whole"
    no_speculative: bool = False

    def history(self, case: Case) -> UserHistory:
        """Return the history that was used."""
        return case.history if self.user == "whole" else UserHistory.empty()


def losses(response: RankResponse) -> list[Loss]:
    """Return what an answer may have been made without, by its own marks, the greatest loss first.

    A mark says that a part was given up, not that the accepted answer lacks it: a ranking call that was asked before
    may have had it. So every subset of the marked parts counts.
    """
    marks = response.degraded
    marked = [int(mark.partition(":")[2]) for mark in marks if mark.startswith("embedding:")]
    shards = [part for size in range(len(marked), -1, -1) for part in combinations(marked, size)]
    users: list[Literal["whole", "empty", "cold"]] = ["cold", "empty", "whole"] if "sequence" in marks else ["whole"]
    speculative = [True, False] if "speculative" in marks else [False]
    return [Loss(*parts) for parts in product(shards, users, speculative)]


@dataclass(frozen=True, slots=True)
class RankedPositions:
    """An HTTP answer in the form that ``models.oracle.compare`` takes; see ``models.oracle.Ranked``."""

    order: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]
    full_pass: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, request: RankRequest, response: RankResponse) -> RankedPositions:
        """Translate ids back into positions.

        Raises:
            KeyError: an id was not sent in this form.
        """
        positions = {(type(id_), id_): position for position, id_ in enumerate(request.candidates)}
        rows = response.candidates
        return cls(
            order=np.array([positions[type(row.id), row.id] for row in rows], np.int32),
            scores=np.array([[row.scores[name] for name in OBJECTIVES] for row in rows], np.float32),
            values=np.array([row.value for row in rows], np.float32),
            full_pass=np.array([row.scored_by == "full" for row in rows], np.bool_),
        )


class Judge:
    """Compares answers with the oracle.

    Args:
        source: The weights that the mesh must rank with.
        default_limit: Returned candidates when a request names no limit.
        num_shards: Embedding shards of the mesh.
        precision: Dtype in which the mesh executes the network: how far a score may be off follows from it.
    """

    def __init__(
        self, source: WeightSource, default_limit: int, num_shards: int, precision: Precision = "float32"
    ) -> None:
        self.oracle = Oracle.from_weights(source)
        self._version = source.version
        self._default_limit = default_limit
        self._num_shards = num_shards
        self._tolerance = tolerance(self.oracle.config, precision)

    @property
    def tolerance(self) -> float:
        """How far a score may be off."""
        return self._tolerance

    def judge(
        self, name: str, case: Case, request: RankRequest, answer: Answer, speculative: SpeculativeInputs | None = None
    ) -> Judgement:
        """Say what is wrong with the answer to a case.

        Args:
            name: For messages.
            case: The case.
            request: What was sent.
            answer: What came back.
            speculative: What the cache must have given; None: nothing.
        """
        response = answer.body
        if response is None:
            return Judgement(name, (f"{answer.outcome} {answer.status}: {answer.detail}",))
        faults = number_faults(response)
        if response.weights_version != self._version:
            faults.append(f"weights {response.weights_version}, must be {self._version}")
        if faults:
            return Judgement(name, tuple(faults), bool(response.degraded))
        # An older history stands in, and no one outside knows which: everything but scores and order is checked.
        if response.reasons.get("sequence") == STALE_HISTORY:
            echo = echo_faults(request, response, self._default_limit, None)
            return Judgement(name, tuple(echo), degraded=True)
        judgements = (self._under(loss, name, case, request, response, speculative) for loss in losses(response))
        first = next(judgements)
        return first if not first.faults else next((each for each in judgements if not each.faults), first)

    def _under(
        self,
        loss: Loss,
        name: str,
        case: Case,
        request: RankRequest,
        response: RankResponse,
        speculative: SpeculativeInputs | None,
    ) -> Judgement:
        """Judge an answer as one that was made without exactly some parts."""
        degraded = bool(response.degraded)
        if faults := echo_faults(request, response, self._default_limit, len(loss.history(case))):
            return Judgement(name, tuple(faults), degraded)
        speculative = None if loss.no_speculative else speculative
        expected = self.oracle.rank(
            case.user,
            case.candidates,
            loss.history(case),
            case.surface,
            case.as_of_s,
            response.tier,
            request.limit or self._default_limit,
            None if speculative is None else speculative.vectors,
            None if speculative is None else speculative.levels,
            missing_shards=loss.shards,
            num_shards=self._num_shards,
            cold_start=loss.user == "cold",
        )
        ranked = RankedPositions.of(request, response)
        faults = compare(expected, ranked, self._tolerance)
        faults += self._value_faults(expected, ranked)
        faults += _level_faults(expected, ranked, response, speculative)
        return Judgement(
            name,
            tuple(faults),
            degraded,
            max_abs_error=_max_abs_error(expected, ranked),
            num_ties=int((ranked.order != expected.order).sum()),
            stages_add_up=stage_fault(response) is None,
        )

    def _value_faults(self, expected: OracleAnswer, ranked: RankedPositions) -> list[str]:
        allowed = self._tolerance * sum(self.oracle.config.objective_weights.values())
        full = ranked.full_pass
        values = np.where(full, expected.full_values[ranked.order], expected.first_values[ranked.order])
        return [
            f"candidate {ranked.order[rank]} value {ranked.values[rank]!r}, must be {values[rank]!r}"
            for rank in np.flatnonzero(~(np.abs(ranked.values - values) <= allowed)).tolist()
        ]


def _max_abs_error(expected: OracleAnswer, ranked: RankedPositions) -> float:
    if not len(ranked.order):
        return 0.0
    full = ranked.full_pass[:, None]
    scores = np.where(full, expected.full_scores[ranked.order], expected.first_scores[ranked.order])
    return float(np.abs(ranked.scores.astype(np.float64) - scores).max())


def _level_faults(
    expected: OracleAnswer, ranked: RankedPositions, response: RankResponse, speculative: SpeculativeInputs | None
) -> list[str]:
    """Return where the hit level is not the one that the cache must give; the first pass uses no embedding."""
    levels = np.zeros(len(expected.keys), np.int8) if speculative is None else speculative.levels
    faults = []
    for row, position, full in zip(response.candidates, ranked.order, ranked.full_pass, strict=True):
        wanted = int(levels[position]) if full else int(HitLevel.NONE)
        if _LEVELS[row.speculative] != wanted:
            faults.append(f"candidate {row.id!r} has level {row.speculative}, must have {HitLevel(wanted).label}")
    return faults
