"""Oracle: scores a request in one process, the plain way, to say what the mesh must answer.

It shares no code with the serving path beyond configuration and weight names: every pair of request and candidate
carries its own copy of the user side through whole, masked matrices; ids are looked up in dictionaries, tables are
never sharded, nothing is computed once for several pairs, and the order comes from a sort.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.config import RankerConfig
from models.inputs import COUNTER_FEATURES
from models.oracle_network import PlainNetwork
from models.source import WeightSource
from shared.hashing import EntityId, hash64, id_key
from shared.schema.user import UserHistory

Floats = npt.NDArray[np.float32]
Carried: TypeAlias = Mapping[str, Any]
"""What one candidate carries: feature -> a number, a list of ids, or ``{"ids": [..], "weights": [..]}``."""

_PAIRS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class OracleAnswer:
    """What the mesh must answer, for all C candidates, by their position in the request.

    Args:
        order: int64 [K], positions of the answer, best first.
        scores: float32 [C, O], of the pass that decides on each candidate.
        values: float32 [C], combined value of ``scores``.
        full_pass: bool [C], whether the tier's full pass decides.
        first_values: float32 [C], combined value of the first pass, which chose the head.
        first_scores: float32 [C, O].
        full_values: float32 [C], combined value of the full pass, candidates outside the head included.
        full_scores: float32 [C, O], likewise.
        keys: int64 [C], id keys, smaller first among equals.
        head_max: Candidates that the tier's full pass takes.
        value_scale: Sum of the objectives' absolute weights: how far a value is off when every score is off by 1.
    """

    order: npt.NDArray[np.int64]
    scores: Floats
    values: Floats
    full_pass: npt.NDArray[np.bool_]
    first_values: Floats
    first_scores: Floats
    full_values: Floats
    full_scores: Floats
    keys: npt.NDArray[np.int64]
    head_max: int
    value_scale: float


class Ranked(Protocol):
    """An answer to be compared: ``RankedList`` and ``models.stations.Ranking`` are ones."""

    @property
    def order(self) -> npt.NDArray[np.int32]:
        """[K], positions in the request, best first."""
        ...

    @property
    def scores(self) -> Floats:
        """[K, O]."""
        ...

    @property
    def values(self) -> Floats:
        """[K]."""
        ...

    @property
    def full_pass(self) -> npt.NDArray[np.bool_]:
        """[K]."""
        ...


class Oracle:
    """Per-pair scoring from the weights of one version.

    Args:
        source: The weights.
    """

    def __init__(self, source: WeightSource) -> None:
        self.config = RankerConfig.model_validate(source.json("model"))
        self._dense = {name: torch.tensor(array) for name, array in source.tensors("dense").items()}
        self._plain = PlainNetwork(self.config, self._dense)
        self._tables = {
            table.name: torch.tensor(source.tensors(f"tables/{table.name}")["weight"]) for table in self.config.tables
        }
        vocabulary = source.tensors("vocabulary")
        self._rows = {
            table.name: dict(
                zip(vocabulary[f"{table.name}.keys"].tolist(), vocabulary[f"{table.name}.rows"].tolist(), strict=True)
            )
            for table in self.config.tables
        }
        catalog = source.tensors("catalog")
        offsets = catalog["genre_offsets"].tolist()
        self._counters = {
            key: torch.tensor(catalog["counters"][i]) for i, key in enumerate(catalog["item_keys"].tolist())
        }
        self._items: dict[int, tuple[list[int], int]] = {
            key: (catalog["genre_rows"][offsets[index] : offsets[index + 1]].tolist(), int(catalog["year_rows"][index]))
            for index, key in enumerate(catalog["item_keys"].tolist())
        }

    @classmethod
    def from_weights(cls, source: WeightSource) -> Self:
        """Build from a weights version."""
        return cls(source)

    def rank(
        self,
        user: EntityId,
        candidates: Sequence[EntityId],
        history: UserHistory,
        surface: str,
        as_of_s: int,
        tier: str,
        limit: int,
        spec_vectors: Floats | None = None,
        spec_levels: npt.NDArray[np.int8] | None = None,
        *,
        missing_shards: Sequence[int] = (),
        num_shards: int = 1,
        cold_start: bool = False,
        carried: Sequence[Carried] | None = None,
    ) -> OracleAnswer:
        """Say what the answer to a request is.

        Args:
            user: Raw user id.
            candidates: C raw ids.
            history: Events before ``as_of_s`` and the profile.
            surface: Surface name.
            as_of_s: Request time, seconds since the epoch.
            tier: Ranking tier.
            limit: K.
            spec_vectors: float32 [C, E], speculative embeddings that the mesh used.
            spec_levels: int8 [C], their levels, 0 for none.
            missing_shards: Shards whose rows the mesh replaced by the out-of-vocabulary row.
            num_shards: Shards in all.
            cold_start: Whether the mesh used the state of an unknown user.
            carried: What each candidate carries itself; None: nothing.
        """
        pooled = self._pool(candidates, set(missing_shards), num_shards, carried)
        keys = [id_key(candidate) for candidate in candidates]
        extra = self._speculative_tokens(len(candidates), spec_vectors, spec_levels)
        user_side = self._user_side(user, history, surface, as_of_s, cold_start)
        depth = self.config.depth(tier)
        logits, _ = self._logits(pooled, self._counted(candidates), extra, user_side)
        first_scores, full_scores = self._scores(logits[0], 0), self._scores(logits[depth], depth)
        first_values, full_values = self._values(first_scores), self._values(full_scores)
        by_first = sorted(range(len(keys)), key=lambda c: (-first_values[c], keys[c]))
        head_max = self.config.tiers[tier].head_max
        head = sorted(by_first[:head_max], key=lambda c: (-full_values[c], keys[c]))
        in_head = np.isin(np.arange(len(keys)), head)
        return OracleAnswer(
            order=np.array((head + by_first[head_max:])[:limit], np.int64),
            scores=np.where(in_head[:, None], full_scores, first_scores),
            values=np.where(in_head, full_values, first_values),
            full_pass=in_head,
            first_values=first_values,
            first_scores=first_scores,
            full_values=full_values,
            full_scores=full_scores,
            keys=np.array(keys, np.int64),
            head_max=head_max,
            value_scale=sum(abs(weight) for weight in self.config.objective_weights.values()),
        )

    def embed(
        self, user: EntityId, candidates: Sequence[EntityId], history: UserHistory, surface: str, as_of_s: int
    ) -> Floats:
        """Return the speculative embedding of every candidate: float32 [C, E]."""
        extra = self._speculative_tokens(len(candidates), None, None)
        side = self._user_side(user, history, surface, as_of_s, False)
        return self._logits(self._pool(candidates, set(), 1), self._counted(candidates), extra, side)[1].numpy()

    # ------------------------------------------------------------------------------------------------ inputs

    def _row(self, table: str, value: EntityId) -> int:
        return int(self._rows[table].get(id_key(value), 0))

    def candidate_rows(self, candidate: EntityId, carried: Carried) -> dict[str, list[int]]:
        """Return the rows of every feature of one candidate, in the order in which they are pooled.

        Args:
            candidate: Raw id.
            carried: What it carries itself, by feature: a number, ids, or ids with weights.
        """
        genres, year = self._items.get(id_key(candidate), ([], 0))
        known = {"item_id": [self._row("item", candidate)], "genres": genres, "year": [year]}
        found: dict[str, list[int]] = {}
        for feature in self.config.candidate_features:
            value = carried.get(feature.name)
            if feature.number_bounds is not None:
                bounds = [float(np.float32(bound)) for bound in feature.number_bounds]
                found[feature.name] = [0 if value is None else 1 + sum(value >= bound for bound in bounds)]
                continue
            ids, weights = (value["ids"], value["weights"]) if isinstance(value, Mapping) else (value or [], None)
            places = list(range(len(ids)))
            if weights is not None:
                places.sort(key=lambda place: -weights[place])
            kept = [ids[place] for place in sorted(places[: feature.ids_max])]
            num_rows = self.config.table(feature.table).num_rows
            if num_rows is None:
                rows = [self._row(feature.table, id_) for id_ in kept]
            else:
                rows = [1 + _spread(id_key(id_), feature.name, num_rows - 1) for id_ in kept]
            found[feature.name] = rows or known.get(feature.name, [])
        return found

    def _pool(
        self,
        candidates: Sequence[EntityId],
        missing: set[int],
        num_shards: int,
        carried: Sequence[Carried] | None = None,
    ) -> Tensor:
        """Return pooled candidate embeddings [C, F, D], rows of missing shards replaced by row 0."""
        tables = list(dict.fromkeys(feature.table for feature in self.config.candidate_features))
        whole = [table for table in tables if self.config.table(table).placement == "table_wise"]

        def vector(table: str, row: int) -> Tensor:
            shard = whole.index(table) % num_shards if table in whole else row % num_shards
            return self._tables[table][0 if shard in missing else row]

        rows = []
        for candidate, own in zip(candidates, carried or [{}] * len(candidates), strict=True):
            ids = self.candidate_rows(candidate, own)
            for feature in self.config.candidate_features:
                vectors = [vector(feature.table, row) for row in ids[feature.name]]
                rows.append(sum(vectors, torch.zeros(self.config.width)) / max(len(vectors), 1))
        return torch.stack(rows).view(len(candidates), -1, self.config.width)

    def _counted(self, candidates: Sequence[EntityId]) -> Tensor:
        unknown = torch.zeros(len(COUNTER_FEATURES))
        return torch.stack([self._counters.get(id_key(candidate), unknown) for candidate in candidates])

    def _speculative_tokens(self, count: int, vectors: Floats | None, levels: npt.NDArray[np.int8] | None) -> Tensor:
        presence = self._dense["network.presence"]
        if vectors is None or levels is None:
            return presence[0].repeat(count, 1)
        projected = torch.tensor(vectors) @ self._dense["network.speculative.weight"].T
        return projected + presence[torch.tensor(levels.astype(np.int64))]

    def _user_side(
        self, user: EntityId, history: UserHistory, surface: str, as_of_s: int, cold: bool
    ) -> tuple[Tensor, Tensor, list[int], Sequence[int]]:
        """Return the request tokens [R, D] of one request; its events [L, D] with their times; the gaps to now."""
        config = self.config
        if cold:
            history = UserHistory.empty()
        values: dict[str, EntityId] = {} if cold else {**history.profile, "user_id": user, "surface": surface}
        tokens = []
        for feature in config.request_features:
            value = values.get(feature.name, "")
            if feature.prefix_length is not None:
                value = str(value)[: feature.prefix_length]
            row = self._row(feature.table, value) if value != "" else 0
            tokens.append(self._tables[feature.table][row])
        start = max(len(history) - config.history_length, 0)
        weights = [min(max(float(weight), 0.0), 5.0) for weight in history.weights[start:]]
        times = [int(time) for time in history.timestamps_s[start:]]
        gaps = [max(as_of_s - time, 0) for time in times]
        surprises = self._surprises(history.item_keys[start:], weights, gaps)
        dense = torch.tensor([*_dense_features(weights, gaps, history.num_total), *surprises], dtype=torch.float32)
        made = self._plain.linear("dense.2", torch.relu(self._plain.linear("dense.0", dense))).view(-1, config.width)
        # The window's begin moves on in whole steps.
        first = 0
        while history.num_total - first > config.encoder.num_events:
            first += config.encoder.window_step
        newest = max(len(times) - (history.num_total - first), 0)
        keys = history.item_keys[start:]
        events = self._event_tokens(keys[newest:], weights[newest:], times[newest:])
        tokens = [*tokens, *made, self._taste(keys, weights)]
        return torch.stack(tokens), events, times[newest:], gaps[newest:]

    def _taste(self, item_keys: npt.NDArray[np.int64], weights: list[float]) -> Tensor:
        """Return the sum of the items of a history [D], each by what it was worth beyond the user's usual."""
        usual = (sum(weights) + 5 * 3.6) / (len(weights) + 5)
        parts = [torch.zeros(self.config.width)]
        for key, weight in zip(item_keys.tolist(), weights, strict=True):
            parts.append(self._item_token(key) * ((weight - usual) / math.sqrt(len(weights) + 5)))
        return torch.stack(parts).sum(0)

    def _surprises(self, item_keys: npt.NDArray[np.int64], weights: list[float], gaps: list[int]) -> list[float]:
        """Return how much oftener than others the user clicked, and converted, on the items of a history."""
        totals, num = [0.0, 0.0], 0.0
        half = self.config.surprise_half_days
        for key, weight, gap in zip(item_keys.tolist(), weights, gaps, strict=True):
            share = 1.0 if half is None else half / (half + gap / 86400)
            num += share
            for index, least in enumerate((4, 5)):
                odds = (
                    float(self._counters[key][1 + index])
                    if key in self._rows["item"] and key in self._counters
                    else 0.0
                )
                totals[index] += share * ((weight >= least) - 1 / (1 + math.exp(-2 * odds)))
        return [4 * total / (num + 5) for total in totals]

    def _item_token(self, key: int) -> Tensor:
        """Return what an item embeds to as an event: [D]."""
        row = self._rows["item"].get(key, 0)
        token = self._tables["item"][row].clone()
        genres = self._items[key][0] if row else []
        if self.config.encoder.genre_events and genres:
            token += sum(self._tables["genre"][genre] for genre in genres) / len(genres)
        return token

    def _event_tokens(self, item_keys: npt.NDArray[np.int64], weights: list[float], times: list[int]) -> Tensor:
        buckets = self._dense["network.encoder.events.buckets"]
        beginning = len(buckets) - 11 - 1
        events = [torch.zeros(0, self.config.width)]
        for index, key in enumerate(item_keys.tolist()):
            token = self._item_token(key)
            token *= self._dense["network.encoder.events.gains"][round(weights[index] * 2)]
            token += buckets[round(weights[index] * 2)]
            pause = max(times[index] - times[index - 1], 0)
            # Two buckets an octave from 2 seconds on; the epsilon keeps exact powers of two in their own bucket.
            octaves = math.floor(2 * math.log2(pause) + 1e-12) - 1 if pause > 1 else 0
            token += buckets[11 + (min(max(octaves, 0), beginning - 1) if index else beginning)]
            events.append(token[None])
        return torch.cat(events)

    # ------------------------------------------------------------------------------------------------ network

    def _logits(
        self,
        pooled: Tensor,
        counters: Tensor,
        extra: Tensor,
        user_side: tuple[Tensor, Tensor, list[int], Sequence[int]],
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Return the logits of every depth, 0 the first pass, and speculative embeddings, some pairs at a time."""
        some = [slice(begin, begin + _PAIRS_AT_ONCE) for begin in range(0, len(pooled), _PAIRS_AT_ONCE)]
        parts = [self._forward(pooled[pairs], counters[pairs], extra[pairs], *user_side) for pairs in some]
        logits = {depth: torch.cat([part[0][depth] for part in parts]) for depth in self.config.depths}
        return logits, torch.cat([part[1] for part in parts])

    @torch.inference_mode()
    def _forward(
        self,
        pooled: Tensor,
        counters: Tensor,
        extra: Tensor,
        user_tokens: Tensor,
        events: Tensor,
        times: list[int],
        gaps: Sequence[int],
    ) -> tuple[dict[int, Tensor], Tensor]:
        count = len(pooled)
        request = user_tokens.repeat(count, 1, 1)
        features = request[:, : len(self.config.request_features)]
        history = events.repeat(count, 1, 1)
        summaries = self._dense["network.encoder.summaries"].repeat(count, 1, 1)
        counted = self._plain.linear("counters.2", torch.relu(self._plain.linear("counters.0", counters)))
        candidate = torch.cat([pooled, counted[:, None], extra[:, None]], dim=1)
        corrections: dict[int, Tensor] = {}
        for layer in range(self.config.num_layers):
            history, key, value = self._plain.encode(layer, history, features, times, gaps)
            summaries = self._plain.summarize(layer, summaries, key, value)
            request, candidate = self._interact(layer, request, candidate, summaries, key, value)
            if layer + 1 in self.config.exits:
                name = f"heads.exits.{layer + 1}"
                own = self._plain.linear(f"{name}.hidden", candidate.flatten(1))
                hidden = torch.relu(own + self._plain.linear(f"{name}.cross", request.flatten(1)))
                corrections[layer + 1] = self._plain.linear(f"{name}.logits", hidden)
        flat = self._plain.norm("first.norm", request).flatten(1)
        users = self._plain.linear("first.user", flat).view(count, self.config.num_objectives, -1)
        item = self._plain.linear("first.item", torch.cat([pooled.flatten(1), counters], dim=1))
        first = (users * item[:, None]).sum(2)
        logits = {0: first} | {depth: first + correction for depth, correction in corrections.items()}
        return logits, torch.tanh(self._plain.linear("heads.speculative", hidden))

    def _interact(
        self, layer: int, request: Tensor, candidate: Tensor, summaries: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        name, own, other = f"layers.{layer}", f"layers.{layer}.request", f"layers.{layer}.candidate"
        sizes = self.config.layer_sizes[layer]
        inputs = torch.cat([request, candidate], dim=1)
        queries = self._triangular(name, "query_tokens") @ inputs
        num_own = sizes.request.num_queries
        answers = []
        for part, group in ((queries[:, :num_own], own), (queries[:, num_own:], other)):
            attended = self._plain.attend(self._plain.linear(f"{group}.query", part), key, value)
            answers.append(self._plain.linear(f"{group}.attention_out", attended))
        own_tokens = torch.cat([request, answers[0], summaries], dim=1)
        tokens = torch.cat([own_tokens, candidate, answers[1]], dim=1)
        num_request = own_tokens.shape[1]
        mixtures = self._triangular(name, "mixtures") @ tokens
        num_mixtures = sizes.request.num_mixtures
        # The whole X (X^T Y); the group mask keeps request rows with request mixtures and candidate rows with theirs.
        products = tokens @ mixtures.transpose(1, 2)
        flat = products[:, :num_request, :num_mixtures].flatten(1), products[:, num_request:, num_mixtures:].flatten(1)
        own_products = self._plain.norm(f"{own}.norm_products", flat[0], sizes.request.num_products_counted)
        other_products = self._plain.norm(f"{other}.norm_products", flat[1], sizes.candidate.num_products_counted)
        own_hidden = torch.relu(self._plain.linear(f"{own}.up", own_products))
        other_hidden = torch.relu(
            self._plain.linear(f"{other}.up", other_products) + self._plain.linear(f"{name}.cross_up", own_products)
        )
        linear = self._triangular(name, "linear") @ tokens
        num_linear = sizes.request.num_linear_tokens
        return (
            self._close(own, request, own_hidden, linear[:, :num_linear]),
            self._close(other, candidate, other_hidden, linear[:, num_linear:]),
        )

    def _close(self, group: str, inputs: Tensor, hidden: Tensor, linear: Tensor) -> Tensor:
        mlp = self._plain.linear(f"{group}.down", hidden).view(len(hidden), -1, self.config.width)
        residual = self._dense.get(f"network.{group}.residual")
        carried = inputs if residual is None else residual @ inputs
        made = torch.cat([mlp, linear], dim=1)
        # Tokens beyond those that the two blocks make have the residual alone.
        made = torch.cat([made, torch.zeros_like(carried[:, made.shape[1] :])], dim=1)
        return self._plain.norm(f"{group}.norm", made + carried)

    def _triangular(self, layer: str, name: str) -> Tensor:
        """Return a token map as one block lower triangular matrix over both groups."""
        request = self._dense[f"network.{layer}.request.{name}"]
        cross = self._dense[f"network.{layer}.cross_{name}"]
        candidate = self._dense[f"network.{layer}.candidate.{name}"]
        zeros = torch.zeros(request.shape[0], candidate.shape[1])
        return torch.cat([torch.cat([request, zeros], dim=1), torch.cat([cross, candidate], dim=1)])

    # ------------------------------------------------------------------------------------------------ scores

    def _scores(self, logits: Tensor, depth: int) -> Floats:
        scale, offset = self._dense[f"calibration.{depth}"]
        click, conversion = torch.sigmoid(logits * scale + offset).unbind(1)
        return torch.stack([click, click * conversion], dim=1).numpy()

    def _values(self, scores: Floats) -> Floats:
        weights = self.config.objective_weights
        value = scores[:, 0] * np.float32(weights["click"]) + scores[:, 1] * np.float32(weights["conversion"])
        return np.asarray(value, np.float32)


def _spread(key: int, feature: str, num_buckets: int) -> int:
    """Return the bucket of a key: splitmix64 twice, the feature's salt between, then scaled to the buckets."""

    def finalise(bits: int) -> int:
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        return bits ^ bits >> 31

    mixed = finalise(finalise((key + 0x9E3779B97F4A7C15) % 2**64) ^ hash64(feature.encode()))
    return (mixed >> 32) * num_buckets >> 32


def _dense_features(weights: list[float], gaps: list[int], num_total: int) -> list[float]:
    count = len(weights)
    newest = weights[-10:]
    mean = sum(weights) / max(count, 1)
    variance = sum((weight - mean) ** 2 for weight in weights) / max(count, 1)
    return [
        math.log1p(num_total) / 8,
        mean / 5,
        math.sqrt(variance) / 2,
        sum(weight >= 4 for weight in weights) / max(count, 1),
        sum(weight >= 5 for weight in weights) / max(count, 1),
        sum(newest) / max(len(newest), 1) / 5,
        sum(weight >= 4 for weight in newest) / max(len(newest), 1),
        weights[-1] / 5 if weights else 0.0,
        math.log(max(min(gaps, default=0), 1)) / 16,
        math.log(max(max(gaps, default=0), 1)) / 16,
        sum(gap <= 3600 for gap in gaps) / max(count, 1),
        float(count > 0),
    ]


ROUNDINGS_PER_LAYER = 12
"""Times that a value is stored on its way through one interaction layer: queries, attention, products, norms, maps."""


def tolerance(config: RankerConfig, precision: str = "float32") -> float:
    """Return how far a score may be from the oracle's: c * eps(float32) * sqrt(K).

    K is the longest sum of a layer. c is 64: some 10 layers follow one another, a norm may blow an error up by a few
    times, and a sigmoid damps the last step by 4. Measured errors are under a quarter of it.

    With ``precision`` bfloat16, sums are float32 still, but a value is rounded by at most eps / 2 each time that it is
    stored; such errors add up like independent ones: eps(bfloat16) / 2 * sqrt(roundings) on top.
    """
    length = max(
        *(
            config.width * group.num_tokens
            for sizes in config.layer_sizes
            for group in (sizes.request, sizes.candidate)
        ),
        *(group.num_products for sizes in config.layer_sizes for group in (sizes.request, sizes.candidate)),
        config.history_length + 1,
    )
    summed = float(64 * np.finfo(np.float32).eps * math.sqrt(length))
    if precision == "float32":
        return summed
    return summed + 2.0**-8 * math.sqrt(ROUNDINGS_PER_LAYER * config.num_layers)


def compare(answer: OracleAnswer, response: Ranked, tolerance: float) -> list[str]:
    """List in which ways a response is not the oracle's answer; an empty list means that it is.

    Within the tolerance two candidates of equal value may swap, at the edge of the head and of the answer too;
    everything else is a difference.

    Args:
        answer: The oracle's.
        response: What came back.
        tolerance: How far a score may be off, see ``tolerance``.
    """
    order = np.asarray(response.order, np.int64)
    if len(order) != len(answer.order):
        return [f"answer has {len(order)} candidates, must have {len(answer.order)}"]
    if len(np.unique(order)) != len(order) or (len(order) and not 0 <= order.min() <= order.max() < len(answer.keys)):
        return ["order repeats candidates or names some that were not asked"]
    full = np.asarray(response.full_pass, np.bool_)
    expected = np.where(full[:, None], answer.full_scores[order], answer.first_scores[order])
    error = np.abs(response.scores.astype(np.float64) - expected)
    differences = []
    for rank, objective in np.argwhere(~(error <= tolerance)).tolist():
        found, must = float(response.scores[rank, objective]), float(expected[rank, objective])
        differences.append(f"candidate {order[rank]} objective {objective}: {found!r}, must be {must!r}")
    slack = tolerance * answer.value_scale
    return [*differences, *_misplaced(answer, response, order, full), *_left_out(answer, order, full, slack)]


def _misplaced(
    answer: OracleAnswer, response: Ranked, order: npt.NDArray[np.int64], full: npt.NDArray[np.bool_]
) -> list[str]:
    """List where the response breaks the order of its own values: full pass first, larger first, then smaller key."""
    differences = []
    values = np.asarray(response.values, np.float64)
    for rank in range(1, len(order)):
        if full[rank] and not full[rank - 1]:
            differences.append(f"rank {rank}: a candidate of the full pass follows one of the first pass")
        before, after = (values[rank - 1], -answer.keys[order[rank - 1]]), (values[rank], -answer.keys[order[rank]])
        if full[rank] == full[rank - 1] and not before > after:
            differences.append(f"rank {rank}: value {float(after[0])!r} must not follow {float(before[0])!r}")
    return differences


def _left_out(
    answer: OracleAnswer, order: npt.NDArray[np.int64], full: npt.NDArray[np.bool_], slack: float
) -> list[str]:
    """List candidates that got the wrong pass, and better ones that the answer has no place for."""
    near_edge = _near_head_edge(answer, slack)
    sure = answer.full_pass & ~near_edge
    never = ~answer.full_pass & ~near_edge
    listed = np.zeros(len(answer.keys), np.bool_)
    listed[order] = True
    wrong = order[np.where(full, never[order], sure[order])]
    differences = [f"candidate {position} was scored by the wrong pass" for position in wrong.tolist()]
    num_full = min(answer.head_max, len(answer.keys), len(order))
    if int(full.sum()) != num_full:
        differences.append(f"{int(full.sum())} candidates were scored by the full pass, must be {num_full}")
    parts = [(answer.full_values, full, sure & ~listed), (answer.first_values, ~full, ~sure & ~listed)]
    if num_full == len(order):
        # The answer ends within the head: those outside it, and near its edge, need not be there.
        del parts[1]
    for values, own, outside in parts:
        if own.any() and outside.any():
            worst = float(values[order[own]].min())
            better = np.flatnonzero(outside & (values > worst + 2 * slack)).tolist()
            differences += [f"candidate {position} is better than what was answered" for position in better]
    return differences


def _near_head_edge(answer: OracleAnswer, slack: float) -> npt.NDArray[np.bool_]:
    """Tell whose first-pass value is so close to the head's edge that rounding decides on which side they are."""
    if not 0 < answer.head_max < len(answer.keys):
        return np.zeros(len(answer.keys), np.bool_)
    values, head = answer.first_values, answer.full_pass
    worst_in, best_out = values[head].min(), values[~head].max()
    return np.asarray(np.where(head, values <= best_out + slack, values >= worst_in - slack))
