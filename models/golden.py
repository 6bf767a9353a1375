"""The golden request: stored beside the weights, answered again by each station before it says that it is ready.

It catches weights that load but do not compute what they computed when they were published: another architecture,
a broken kernel, a table on the wrong shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from models.config import RankerConfig
from models.embedding.plan import ShardPlan
from models.features import FeatureExtractor
from models.oracle import Oracle, compare, tolerance
from models.source import MemorySource, Tensors, WeightSource, tensor
from models.stations import CandidateRanker, RequestEncoder, TableShard
from shared.errors import WeightsError
from shared.hashing import EntityId
from shared.schema.embeddings import EmbeddingRows
from shared.schema.features import FeatureBatch
from shared.schema.speculative import HitLevel, SpeculativeEmbeddings
from shared.schema.stamp import Stamp
from shared.schema.user import UserHistory

GROUP = "golden"
DOCUMENT = "golden"

_PLANNED = 8.0
_STATE = "state."
_ROWS = "rows."
_UNIQUE = "features.unique."


@dataclass(frozen=True, slots=True)
class GoldenRequest:
    """The inputs.

    Args:
        user: Raw user id.
        candidates: Raw candidate ids, some of them unknown.
        surface: Surface name.
        as_of_s: Request time.
        history: Events and profile.
    """

    user: EntityId
    candidates: list[EntityId]
    surface: str
    as_of_s: int
    history: UserHistory

    def document(self) -> dict[str, Any]:
        """Return what is stored as JSON; the events are stored as tensors."""
        return {
            "user": self.user,
            "candidates": self.candidates,
            "surface": self.surface,
            "as_of_s": self.as_of_s,
            "num_total": self.history.num_total,
            "profile": self.history.profile,
        }


class Golden:
    """A golden request with the answers of every station.

    Args:
        request: The inputs.
        expected: Answers by name.
        config: The ranker's configuration.
        version: Weights version, for messages.
        is_current: The answers belong to the weights. False: the weights were changed since, without new answers; then
            stations are only asked to answer, with finite numbers.
    """

    def __init__(
        self, request: GoldenRequest, expected: Tensors, config: RankerConfig, version: str, *, is_current: bool = True
    ) -> None:
        self.request = request
        self._expected = expected
        self._config = config
        self._version = version
        self._is_current = is_current

    @classmethod
    def from_weights(cls, source: WeightSource, *, is_current: bool = True) -> Self:
        """Read the golden request of a weights version.

        Raises:
            WeightsError: it has none.
        """
        document = source.json(DOCUMENT)
        history = UserHistory(
            item_keys=tensor(source, GROUP, "history.item_keys", np.int64),
            weights=tensor(source, GROUP, "history.weights", np.float32),
            timestamps_s=tensor(source, GROUP, "history.timestamps_s", np.int64),
            num_total=document["num_total"],
            profile=document["profile"],
        )
        request = GoldenRequest(
            document["user"], document["candidates"], document["surface"], document["as_of_s"], history
        )
        config = RankerConfig.model_validate(source.json("model"))
        return cls(request, source.tensors(GROUP), config, source.version, is_current=is_current)

    def check_extractor(self, extractor: FeatureExtractor) -> None:
        """Check the part of preprocess.

        Raises:
            WeightsError: an answer differs.
        """
        for name, value in _feature_tensors(self._features(extractor)).items():
            self._equal(name, value)

    def check_shard(self, shard: TableShard, extractor: FeatureExtractor) -> None:
        """Check the part of one embedding shard.

        Raises:
            WeightsError: a row differs.
        """
        self.check_rows(shard.lookup(self._features(extractor)), shard.plan, shard.shard)

    def row_batch(self) -> FeatureBatch:
        """Return the distinct rows of the request as a shard is asked for them, without a vocabulary's help."""
        unique = {name.removeprefix(_UNIQUE): rows for name, rows in self._expected.items() if name.startswith(_UNIQUE)}
        nothing = np.zeros(0, np.int64)
        return FeatureBatch(_stamp(self._version), nothing, nothing, unique, {}, np.zeros((0, 0), np.float32), {})

    def check_rows(self, given: Tensors, plan: ShardPlan, shard: int) -> None:
        """Check what a shard gives of ``row_batch``.

        Args:
            given: table -> its rows.
            plan: Which rows are whose.
            shard: The shard.

        Raises:
            WeightsError: a row differs.
        """
        for table, rows in given.items():
            owned = plan.owned(table, shard, self._expected[f"{_UNIQUE}{table}"])
            first, last = plan.columns(table, shard)
            if not np.array_equal(rows, self._expected[f"{_ROWS}{table}"][owned, first:last]):
                raise self._differs(f"{_ROWS}{table} on shard {shard}", "rows differ")

    def check_encoder(self, encoder: RequestEncoder) -> None:
        """Check the part of the sequence station.

        Raises:
            WeightsError: a tensor is off.
        """
        request = self.request
        for name, value in encoder.encode(request.history, request.user, request.surface, request.as_of_s).items():
            self._close(f"{_STATE}{name}", value, encoder.execution.precision)

    def check_ranker(self, ranker: CandidateRanker, extractor: FeatureExtractor) -> None:
        """Check the part of a ranking tier, both passes, and of the foundation workers.

        A ranker in low precision may be off by as much as its plan says and some more: the embeddings, which no sigmoid
        damps, by about ``_PLANNED`` times what the scores are.

        Raises:
            WeightsError: a score or an embedding is off.
        """
        features = self._features(extractor)
        state = {name.removeprefix(_STATE): value for name, value in self._expected.items() if name.startswith(_STATE)}
        rows = [EmbeddingRows(features.stamp, 0, self._rows())]
        for name, value in _ranker_tensors(self._config, ranker, features, state, rows, self._speculative()).items():
            self._close(name, value, ranker.execution.precision, _PLANNED * ranker.score_error)

    def _features(self, extractor: FeatureExtractor) -> FeatureBatch:
        return extractor.extract_ids(self.request.candidates).stamped(_stamp(self._version))

    def _rows(self) -> dict[str, npt.NDArray[np.float32]]:
        return {name.removeprefix(_ROWS): value for name, value in self._expected.items() if name.startswith(_ROWS)}

    def _speculative(self) -> SpeculativeEmbeddings:
        return SpeculativeEmbeddings(
            _stamp(self._version), self._expected["speculative.vectors"], self._expected["speculative.levels"]
        )

    def _equal(self, name: str, value: npt.NDArray[Any]) -> None:
        if not np.array_equal(value, self._expected[name]):
            raise self._differs(name, "values differ")

    def _close(self, name: str, value: npt.NDArray[Any], precision: str, planned: float = 0.0) -> None:
        expected = self._expected[name]
        if value.shape != expected.shape:
            raise self._differs(name, f"shape is {value.shape}, must be {expected.shape}")
        if not self._is_current:
            if not bool(np.isfinite(value).all()):
                raise self._differs(name, "is not finite")
            return
        scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
        error = float(np.abs(value - expected).max(initial=0.0))
        allowed = tolerance(self._config, precision) * scale + planned
        if not error <= allowed:
            raise self._differs(name, f"off by {error:.3g}, allowed is {allowed:.3g}")

    def _differs(self, name: str, reason: str) -> WeightsError:
        return WeightsError(
            f"weights {self._version} do not answer the golden request: {name}: {reason}",
            version=self._version,
            file=GROUP,
        )


