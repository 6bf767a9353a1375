"""Measures delegation: one training step of a ranker on several local workers against the same step on one."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from models.config import RankerConfig
from models.inputs import COUNTER_FEATURES, DENSE_FEATURES, NUM_GAP_BUCKETS, NUM_WEIGHT_BUCKETS
from models.layers.layout import CandidateLayout
from models.ranker import CandidateTensors, Ranker, RequestTensors
from training.parallel.delegation import DelegatedParameters, module_of

NUM_REQUESTS = 32
CANDIDATES_EACH = 4
NUM_GENRES = 19


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """One step of all workers.

    Args:
        threshold: Elements from which a parameter is sharded.
        num_replicated: Replicated elements.
        num_sharded: Sharded elements.
        num_collectives: Collectives of a step.
        num_bytes: Bytes of their buffers.
        error: Largest difference of a parameter after the step to the step of one worker, over the largest change that
            the step made.
    """

    threshold: int
    num_replicated: int
    num_sharded: int
    num_collectives: int
    num_bytes: int
    error: float


@dataclass(frozen=True, slots=True)
class _Batch:
    requests: RequestTensors
    candidates: CandidateTensors
    labels: Tensor

    def part(self, rank: int, num_workers: int) -> _Batch:
        """Return one worker's requests with their candidates."""
        requests = slice(rank * NUM_REQUESTS // num_workers, (rank + 1) * NUM_REQUESTS // num_workers)
        rows = slice(requests.start * CANDIDATES_EACH, requests.stop * CANDIDATES_EACH)
        own, other = self.requests, self.candidates
        return _Batch(
            RequestTensors(*(getattr(own, name)[requests] for name in RequestTensors.__slots__)),
            CandidateTensors(*(getattr(other, name)[rows] for name in CandidateTensors.__slots__)),
            self.labels[rows],
        )


def measure_delegation(
    config: RankerConfig, num_rows: dict[str, int], thresholds: Sequence[int], num_workers: int = 2
) -> list[StepMeasurement]:
    """Run one step of gradient descent at each threshold, on local processes over gloo.

    Args:
        config: The ranker.
        num_rows: Table -> rows.
        thresholds: See ``Delegation``; 0 shards everything.
        num_workers: Processes; divides ``NUM_REQUESTS``.

    Returns:
        One measurement a threshold.

    Raises:
        RuntimeError: a worker failed; what it failed of is on standard error.
        ValueError: the workers cannot share the requests evenly.
    """
    if NUM_REQUESTS % num_workers:
        raise ValueError(f"num_workers must divide {NUM_REQUESTS}, is {num_workers}")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = (num_workers, folder, config.model_dump_json(), num_rows, tuple(thresholds))
        workers = [context.Process(target=_work, args=(rank, *given)) for rank in range(num_workers)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise RuntimeError(f"workers ended with {[worker.exitcode for worker in workers]}")
        found = torch.load(Path(folder) / "found.pt", weights_only=True)
    return [StepMeasurement(**each) for each in found]


def _work(
    rank: int, num_workers: int, folder: str, config_json: str, num_rows: dict[str, int], thresholds: tuple[int, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_workers)
    try:
        config = RankerConfig.model_validate_json(config_json)
        found = [_step(config, num_rows, threshold) for threshold in thresholds]
        if rank == 0:
            torch.save(found, Path(folder) / "found.pt")
    finally:
        dist.destroy_process_group()


def _step(config: RankerConfig, num_rows: dict[str, int], threshold: int) -> dict[str, float]:
    batch = _random_batch(config, num_rows)
    before, alone = (_ranker(config, num_rows) for _ in range(2))
    _descend(alone, batch, list(alone.parameters()))
    ranker = _ranker(config, num_rows)
    parameters = DelegatedParameters(ranker, module_of, threshold)
    parameters.gather()
    own = batch.part(dist.get_rank(), dist.get_world_size())
    torch.autograd.backward(_loss(ranker, own))
    parameters.reduce()
    traffic = (parameters.traffic.num_collectives, parameters.traffic.num_bytes)
    torch.optim.SGD(parameters.trainable, lr=1.0).step()
    parameters.gather()
    with torch.no_grad():
        changes = [(a - b).abs().max() for a, b in zip(alone.parameters(), before.parameters(), strict=True)]
        errors = [(a - b).abs().max() for a, b in zip(alone.parameters(), ranker.parameters(), strict=True)]
    return {
        "threshold": threshold,
        "num_replicated": parameters.delegation.num_replicated,
        "num_sharded": parameters.delegation.num_sharded,
        "num_collectives": traffic[0],
        "num_bytes": traffic[1],
        "error": float(torch.stack(errors).max() / torch.stack(changes).max()),
    }


def _descend(ranker: Ranker, batch: _Batch, parameters: list[nn.Parameter]) -> None:
    torch.autograd.backward(_loss(ranker, batch))
    torch.optim.SGD(parameters, lr=1.0).step()


def _loss(ranker: Ranker, batch: _Batch) -> Tensor:
    """Return the mean likelihood of all depths; equal parts of a batch average to the whole's."""
    num_requests = len(batch.requests.dense)
    layout = CandidateLayout.of(torch.arange(num_requests).repeat_interleave(CANDIDATES_EACH), num_requests)
    state, pooled = ranker.encode(batch.requests), ranker.pool(batch.candidates)
    counters = batch.candidates.counters
    logits, _ = ranker.network.all_depths(state, pooled, counters, None, None, layout)
    losses = [functional.binary_cross_entropy_with_logits(each, batch.labels) for each in logits.values()]
    return torch.stack(losses).sum()


def _ranker(config: RankerConfig, num_rows: dict[str, int]) -> Ranker:
    torch.manual_seed(0)
    genres = np.zeros((num_rows["item"], num_rows["genre"]), np.float32)
    genres[:, 0] = 1.0
    return Ranker(config, num_rows, genres)


def _random_batch(config: RankerConfig, num_rows: dict[str, int]) -> _Batch:
    random = torch.Generator().manual_seed(1)
    num_candidates, length = NUM_REQUESTS * CANDIDATES_EACH, config.encoder.num_events

    def rows(table: str, *shape: int) -> Tensor:
        return torch.randint(num_rows[table], shape, generator=random)

    features = [rows(feature.table, NUM_REQUESTS) for feature in config.request_features]
    return _Batch(
        RequestTensors(
            feature_rows=torch.stack(features, dim=1),
            item_rows=rows("item", NUM_REQUESTS, length),
            weight_buckets=torch.randint(NUM_WEIGHT_BUCKETS, (NUM_REQUESTS, length), generator=random),
            pause_buckets=torch.randint(NUM_GAP_BUCKETS, (NUM_REQUESTS, length), generator=random),
            clock=torch.rand(NUM_REQUESTS, length, generator=random).double().cumsum(1),
            log_gaps=torch.rand(NUM_REQUESTS, length, generator=random).double() * 16,
            mask=torch.ones(NUM_REQUESTS, length, dtype=torch.bool),
            dense=torch.randn(NUM_REQUESTS, len(DENSE_FEATURES), generator=random),
            taste_rows=rows("item", NUM_REQUESTS, config.history_length),
            taste_weights=torch.randn(NUM_REQUESTS, config.history_length, generator=random),
        ),
        CandidateTensors(
            item_rows=rows("item", num_candidates),
            genre_weights=torch.rand(num_candidates, num_rows["genre"], generator=random),
            year_rows=rows("year", num_candidates),
            counters=torch.randn(num_candidates, len(COUNTER_FEATURES), generator=random),
        ),
        torch.randint(2, (num_candidates, config.num_objectives), generator=random).float(),
    )
