"""The serving halves against the oracle, and against one another when candidates and requests are mixed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.native import status
from models.calibration import Calibration
from models.config import RankerConfig, TierConfig
from models.execution import choose_execution
from models.features import FeatureExtractor
from models.golden import Golden
from models.heads import probabilities
from models.oracle import Oracle, compare, tolerance
from models.passes import Steps
from models.random_weights import TINY
from models.source import MemorySource
from models.stations import CandidateRanker, RankAsk, Ranking, RequestEncoder, TableShard, load_network
from shared.errors import InvalidRequestError, StageUnavailableError, WeightsError
from shared.hashing import EntityId
from shared.schema.embeddings import EmbeddingRows
from shared.schema.features import FeatureBatch
from shared.schema.speculative import SpeculativeEmbeddings
from shared.schema.stamp import Stamp
from shared.schema.user import UserHistory
from tests.helpers.weights import random_weights

_STAMP = Stamp("r", "random", "test", "0", 0.0)
_TIERS = {
    "light": TierConfig(head_max=0),
    "standard": TierConfig(head_max=12, num_layers=1),
    "full": TierConfig(head_max=9),
}
_CONFIG = TINY.model_copy(update={"tiers": _TIERS})
_NOW_S = 100_000


class _World:
    """All stations over one source, and the oracle."""

    def __init__(self, config: RankerConfig) -> None:
        self.config = config
        self.source = random_weights(config)
        self.extractor = FeatureExtractor.from_weights(self.source)
        self.encoder = RequestEncoder.from_weights(self.source)
        self.ranker = CandidateRanker.from_weights(self.source)
        self.oracle = Oracle.from_weights(self.source)
        self.tolerance = tolerance(config)

    def features(self, candidates: Sequence[EntityId]) -> FeatureBatch:
        return self.extractor.extract_ids(candidates).stamped(_STAMP)

    def rows(self, features: FeatureBatch, num_shards: int = 2) -> list[EmbeddingRows]:
        return [
            EmbeddingRows(_STAMP, shard, TableShard(self.source, shard, num_shards).lookup(features))
            for shard in range(num_shards)
        ]

    def rank(
        self,
        candidates: Sequence[EntityId],
        history: UserHistory,
        speculative: SpeculativeEmbeddings | None = None,
        tier: str = "full",
        limit: int = 100,
        num_shards: int = 2,
    ) -> Ranking:
        features = self.features(candidates)
        state = self.encoder.encode(history, 3, "web", _NOW_S)
        return self.ranker.rank(features, state, self.rows(features, num_shards), speculative, tier, limit)


@pytest.fixture(scope="module")
def world() -> _World:
    return _World(_CONFIG)


def _history(length: int, seed: int = 0) -> UserHistory:
    random = np.random.default_rng(seed)
    return UserHistory(
        item_keys=random.integers(1, 45, length),
        weights=(random.integers(1, 11, length) / 2).astype(np.float32),
        timestamps_s=np.sort(random.integers(1, _NOW_S, length)),
        num_total=length + 1,
        profile={"gender": "M", "age": "18", "occupation": "lawyer", "zip_code": "10001"},
    )


def _speculative(count: int, width: int, seed: int) -> SpeculativeEmbeddings:
    random = np.random.default_rng(seed)
    levels = random.choice([0, 2, 3], count).astype(np.int8)
    vectors = random.uniform(-1, 1, (count, width)) * (levels > 0)[:, None]
    return SpeculativeEmbeddings(_STAMP, vectors.astype(np.float32), levels)


_CANDIDATES = st.lists(
    st.one_of(st.integers(1, 40), st.sampled_from([0, 41, 2**63 - 1, "x", "été"])), min_size=1, max_size=24, unique=True
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    _CANDIDATES, st.sampled_from([0, 1, 5, 6, 30]), st.integers(0, 99), st.sampled_from(["full", "standard", "light"])
)
def test_stations_equal_the_oracle(world: _World, candidates: list[Any], length: int, seed: int, tier: str) -> None:
    history = _history(length, seed)
    speculative = _speculative(len(candidates), world.config.speculative_width, seed)
    answer = world.oracle.rank(3, candidates, history, "web", _NOW_S, tier, 10, speculative.vectors, speculative.levels)
    ranking = world.rank(candidates, history, speculative, tier, limit=10)
    assert compare(answer, ranking, world.tolerance) == []
    assert not ranking.cold_start


def test_an_explored_answer_says_what_every_tier_would_have_said(world: _World) -> None:
    features = world.features(list(range(1, 31)))
    state, rows = world.encoder.encode(_history(6), 3, "web", _NOW_S), world.rows(features)
    speculative = _speculative(30, world.config.speculative_width, 3)
    asked = (features, state, rows, speculative)
    plain = world.ranker.rank(*asked, "full", 30)
    found = world.ranker.rank(*asked, "full", 30, Steps(4), exits=True)
    assert plain.exits is None
    np.testing.assert_array_equal(found.order, plain.order)
    np.testing.assert_allclose(found.scores, plain.scores, atol=1e-6)
    assert found.exits is not None
    assert found.exits.shape == (30, 3, 2)
    assert np.isnan(found.exits[~found.full_pass, 1:]).all()
    calibration = Calibration.from_weights(world.source, world.config.depths)
    for tier, depth in (("light", 0), ("standard", 1), ("full", 2)):
        other = world.ranker.rank(*asked, tier, 30)
        scores = dict(zip(other.order.tolist(), other.scores, strict=True))
        judged = found.full_pass if depth else np.ones(30, np.bool_)
        own = dict(zip(other.order.tolist(), other.full_pass.tolist(), strict=True))
        compared = [row for row in np.flatnonzero(judged) if depth == 0 or own[int(found.order[row])]]
        assert len(compared) >= 5
        said = probabilities(calibration.apply(found.exits[compared, depth], depth))
        np.testing.assert_allclose(said, [scores[int(found.order[row])] for row in compared], atol=1e-5)
    (batched,) = world.ranker.rank_together([RankAsk(*asked, 30, exits=True)], "full")
    assert isinstance(batched, Ranking)
    assert batched.exits is not None
    np.testing.assert_allclose(batched.exits, found.exits, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"request_ratio": 1.5}, {"bias": True}, {"num_layers": 3}, {"num_layers": 1}, {"surprise_half_days": 0.01}],
    ids=str,
)
def test_other_models_equal_the_oracle(changes: dict[str, Any]) -> None:
    other = _World(_CONFIG.model_copy(update=changes))
    candidates: list[EntityId] = list(range(1, 25))
    for tier in other.config.tiers:
        answer = other.oracle.rank(3, candidates, _history(6), "web", _NOW_S, tier, 20)
        assert compare(answer, other.rank(candidates, _history(6), tier=tier, limit=20), other.tolerance) == []


@pytest.mark.parametrize("tier", ["standard", "full"])
def test_the_native_stack_ranks_to_its_precision_and_the_same_bits_in_any_batch(served: _World, tier: str) -> None:
    if not (found := status()).available:
        pytest.skip(found.reason)
    features = served.features(list(range(1, 41)))
    state = served.encoder.encode(_history(4), 3, "web", _NOW_S)
    ranker = CandidateRanker.from_weights(served.source, choose_execution("native", "bfloat16"))
    Golden.from_weights(served.source).check_ranker(ranker, served.extractor)
    assert ranker.execution.backend == "native"
    whole = ranker.rank(features, state, served.rows(features), None, tier, 40)
    plain = served.ranker.rank(features, state, served.rows(features), None, tier, 40)
    by_candidate = [each.scores[np.argsort(each.order)] for each in (whole, plain)]
    assert float(np.abs(by_candidate[0] - by_candidate[1]).max()) <= tolerance(served.config, "bfloat16")
    few = served.features(list(range(1, 6)))
    part = ranker.rank(few, state, served.rows(few), None, tier, 5)
    np.testing.assert_array_equal(part.scores[np.argsort(part.order)], by_candidate[0][:5])


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_any_number_of_shards_gives_the_same_bits(world: _World, num_shards: int) -> None:
    candidates: list[EntityId] = list(range(1, 30))
    expected = world.rank(candidates, _history(6), num_shards=1)
    found = world.rank(candidates, _history(6), num_shards=num_shards)
    for field in ("order", "scores", "values", "full_pass", "levels"):
        np.testing.assert_array_equal(getattr(found, field), getattr(expected, field))


@pytest.fixture(scope="module")
def served() -> _World:
    return _World(RankerConfig())


@pytest.mark.parametrize("tier", ["light", "standard", "full"])
def test_the_bits_of_a_score_do_not_depend_on_the_other_candidates(served: _World, tier: str) -> None:
    whole = served.rank(list(range(1, 41)), _history(4), tier=tier)
    score_of = dict(zip((whole.order + 1).tolist(), whole.scores, strict=True))
    random = np.random.default_rng(0)
    for count in (1, 2, 3, 5, 8, 33):
        items = (random.permutation(40)[:count] + 1).tolist()
        part = served.rank(items, _history(4), tier=tier)
        for position, score in zip(part.order.tolist(), part.scores, strict=True):
            np.testing.assert_array_equal(score, score_of[items[position]])


@pytest.mark.parametrize("length", [0, 1])
def test_short_histories_give_finite_scores(world: _World, length: int) -> None:
    ranking = world.rank(list(range(1, 20)), _history(length))
    assert np.isfinite(ranking.scores).all()
    assert ((ranking.scores > 0) & (ranking.scores < 1)).all()
    assert (ranking.scores[:, 1] <= ranking.scores[:, 0]).all()


def test_only_the_newest_events_count(world: _World) -> None:
    history = _history(20)
    length = world.config.history_length
    newest = dataclasses.replace(
        history,
        item_keys=history.item_keys[-length:],
        weights=history.weights[-length:],
        timestamps_s=history.timestamps_s[-length:],
    )
    expected, found = (world.encoder.encode(h, 3, "web", _NOW_S) for h in (newest, history))
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_cold_start_stands_in_for_a_missing_state(world: _World) -> None:
    candidates: list[EntityId] = list(range(1, 15))
    features = world.features(candidates)
    ranking = world.ranker.rank(features, None, world.rows(features), None, "full", 20)
    answer = world.oracle.rank(3, candidates, _history(5), "web", _NOW_S, "full", 20, cold_start=True)
    assert ranking.cold_start
    assert compare(answer, ranking, world.tolerance) == []
    unknown = world.encoder.encode(UserHistory.empty(), "nobody", "nowhere", 5)
    for name, value in world.ranker.cold_start.items():
        np.testing.assert_array_equal(unknown[name], value)


def test_a_missing_shard_equals_the_oracle_without_it(world: _World) -> None:
    candidates: list[EntityId] = list(range(1, 25))
    features = world.features(candidates)
    state = world.encoder.encode(_history(5), 3, "web", _NOW_S)
    rows = world.rows(features)
    for missing in (0, 1):
        kept = [None if shard == missing else part for shard, part in enumerate(rows)]
        ranking = world.ranker.rank(features, state, kept, None, "full", 30)
        answer = world.oracle.rank(
            3, candidates, _history(5), "web", _NOW_S, "full", 30, missing_shards=[missing], num_shards=2
        )
        assert ranking.missing_shards == (missing,)
        assert compare(answer, ranking, world.tolerance) == []


def test_embeddings_equal_the_oracle_and_lie_in_range(world: _World) -> None:
    candidates: list[EntityId] = list(range(1, 12))
    features = world.features(candidates)
    state = world.encoder.encode(_history(5), 3, "web", _NOW_S)
    positions = np.array([7, 0, 3], np.int32)
    found = world.ranker.embed(features, positions, state, world.rows(features))
    expected = world.oracle.embed(3, candidates, _history(5), "web", _NOW_S)[positions]
    np.testing.assert_allclose(found, expected, rtol=0, atol=world.tolerance)
    assert (np.abs(found) <= 1).all()


def test_read_only_inputs_are_served(world: _World) -> None:
    features = world.features(list(range(1, 8)))
    state = world.encoder.encode(_history(3), 3, "web", _NOW_S)
    rows = world.rows(features)
    speculative = _speculative(7, world.config.speculative_width, 0)
    expected = world.ranker.rank(features, state, rows, speculative, "full", 7)
    arrays: list[npt.NDArray[Any]] = [*state.values(), speculative.vectors, speculative.levels, features.candidate_keys]
    arrays += [value for part in rows for value in part.rows.values()]
    for array in arrays:
        array.flags.writeable = False
    found = world.ranker.rank(features, state, rows, speculative, "full", 7)
    np.testing.assert_array_equal(found.scores, expected.scores)


def test_unknown_tier_is_refused(world: _World) -> None:
    with pytest.raises(InvalidRequestError, match=r"tier must be one of \['full', 'light', 'standard'\], is 'huge'"):
        world.rank([1], _history(1), tier="huge")


def test_scores_that_are_not_finite_never_leave(world: _World) -> None:
    features = world.features([1, 2])
    state = world.encoder.encode(_history(3), 3, "web", _NOW_S)
    broken = state | {"first": np.full_like(state["first"], np.nan)}
    with pytest.raises(StageUnavailableError, match="not finite"):
        world.ranker.rank(features, broken, world.rows(features), None, "full", 2)


@pytest.mark.parametrize("shard", [-1, 2])
def test_a_shard_that_is_not_in_the_plan_is_refused(world: _World, shard: int) -> None:
    with pytest.raises(ValueError, match=rf"shard must be in \[0, 2\), is {shard}"):
        TableShard(world.source, shard, 2)


def test_weights_of_another_size_are_refused(world: _World) -> None:
    wide = TINY.model_copy(update={"head_width": 9})
    with pytest.raises(WeightsError, match="do not fit their model"):
        load_network(MemorySource("v", world.source.groups), wide)


@pytest.mark.parametrize("micro_batch", [8, 16, 2**31])
def test_a_full_pass_in_micro_batches_gives_the_same_bits(world: _World, micro_batch: int) -> None:
    features, state = world.features(range(1, 41)), world.encoder.encode(_history(5), 3, "web", _NOW_S)
    rows, calls = world.rows(features), []
    whole = world.ranker.rank(features, state, rows, None, "full", 40)
    steps = Steps(micro_batch, lambda: calls.append(micro_batch))
    found = world.ranker.rank(features, state, rows, None, "full", 40, steps)
    np.testing.assert_array_equal(found.scores, whole.scores)
    np.testing.assert_array_equal(found.order, whole.order)
    assert len(calls) == (2 if micro_batch == 8 else 1), (
        "after the first pass, and between batches of the 9 of the head"
    )


def test_ranking_ends_where_its_checkpoint_says_so(world: _World) -> None:
    features = world.features(range(1, 41))

    def stop() -> None:
        raise StageUnavailableError("nobody waits", stage="ranking:full")

    with pytest.raises(StageUnavailableError, match="nobody waits"):
        world.ranker.rank(features, None, world.rows(features), None, "full", 40, Steps(8, stop))


def _asks(world: _World) -> list[RankAsk]:
    """Requests of several sizes; two histories are full, one is short, one user is unknown."""
    asks = []
    for number, (count, length) in enumerate([(20, 14), (33, 14), (7, 3), (12, None)]):
        features = world.features(range(number + 1, number + 1 + count))
        state = None if length is None else world.encoder.encode(_history(length, number), number, "web", _NOW_S)
        asks.append(RankAsk(features, state, world.rows(features), None, 10))
    return asks


@pytest.mark.parametrize("tier", ["light", "standard", "full"])
def test_requests_ranked_together_get_what_they_get_alone(served: _World, tier: str) -> None:
    asks = _asks(served)
    expected = [served.ranker.rank(ask.features, ask.state, ask.rows, ask.speculative, tier, ask.limit) for ask in asks]
    for found, each in zip(served.ranker.rank_together(asks, tier), expected, strict=True):
        assert isinstance(found, Ranking)
        np.testing.assert_allclose(found.scores, each.scores, atol=served.tolerance)
        assert found.order.tolist() == each.order.tolist()
        assert (found.cold_start, found.full_pass.tolist()) == (each.cold_start, each.full_pass.tolist())


def test_a_bad_request_leaves_the_others_of_its_batch_as_they_are(world: _World) -> None:
    asks = _asks(world)
    alone = world.ranker.rank_together(asks, "full")
    bad_rows = [dataclasses.replace(part, rows={}) for part in asks[1].rows if part is not None]
    bad_state = {name: np.full_like(tensor, np.nan) for name, tensor in (asks[0].state or {}).items()}
    bad = [dataclasses.replace(asks[1], rows=bad_rows), dataclasses.replace(asks[0], state=bad_state)]

    mixed = world.ranker.rank_together([asks[0], *bad, *asks[1:]], "full")

    assert isinstance(mixed[1], InvalidRequestError)
    assert isinstance(mixed[2], StageUnavailableError)
    for found, expected in zip([mixed[0], *mixed[3:]], alone, strict=True):
        assert isinstance(found, Ranking)
        assert isinstance(expected, Ranking)
        np.testing.assert_allclose(found.scores, expected.scores, atol=world.tolerance)
        assert found.order.tolist() == expected.order.tolist()