def add_golden(source: MemorySource, request: GoldenRequest) -> None:
    """Answer a golden request, check the answer against the oracle, and add both to a source.

    Args:
        source: Weights without a golden request; gets the group and the document.
        request: The inputs.

    Raises:
        WeightsError: stations and oracle disagree.
    """
    config = RankerConfig.model_validate(source.json("model"))
    extractor, ranker = FeatureExtractor.from_weights(source), CandidateRanker(source)
    features = extractor.extract_ids(request.candidates).stamped(_stamp(source.version))
    rows = [EmbeddingRows(features.stamp, 0, TableShard(source, 0, 1).lookup(features))]
    state = RequestEncoder(source).encode(request.history, request.user, request.surface, request.as_of_s)
    speculative = _made_up_speculative(config, features)
    answers = _ranker_tensors(config, ranker, features, state, rows, speculative)
    _check_oracle(source, request, ranker, features, state, rows, speculative)
    source.groups[GROUP] = {
        "history.item_keys": request.history.item_keys,
        "history.weights": request.history.weights,
        "history.timestamps_s": request.history.timestamps_s,
        "speculative.vectors": speculative.vectors,
        "speculative.levels": speculative.levels,
        **_feature_tensors(features),
        **{f"{_ROWS}{name}": value for name, value in rows[0].rows.items()},
        **{f"{_STATE}{name}": value for name, value in state.items()},
        **answers,
    }
    source.documents[DOCUMENT] = request.document()


