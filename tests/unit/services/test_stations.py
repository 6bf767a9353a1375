"""Preprocess, embedding, ranking and foundation: what each refuses, counts and stamps. Their numbers: ``test_mesh``."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from models.features import FeatureExtractor
from models.stations import CandidateRanker, Ranking, TableShard
from services.embedding.config import EmbeddingConfig
from services.embedding.service import EmbeddingService, ShardRows
from services.preprocess.config import PreprocessConfig
from services.preprocess.service import PreprocessService
from services.ranking.config import RankingConfig
from services.ranking.service import RankingService
from services.speculative.config import FoundationConfig
from services.speculative.foundation import FoundationService
from shared.clock import ManualClock, SystemClock
from shared.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    StageUnavailableError,
    VersionMismatchError,
)
from shared.log import JsonLogger
from shared.schema.embeddings import EmbeddingRows
from shared.schema.features import FeatureBatch, PreprocessTask
from shared.schema.ranking import RankedList, RankTask
from shared.schema.speculative import SpeculativeTask
from shared.weights.held import OneVersion
from shared.wire import CandidateBatch, encode_batch
from tests.helpers.waiting import until
from tests.helpers.weights import random_weights

SOURCE = random_weights()
VERSION = SOURCE.version
EXTRACTOR = FeatureExtractor.from_weights(SOURCE)
RANKER = CandidateRanker.from_weights(SOURCE)
SHARDS = [TableShard(SOURCE, shard, 2) for shard in range(2)]


def logger() -> JsonLogger:
    return JsonLogger(stream=io.StringIO())


def preprocess(**config: Any) -> PreprocessService:
    return PreprocessService(
        PreprocessConfig(**config), OneVersion(VERSION, EXTRACTOR), ManualClock(), "preprocess-0", logger()
    )


def shard(index: int) -> EmbeddingService:
    config = EmbeddingConfig(shard=index, num_shards=2)
    return EmbeddingService(
        config, OneVersion[ShardRows](VERSION, SHARDS[index]), ManualClock(), f"embedding-{index}-0", logger()
    )


def pre_task(candidates: list[Any] | None = None, **fields: Any) -> PreprocessTask:
    values = {"request_id": "r/1", "version": VERSION, "surface": "web", "remaining_ms": 100.0, **fields}
    block = encode_batch(CandidateBatch.of([1, 2, 999] if candidates is None else candidates))
    return PreprocessTask(block=block, **values)


async def inputs(candidates: list[Any] | None = None, **fields: Any) -> tuple[FeatureBatch, list[EmbeddingRows]]:
    """Return the features of a request and the rows of both shards."""
    features = await preprocess().extract(pre_task(candidates, **fields))
    return features, [await shard(index).lookup(features, 100.0) for index in range(2)]


def rank_task(**fields: Any) -> RankTask:
    return RankTask(**{"request_id": "r/1", "version": VERSION, "limit": 10, "remaining_ms": 1_000.0, **fields})


@pytest.fixture
async def ranking() -> AsyncIterator[RankingService]:
    service = RankingService(
        RankingConfig(tier="full"), OneVersion(VERSION, RANKER), ManualClock(), "ranking-full-0", logger()
    )
    yield service
    await service.aclose()


@pytest.fixture
async def foundation() -> AsyncIterator[FoundationService]:
    config = FoundationConfig(candidates_max=2)
    service = FoundationService(config, OneVersion(VERSION, RANKER), ManualClock(), "foundation-0", logger())
    yield service
    await service.aclose()


class CountingExecutor(ThreadPoolExecutor):
    """Counts what it is given."""

    count = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Count one more."""
        self.count += 1
        return super().submit(fn, *args, **kwargs)


async def test_embeddings_are_computed_where_the_replica_says() -> None:
    features, rows = await inputs([1, 2, 3])
    with CountingExecutor(1) as executor:
        service = FoundationService(
            FoundationConfig(), OneVersion(VERSION, RANKER), ManualClock(), "foundation-0", logger(), executor
        )
        await service.precompute(spec_task(), np.array([0], np.int32), features, None, *rows)
        await service.aclose()
    assert executor.count == 1


async def test_features_are_stamped_and_unknown_ids_counted() -> None:
    service = preprocess()
    features = await service.extract(pre_task())

    assert (features.stamp.request_id, features.stamp.station, features.stamp.replica) == (
        "r/1",
        "preprocess",
        "preprocess-0",
    )
    assert features.num_oov["item_id"] == 1
    assert service.status()["counters"]["oov_ids.item_id"] == 1
    assert b'rankmesh_preprocess_calls_total{method="extract",outcome="ok"} 1.0' in service.metrics()


