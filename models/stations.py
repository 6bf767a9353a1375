"""The numpy-in, numpy-out halves of the ranker that services run: table shard, request encoder, candidate ranker.

``FeatureExtractor``, the fourth, needs no torch and lives in ``models.features``. Each is built from one version of the
weights and holds no other state. Arrays of other processes may be read-only; they are wrapped, never written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.segmented_topk import segmented_topk
from models.arrays import ROWS_MULTIPLE, tensor_view
from models.calibration import Calibration
from models.config import OBJECTIVES, RankerConfig
from models.embedding.assemble import Assembler
from models.embedding.serving_rows import hot_rows
from models.embedding.table_shard import TableShard as TableShard
from models.embedding.tables import table_weight
from models.embedding.vocabulary import OOV_ROW, Vocabulary
from models.execution import DTYPES, FusedNetwork, executed
from models.execution_config import REFERENCE, Execution, Precision
from models.heads import combined_value, probabilities
from models.history import EncodedHistory, EventColumns
from models.inputs import NUM_SURPRISES, RequestInputs, request_inputs
from models.layers.layout import CandidateLayout
from models.network import RankingNetwork
from models.passes import WHOLE, Course, Pass, Steps, alone, together
from models.quantize.measure import with_formats
from models.quantize.plan import PrecisionPlan, shapes_digest
from models.request_tables import RequestTables, RowLookup, published_rows
from models.sequence_encoder import Ages, Events
from models.source import WeightSource
from shared.clock import Clock, SystemClock
from shared.errors import InvalidRequestError, RankMeshError, StageUnavailableError, WeightsError
from shared.hashing import EntityId, id_key
from shared.schema.embeddings import EmbeddingRows
from shared.schema.features import FeatureBatch
from shared.schema.speculative import HitLevel, SpeculativeEmbeddings
from shared.schema.user import UserHistory
from shared.weights.deltas import parse_stamp

StateArrays = dict[str, npt.NDArray[np.float32]]
DENSE_GROUP = "dense"
NETWORK_PREFIX = "network."

SIGNALS_NAME = "signals"
"""Among the tensors of a user state: the request-only signals that the ingress routes this user by, float32 [K]."""


class RequestEncoder:
    """The request-only path: history and profile -> user state.

    Args:
        source: The weights.
        execution: Kernels and dtype.
        lookup: Rows of the tables; None: as the weights were published.
    """

    def __init__(self, source: WeightSource, execution: Execution = REFERENCE, lookup: RowLookup | None = None) -> None:
        config = RankerConfig.model_validate(source.json("model"))
        self.execution = execution
        self._config = config
        self._network = executed(load_network(source, config), execution)
        used = dict.fromkeys(["item", *(feature.table for feature in config.request_features)])
        self._vocabularies = {name: Vocabulary.from_weights(source, name) for name in used}
        self._tables = RequestTables(source, config, self._vocabularies["item"])
        self._lookup = lookup or published_rows(source, config)

    @classmethod
    def from_weights(cls, source: WeightSource, execution: Execution = REFERENCE) -> Self:
        """Build from a weights version."""
        return cls(source, execution)

    def reading(self, lookup: RowLookup) -> RequestEncoder:
        """Return the same network over other rows: those of a state of weights that change while they serve."""
        other = copy(self)
        other._lookup = lookup
        return other

    @property
    def history_length(self) -> int:
        """Newest events L that count."""
        return self._config.history_length

    def encode(self, history: UserHistory, user: EntityId, surface: str, as_of_s: int) -> StateArrays:
        """Encode one request anew: see ``encode_from``."""
        return self.encode_from(None, history, user, surface, as_of_s).tensors

    def encode_from(
        self, known: EncodedHistory | None, history: UserHistory, user: EntityId, surface: str, as_of_s: int
    ) -> EncodedRequest:
        """Encode one request from what is known of its user.

        Args:
            known: The user's encoded history of any time, made by this encoder; None: nothing is known. Of no use where
                the request's features or the events are other ones; then all is encoded anew.
            history: Events before ``as_of_s``; the newest L of the model's history length count. The profile too.
            user: Raw user id.
            surface: Surface name.
            as_of_s: Request time, seconds since the epoch.
        """
        length = min(len(history), self._config.history_length)
        newest = slice(len(history) - length, len(history))
        inputs = request_inputs(
            feature_rows=self._feature_rows(history.profile, user, surface),
            item_rows=self._vocabularies["item"].rows(history.item_keys[newest])[None],
            weights=history.weights[newest][None],
            timestamps_s=history.timestamps_s[newest][None],
            mask=np.ones((1, length), np.bool_),
            num_total=np.array([history.num_total], np.int64),
            as_of_s=np.array([as_of_s], np.int64),
            num_events=self._config.encoder.num_events,
            window_step=self._config.encoder.window_step,
            item_rates=self._tables.item_rates,
            surprise_half_days=self._config.surprise_half_days,
        )
        return self._run(inputs, known)

    def _feature_rows(self, profile: dict[str, str], user: EntityId, surface: str) -> npt.NDArray[np.int64]:
        values: dict[str, EntityId] = {**profile, "user_id": user, "surface": surface}
        rows = np.full((1, len(self._config.request_features)), OOV_ROW, np.int64)
        for index, feature in enumerate(self._config.request_features):
            value = values.get(feature.name, "")
            if feature.prefix_length is not None:
                value = str(value)[: feature.prefix_length]
            if value != "":
                rows[0, index] = self._vocabularies[feature.table].row(id_key(value))
        return rows

    @torch.inference_mode()
    def _run(self, inputs: RequestInputs, known: EncodedHistory | None) -> EncodedRequest:
        features = self._tables.features(inputs.feature_rows, self._lookup)
        count = int(inputs.mask.sum())
        events = EventColumns(
            inputs.item_rows[0, :count],
            inputs.weight_buckets[0, :count],
            inputs.pause_buckets[0, :count],
            inputs.clock[0, :count],
        )
        encoded, num_new = self._extended(known, features, inputs.feature_rows[0], events)
        taste = self._tables.taste(inputs.taste_rows, inputs.taste_weights, self._lookup)
        tensors = _finished(self._network, inputs, features, encoded.layers(count), taste)
        return EncodedRequest(tensors, encoded, num_new, count - num_new)

    def _extended(
        self, known: EncodedHistory | None, features: Tensor, context_rows: npt.NDArray[np.int64], events: EventColumns
    ) -> tuple[EncodedHistory, int]:
        """Return an encoded history with at least these events, and how many had to be encoded."""
        config = self._config.encoder
        covered = None if known is None else known.covers(context_rows, events)
        if known is None or covered is None:
            empty = features.new_empty(0, features.shape[-1], dtype=DTYPES[self.execution.precision])
            known, covered = EncodedHistory.empty(context_rows, self._config.num_layers, empty), 0
        num_new = len(events) - covered
        if not num_new:
            return known, 0
        new = events.padded(covered, -num_new % ROWS_MULTIPLE)
        tokens = Events(
            self._tables.events(new.item_rows[None], self._lookup),
            tensor_view(new.weight_buckets)[None],
            tensor_view(new.pause_buckets)[None],
            tensor_view(new.clock)[None],
        )
        before, personal = (known.windows, known.personal) if covered else (None, None)
        encoded = self._network.encode_events(features, tokens, before, covered, personal)
        return known.extended(events, encoded, config), num_new


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """One request's state, and what is worth keeping of it.

    Args:
        tensors: The tensors of ``UserState``.
        history: The longer one of the encoded histories before and after.
        num_encoded: Events that had to be encoded.
        num_reused: Events that were known encoded.
    """

    tensors: StateArrays
    history: EncodedHistory
    num_encoded: int
    num_reused: int


@dataclass(frozen=True, slots=True)
class Ranking:
    """What a candidate ranker answers: a ``RankedList`` without what only the service knows; fields as there."""

    order: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]
    full_pass: npt.NDArray[np.bool_]
    levels: npt.NDArray[np.int8]
    missing_shards: tuple[int, ...]
    cold_start: bool
    first_pass_ms: float
    full_pass_ms: float
    exits: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class RankAsk:
    """What is ranked for one request.

    Args:
        features: C candidates.
        state: Tensors of the user state; None: the cold-start state.
        rows: Rows of each shard, None where a shard gave none.
        speculative: Embeddings of the candidates; None: none.
        limit: K, how many candidates the answer holds at most.
        exits: Whether the answer says what every exit said of the head; a pass more for each inner one.
    """

    features: FeatureBatch
    state: StateArrays | None
    rows: Sequence[EmbeddingRows | None]
    speculative: SpeculativeEmbeddings | None
    limit: int
    exits: bool = False


class CandidateRanker:
    """The candidate path: state, shard rows and speculative embeddings -> ordered scores.

    Args:
        source: The weights.
        clock: Measures the two passes.
        execution: Kernels and dtype.
        plan: Number formats of the layers, instead of packed kernels; None: as ``execution`` says throughout.

    Raises:
        ValueError: the plan is of another version or model.
    """

    def __init__(
        self,
        source: WeightSource,
        clock: Clock | None = None,
        execution: Execution = REFERENCE,
        plan: PrecisionPlan | None = None,
    ) -> None:
        config = RankerConfig.model_validate(source.json("model"))
        self.execution = execution
        self._config = config
        self._clock = clock or SystemClock()
        network = load_network(source, config)
        self._plan = plan
        if plan is not None:
            # A plan is for a version with all its deltas: they change values, not sizes.
            wanted = (parse_stamp(source.version)[0], shapes_digest(config))
            if (plan.version, plan.shapes) != wanted:
                raise ValueError(f"plan must be of version and shapes {wanted}, is of {(plan.version, plan.shapes)}")
            with_formats(network, plan.layers)
            is_low = any(not name.startswith("fp32") for name in plan.layers.values())
            precision: Precision = "bfloat16" if is_low else "float32"
            self.execution = Execution("reference", precision, f"by plan {_in_words(plan)}", is_low)
        self._network = executed(network, self.execution)
        unknown = {table.name: table_weight(source, table.name)[OOV_ROW] for table in config.tables}
        oov_rows = {name: np.array(unknown[name]) for name in config.candidate_tables}
        self._assembler = Assembler(config, oov_rows, hot_rows(source, config))
        self._objective_weights = np.array([config.objective_weights[name] for name in OBJECTIVES], np.float32)
        self._calibration = Calibration.from_weights(source, config.depths)
        # A plan is for the candidate side.
        encoder = self._network if plan is None else executed(load_network(source, config), execution)
        self.cold_start = _cold_start(encoder, config, unknown)

    @classmethod
    def from_weights(
        cls, source: WeightSource, execution: Execution = REFERENCE, plan: PrecisionPlan | None = None
    ) -> Self:
        """Build from a weights version, and a plan for it where there is one."""
        return cls(source, execution=execution, plan=plan)

    @property
    def score_error(self) -> float:
        """How far the plan's scores were from those in float32 on held-out rows, at most; 0 without a plan."""
        return 0.0 if self._plan is None else self._plan.score_error_max

    def rank(
        self,
        features: FeatureBatch,
        state: StateArrays | None,
        rows: Sequence[EmbeddingRows | None],
        speculative: SpeculativeEmbeddings | None,
        tier: str,
        limit: int,
        steps: Steps | None = None,
        *,
        exits: bool = False,
    ) -> Ranking:
        """Rank the candidates of one request.

        Args:
            features: C candidates.
            state: Tensors of the user state; None: the cold-start state.
            rows: Rows of each shard, None where a shard gave none.
            speculative: Embeddings of the candidates; None: none.
            tier: Name of a tier of the model.
            limit: K, how many candidates the answer holds at most.
            steps: Where the work may be ended; None: nowhere.
            exits: See ``RankAsk``.

        Raises:
            InvalidRequestError: the model has no such tier, or rows do not fit the features.
            StageUnavailableError: a score is not finite.
        """
        ask = RankAsk(features, state, rows, speculative, limit, exits)
        with torch.inference_mode():
            return alone(self._network, self._course(ask, tier), steps or WHOLE)

    def rank_together(
        self, asks: Sequence[RankAsk], tier: str, steps: Steps | None = None
    ) -> list[Ranking | RankMeshError]:
        """Rank the candidates of several requests, passes that fit as one.

        Returns:
            Of each request, in order, its ranking, or the error that ``rank`` would raise: one that fails leaves the
            others as they are. Scores are those of ``rank`` to the rounding of the execution.
        """
        with torch.inference_mode():
            return together(self._network, [self._course(ask, tier) for ask in asks], steps or WHOLE)

    def _course(self, ask: RankAsk, tier: str) -> Course[Ranking]:
        if tier not in self._config.tiers:
            raise InvalidRequestError(
                f"tier must be one of {sorted(self._config.tiers)}, is {tier!r}",
                field="tier",
                limit=len(self._config.tiers),
                value=tier,
            )
        features, head_max = ask.features, self._config.tiers[tier].head_max
        begin_s = self._clock.monotonic_s()
        pooled = self._assembler.pool(features, ask.rows)
        tensors = _wrap_state(self.cold_start if ask.state is None else ask.state)
        candidates = (tensor_view(pooled.values), tensor_view(features.dense))
        first = yield Pass(0, tensors, _pad(candidates[0]), _pad(candidates[1]))
        scores, values = self._score(first[: features.num_candidates], 0)
        keys = features.candidate_keys
        order = _best(values, keys, max(ask.limit, head_max))
        first_s = self._clock.monotonic_s()
        head = order[:head_max]
        full = np.zeros(features.num_candidates, np.bool_)
        levels = np.zeros(features.num_candidates, np.int8)
        said = None
        if ask.exits:
            said = np.full((features.num_candidates, len(self._config.depths), len(OBJECTIVES)), np.nan, np.float32)
            said[:, 0] = first[: features.num_candidates].numpy()
        if len(head):
            depth = self._config.depth(tier)
            wanted, levels[head] = _head_pass(depth, tensors, (*candidates, first), head, ask.speculative)
            logits = yield wanted
            scores[head], values[head] = self._score(logits[: len(head)], depth)
            full[head] = True
            for column, inner in enumerate(self._config.depths[: self._config.depths.index(depth) + 1]):
                if said is not None and inner > 0:
                    other = logits if inner == depth else (yield replace(wanted, depth=inner))
                    said[head, column] = other[: len(head)].numpy()
            ranked = head[_best(values[head], keys[head], len(head))]
            order = np.concatenate([ranked, order[head_max:]])
        order = order[: ask.limit]
        return Ranking(
            order=order.astype(np.int32),
            scores=scores[order],
            values=values[order],
            full_pass=full[order],
            levels=levels[order],
            missing_shards=pooled.missing_shards,
            cold_start=ask.state is None,
            first_pass_ms=(first_s - begin_s) * 1e3,
            full_pass_ms=(self._clock.monotonic_s() - first_s) * 1e3 if len(head) else 0.0,
            exits=None if said is None else said[order],
        )

    def embed(
        self,
        features: FeatureBatch,
        positions: npt.NDArray[np.int32],
        state: StateArrays | None,
        rows: Sequence[EmbeddingRows | None],
    ) -> npt.NDArray[np.float32]:
        """Return the speculative embeddings of some candidates: positions int32 [K] -> float32 [K, E].

        They are evaluated without a speculative input of their own, so an embedding never feeds on an older one.
        """
        pooled = tensor_view(self._assembler.pool(features, rows).values)
        tensors = _wrap_state(self.cold_start if state is None else state)
        with torch.inference_mode():
            rows_k = tensor_view(positions.astype(np.int64))
            chosen, counters = _pad(pooled[rows_k]), _pad(tensor_view(features.dense)[rows_k])
            layout = CandidateLayout.single(len(chosen))
            embedding = self._network.embed(tensors, chosen, counters, layout)
        return embedding[: len(positions)].numpy()

    def _score(self, logits: Tensor, depth: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        scores = probabilities(self._calibration.apply(logits.numpy(), depth))
        if not bool(np.isfinite(scores).all()):
            raise StageUnavailableError(
                f"depth {depth} gave {int((~np.isfinite(scores)).sum())} scores that are not finite", stage="ranking"
            )
        return scores, combined_value(scores, self._objective_weights)


def _head_pass(
    depth: int,
    state: dict[str, Tensor],
    candidates: tuple[Tensor, Tensor, Tensor],
    head: npt.NDArray[np.int64],
    speculative: SpeculativeEmbeddings | None,
) -> tuple[Pass, npt.NDArray[np.int8]]:
    """Return the full pass over the head, and the level of each of its speculative embeddings."""
    pooled, counters, first = (_pad(part[tensor_view(head)]) for part in candidates)
    if speculative is None or not bool((speculative.levels[head] != int(HitLevel.NONE)).any()):
        return Pass(depth, state, pooled, counters, first=first), np.zeros(len(head), np.int8)
    found = speculative.levels[head]
    vectors, levels = _pad(tensor_view(speculative.vectors[head])), _pad(tensor_view(found.astype(np.int64)))
    return Pass(depth, state, pooled, counters, vectors, levels, first), found


def _cold_start(
    network: RankingNetwork | FusedNetwork, config: RankerConfig, unknown: Mapping[str, npt.NDArray[np.float32]]
) -> StateArrays:
    """Return the state of a user about whom nothing is known: no history, every attribute out of vocabulary.

    Args:
        network: Encodes it.
        config: Its configuration.
        unknown: table -> float32 [D], its row for ids out of vocabulary.
    """
    nothing = np.zeros((1, 0), np.int64)
    inputs = request_inputs(
        np.full((1, len(config.request_features)), OOV_ROW, np.int64),
        nothing,
        nothing.astype(np.float32),
        nothing,
        nothing.astype(np.bool_),
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
        config.encoder.num_events,
        config.encoder.window_step,
        np.zeros((1, NUM_SURPRISES), np.float32),
    )
    features = tensor_view(np.stack([unknown[feature.table] for feature in config.request_features])[None])
    empty = features.new_empty(1, 0, config.width)
    with torch.inference_mode():
        return _finished(network, inputs, features, [(empty, empty)] * config.num_layers, empty.sum(1))


def _finished(
    network: RankingNetwork | FusedNetwork,
    inputs: RequestInputs,
    features: Tensor,
    encoded: Sequence[tuple[Tensor, Tensor]],
    taste: Tensor,
) -> StateArrays:
    """Return the tensors of one request's state: features [1, F, D], keys and values [1, L, D] of every layer."""
    count = encoded[0][0].shape[1]
    ages = Ages(tensor_view(inputs.log_gaps[:, :count]), None)
    state = network.finish(features, encoded, ages, tensor_view(inputs.dense), taste)
    arrays = {name: np.ascontiguousarray(value[0].numpy()) for name, value in state.items()}
    return {**arrays, SIGNALS_NAME: np.ascontiguousarray(inputs.dense[0, :-NUM_SURPRISES])}


def _in_words(plan: PrecisionPlan) -> str:
    """Return how many layers have which format: ``4 layers in int8, 1 layer in bf16_packed, NE +0.01%``."""
    counts = Counter(plan.layers.values())
    layers = ", ".join(f"{number} layer{'s'[: number > 1]} in {name}" for name, number in sorted(counts.items()))
    return f"{layers or 'no layer in low precision'}, NE {plan.ne_change:+.2%}"


def load_network(source: WeightSource, config: RankerConfig) -> RankingNetwork:
    """Build the dense network of a weights version, ready to serve.

    Raises:
        WeightsError: the tensors do not fit the configuration.
    """
    # Not on device "meta": its first use imports 880 modules, 1.3 s of a core at every start of a replica.
    network = RankingNetwork(config)
    stored = source.tensors(DENSE_GROUP)
    weights = {
        name.removeprefix(NETWORK_PREFIX): tensor_view(array)
        for name, array in stored.items()
        if name.startswith(NETWORK_PREFIX)
    }
    try:
        network.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise WeightsError(
            f"dense tensors of weights {source.version} do not fit their model: {error}",
            version=source.version,
            file=DENSE_GROUP,
        ) from error
    return network.requires_grad_(False).eval()


def _wrap_state(state: StateArrays) -> dict[str, Tensor]:
    return {name: tensor_view(array)[None] for name, array in state.items()}


def _pad(rows: Tensor) -> Tensor:
    """Append zero rows up to a multiple of ``ROWS_MULTIPLE``: [C, ..] -> [padded C, ..]."""
    missing = -len(rows) % ROWS_MULTIPLE
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _best(values: npt.NDArray[np.float32], keys: npt.NDArray[np.int64], k: int) -> npt.NDArray[np.int64]:
    """Return the positions of the k best values, best first, of equal values the smaller key first."""
    order, _ = segmented_topk(values, np.array([0, len(values)], np.int64), k, tie_keys=keys)
    return order