def _stamp(version: str) -> Stamp:
    return Stamp("golden", version, "golden", "", 0.0)


def _feature_tensors(features: FeatureBatch) -> Tensors:
    tensors: Tensors = {"features.group_keys": features.group_keys, "features.dense": features.dense}
    for name, rows in features.unique_rows.items():
        tensors[f"features.unique.{name}"] = rows
    for name, ids in features.features.items():
        tensors[f"features.{name}.values"], tensors[f"features.{name}.offsets"] = ids.values, ids.offsets
    return tensors


def _made_up_speculative(config: RankerConfig, features: FeatureBatch) -> SpeculativeEmbeddings:
    """Return embeddings of every level, values that no chance gives."""
    levels = np.array(
        [(HitLevel.NONE, HitLevel.USER_AGGREGATE, HitLevel.EXACT)[i % 3] for i in range(features.num_candidates)]
    )
    grid = np.arange(features.num_candidates * config.speculative_width, dtype=np.float32)
    vectors = np.sin(grid).reshape(features.num_candidates, -1) * (levels != int(HitLevel.NONE))[:, None]
    return SpeculativeEmbeddings(features.stamp, vectors.astype(np.float32), levels.astype(np.int8))


def _ranker_tensors(
    config: RankerConfig,
    ranker: CandidateRanker,
    features: FeatureBatch,
    state: dict[str, npt.NDArray[np.float32]],
    rows: Sequence[EmbeddingRows],
    speculative: SpeculativeEmbeddings,
) -> Tensors:
    """Return every tier's scores in candidate order, and the embeddings."""
    tensors: Tensors = {}
    for tier in config.tiers:
        ranking = ranker.rank(features, state, rows, speculative, tier, features.num_candidates)
        scores = np.empty_like(ranking.scores)
        scores[ranking.order] = ranking.scores
        tensors[f"scores.{tier}"] = scores
    positions = np.arange(features.num_candidates, dtype=np.int32)
    tensors["embedding"] = ranker.embed(features, positions, state, rows)
    return tensors


def _check_oracle(
    source: MemorySource,
    request: GoldenRequest,
    ranker: CandidateRanker,
    features: FeatureBatch,
    state: dict[str, npt.NDArray[np.float32]],
    rows: Sequence[EmbeddingRows],
    speculative: SpeculativeEmbeddings,
) -> None:
    oracle = Oracle.from_weights(source)
    limit = features.num_candidates
    for tier in oracle.config.tiers:
        answer = oracle.rank(
            request.user,
            request.candidates,
            request.history,
            request.surface,
            request.as_of_s,
            tier,
            limit,
            speculative.vectors,
            speculative.levels,
        )
        ranking = ranker.rank(features, state, rows, speculative, tier, limit)
        if differences := compare(answer, ranking, tolerance(oracle.config)):
            raise WeightsError(
                f"stations and oracle disagree on the golden request, tier {tier}: {differences[0]}",
                version=source.version,
                file=GROUP,
            )
