"""Imitates the speculative cache while training: embeddings that were made earlier, of which only some are found.

In serving an embedding of a (user, item) pair was computed at some earlier request, from the history of that time. So
here it is computed from the history without its newest events, as of the first of those, and never from anything that a
row's own request has not seen yet; the row's label has no way in.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.schema.speculative import HitLevel
from training.config import SpeculativeTrainingConfig
from training.data import HistoryReader, RequestBatch


@dataclass(frozen=True, slots=True)
class CacheAnswer:
    """What the cache says about C candidates.

    Args:
        vectors: float32 [C, E], zero where the level is NONE.
        levels: int64 [C], ``HitLevel``.
    """

    vectors: npt.NDArray[np.float32]
    levels: npt.NDArray[np.int64]


def stale_batch(
    batch: RequestBatch, reader: HistoryReader, events_max: int, random: np.random.Generator
) -> RequestBatch:
    """Return the batch as it would have been 1 to ``events_max`` events earlier, request by request.

    A request without history stays as it is: nothing earlier is known.

    Args:
        batch: R requests, histories aligned right.
        reader: What read them.
        events_max: Most events that a stale request has not seen.
        random: Draws how many, for each request.
    """
    history = batch.history
    num_unseen = np.minimum(random.integers(1, events_max + 1, len(history)), np.maximum(history.lengths, 1))
    # The time of the oldest unseen event; events of the same second as it are not strictly earlier, so they go too.
    first_unseen_s = history.timestamps_s[np.arange(len(history)), history.timestamps_s.shape[1] - num_unseen]
    as_of_s = np.where(history.lengths > 0, first_unseen_s, batch.timestamp_s)
    return dataclasses.replace(batch, timestamp_s=as_of_s, history=reader.read_at(batch.user_index, as_of_s))


def cache_answer(
    embeddings: npt.NDArray[np.float32],
    batch: RequestBatch,
    group_ids: npt.NDArray[np.int64],
    config: SpeculativeTrainingConfig,
    random: np.random.Generator,
) -> CacheAnswer:
    """Let some candidates find their own embedding, some the mean of their user's in the same ad group, others none.

    Args:
        embeddings: float32 [C, E], each candidate's own stale embedding.
        batch: The batch.
        group_ids: int64 [C], ad group of each candidate.
        config: Shares of the levels.
        random: Draws the levels.
    """
    draw = random.random(len(embeddings))
    means, has_mean = earlier_means(embeddings, batch.user_index[batch.request_index], group_ids, batch.request_index)
    exact = draw < config.exact_share
    by_user = ~exact & (draw < config.exact_share + config.user_share) & has_mean
    levels = np.where(exact, int(HitLevel.EXACT), np.where(by_user, int(HitLevel.USER_AGGREGATE), int(HitLevel.NONE)))
    vectors = np.where(exact[:, None], embeddings, np.where(by_user[:, None], means, np.float32(0.0)))
    return CacheAnswer(vectors.astype(np.float32), levels.astype(np.int64))


def earlier_means(
    vectors: npt.NDArray[np.float32],
    users: npt.NDArray[np.integer],
    group_ids: npt.NDArray[np.int64],
    request_index: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Return the mean over the vectors of earlier requests of the same user and group.

    Args:
        vectors: float32 [C, E].
        users: integers [C].
        group_ids: int64 [C].
        request_index: int64 [C], in time order.

    Returns:
        Means float32 [C, E], zero where there is nothing earlier, and bool [C], whether there is.
    """
    order = np.lexsort((request_index, group_ids, users))
    user, group, request = users[order], group_ids[order], request_index[order]
    new_run = np.ones(len(order), np.bool_)
    new_run[1:] = (user[1:] != user[:-1]) | (group[1:] != group[:-1])
    new_request = new_run.copy()
    new_request[1:] |= request[1:] != request[:-1]
    places = np.arange(len(order))
    run_start = np.maximum.accumulate(np.where(new_run, places, 0))
    request_start = np.maximum.accumulate(np.where(new_request, places, 0))
    before = np.concatenate([np.zeros((1, vectors.shape[1])), np.cumsum(vectors[order], axis=0, dtype=np.float64)])
    count = request_start - run_start
    mean = (before[request_start] - before[run_start]) / np.maximum(count, 1)[:, None]
    means = np.empty_like(vectors)
    has = np.empty(len(order), np.bool_)
    means[order], has[order] = mean, count > 0
    return means, has