@pytest.mark.parametrize(("count", "is_accepted"), [(0, False), (1, True), (3, True), (4, True), (5, False)])
async def test_the_number_of_candidates_is_bounded(count: int, is_accepted: bool) -> None:
    service = preprocess(candidates_max=4)
    if is_accepted:
        assert (await service.extract(pre_task(list(range(count))))).num_candidates == count
    else:
        with pytest.raises(InvalidRequestError) as caught:
            await service.extract(pre_task(list(range(count))))
        assert (caught.value.context["limit"], caught.value.context["value"]) == (4, count)


async def test_each_row_comes_from_exactly_one_shard() -> None:
    features, rows = await inputs(list(range(1, 30)))

    for table, unique in features.unique_rows.items():
        assert sum(len(part.rows.get(table, ())) for part in rows) == len(unique)
    assert [part.shard for part in rows] == [0, 1]
    assert {part.stamp.request_id for part in rows} == {"r/1"}


@pytest.mark.parametrize("row", [10**6, 2**40, -2])
async def test_a_row_outside_its_table_is_refused(row: int) -> None:
    features, _ = await inputs()
    features.unique_rows["item"][-1] = row
    with pytest.raises(InvalidRequestError):
        await shard(row % 2).lookup(features, 100.0)


async def test_expired_calls_do_no_work(ranking: RankingService, foundation: FoundationService) -> None:
    features, rows = await inputs()
    with pytest.raises(DeadlineExceededError):
        await preprocess().extract(pre_task(remaining_ms=0.0))
    with pytest.raises(DeadlineExceededError):
        await shard(0).lookup(features, 0.0)
    with pytest.raises(DeadlineExceededError):
        await ranking.rank(rank_task(remaining_ms=0.0), features, None, None, *rows)
    with pytest.raises(DeadlineExceededError):
        await foundation.precompute(spec_task(remaining_ms=0.0), np.array([0], np.int32), features, None, *rows)


async def test_another_version_is_refused_everywhere(ranking: RankingService, foundation: FoundationService) -> None:
    features, rows = await inputs()
    with pytest.raises(VersionMismatchError):
        await preprocess().extract(pre_task(version="other"))
    with pytest.raises(VersionMismatchError):
        await ranking.rank(rank_task(version="other"), features, None, None, *rows)
    with pytest.raises(VersionMismatchError):
        await foundation.precompute(spec_task(version="other"), np.array([0], np.int32), features, None, *rows)


async def test_another_requests_rows_are_never_ranked(ranking: RankingService, foundation: FoundationService) -> None:
    features, rows = await inputs()
    _, foreign = await inputs(request_id="r/2")
    with pytest.raises(VersionMismatchError, match=r"embedding:1 .* brought request r/2"):
        await ranking.rank(rank_task(), features, None, None, rows[0], foreign[1])
    with pytest.raises(VersionMismatchError):
        await foundation.precompute(spec_task(), np.array([0], np.int32), features, None, rows[0], foreign[1])


async def test_a_ranked_list_says_what_it_was_made_of(ranking: RankingService) -> None:
    features, rows = await inputs()

    ranked = await ranking.rank(rank_task(limit=2), features, None, None, rows[0], None)

    assert [stamp.station for stamp in ranked.upstream] == ["preprocess", "embedding:0"]
    assert (ranked.missing_shards, ranked.cold_start, ranked.history_length) == ((1,), True, 0)
    assert len(ranked.order) == 2
    counters = ranking.status()["counters"]
    assert (counters["candidates.full.first"], counters["candidates.full.full"]) == (3, 2)


class _NotFinite(CandidateRanker):
    """A ranker that made a number that is none."""

    def __init__(self) -> None:
        pass

    def rank(self, features: FeatureBatch, *args: Any, **kwargs: Any) -> Ranking:
        ranking = RANKER.rank(features, *args, **kwargs)
        ranking.scores[0, 0] = np.nan
        return ranking


async def test_scores_that_are_not_finite_never_leave() -> None:
    service = RankingService(
        RankingConfig(tier="full"), OneVersion(VERSION, _NotFinite()), ManualClock(), "r-0", logger()
    )
    features, rows = await inputs()
    with pytest.raises(StageUnavailableError, match="not finite"):
        await service.rank(rank_task(), features, None, None, *rows)
    await service.aclose()


async def test_one_bad_request_of_many_fails_alone(ranking: RankingService) -> None:
    well = await inputs()
    _, foreign = await inputs(request_id="r/2")
    calls = [
        ranking.rank(rank_task(), well[0], None, None, *(foreign if index == 7 else well[1])) for index in range(20)
    ]

    results = await asyncio.gather(*calls, return_exceptions=True)

    assert [index for index, result in enumerate(results) if isinstance(result, Exception)] == [7]


async def test_ranking_that_is_cancelled_while_it_waits_is_dropped(ranking: RankingService) -> None:
    features, rows = await inputs()
    tasks = [asyncio.create_task(ranking.rank(rank_task(), features, None, None, *rows)) for _ in range(20)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)

    await until(lambda: ranking.status()["counters"]["queued"] == 0)
    counters = ranking.status()["counters"]
    assert (counters["in_flight"], counters["calls.rank.cancelled"]) == (0, 20)


def test_a_tier_that_the_model_lacks_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="tier must be one of"):
        RankingService.from_weights(RankingConfig(tier="huge"), SOURCE, ManualClock(), "r-0")


@pytest.mark.parametrize(("shard", "num_shards"), [(2, 2), (5, 1)])
def test_a_shard_that_does_not_exist_is_refused(shard: int, num_shards: int) -> None:
    with pytest.raises(ValueError, match="shard must be below"):
        EmbeddingConfig(shard=shard, num_shards=num_shards)


def spec_task(**fields: Any) -> SpeculativeTask:
    return SpeculativeTask(
        **{"request_id": "r/1", "version": VERSION, "user": 1, "as_of_s": 77, "remaining_ms": 1_000.0, **fields}
    )


async def test_the_foundation_worker_names_what_it_computed(foundation: FoundationService) -> None:
    features, rows = await inputs()

    batch = await foundation.precompute(spec_task(), np.array([2, 0], np.int32), features, None, *rows)

    assert batch.candidate_keys.tolist() == [999, 1]
    assert batch.group_keys.tolist() == features.group_keys[[2, 0]].tolist()
    assert (batch.as_of_s, batch.stamp.request_id, batch.stamp.station) == (77, "r/1", "foundation")
    np.testing.assert_array_equal(batch.vectors, RANKER.embed(features, np.array([2, 0], np.int32), None, rows))


@pytest.mark.parametrize("positions", [[], [0, 1, 2], [3], [-1]])
async def test_positions_outside_the_request_or_too_many_are_refused(
    foundation: FoundationService, positions: list[int]
) -> None:
    features, rows = await inputs()
    with pytest.raises(InvalidRequestError) as caught:
        await foundation.precompute(spec_task(), np.array(positions, np.int32), features, None, *rows)
    assert caught.value.context["field"] == "positions"


async def test_ranked_in_batches_each_request_gets_its_own_answer_or_error() -> None:
    """What meets while the replica is busy is ranked as one; the results never cross."""
    config = RankingConfig(tier="full", batch_max=4)
    batched = RankingService(config, OneVersion(VERSION, RANKER), SystemClock(), "ranking-full-0", logger())
    alone = RankingService(RankingConfig(tier="full"), OneVersion(VERSION, RANKER), SystemClock(), "r", logger())
    requests = []
    for number in range(6):
        features, rows = await inputs(list(range(number + 1, number + 9)), request_id=f"r/{number}")
        bad = number == 3
        kept = [dataclasses.replace(part, rows={}) for part in rows] if bad else rows
        requests.append((rank_task(request_id=f"r/{number}"), features, kept))

    found = await asyncio.gather(
        *(batched.rank(task, features, None, None, *rows) for task, features, rows in requests), return_exceptions=True
    )

    for number, (answer, request) in enumerate(zip(found, requests, strict=True)):
        if number == 3:
            assert isinstance(answer, InvalidRequestError)
            continue
        assert isinstance(answer, RankedList)
        task, features, kept = request
        expected = await alone.rank(task, features, None, None, *kept)
        assert answer.stamp.request_id == f"r/{number}"
        assert answer.order.tolist() == expected.order.tolist()
        np.testing.assert_allclose(answer.scores, expected.scores, atol=1e-6)
    await batched.aclose()
    await alone.aclose()
