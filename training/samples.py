"""What a person needs to look at a mesh: a few held-out real requests, and the names of the items.

Both are published as JSON documents beside the weights, so that a mesh can show real titles without the data set:
``samples`` (``sample_document``) and ``display`` (``display_document``).
"""

from __future__ import annotations

from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from training.data import Dataset, HeldOutRequest, HistoryReader, held_out_requests

Document: TypeAlias = dict[str, Any]

NUM_SAMPLES = 20
NUM_NEXT = 5
"""Items of each sample that the user really chose next."""

NUM_CANDIDATES = 500
NUM_HISTORY = 10
"""Events of each sample that are shown."""

SHORT_HISTORY = 20
"""Users with fewer earlier events count as new."""

NUM_SHORT = 4
"""Samples of new users, put last: what the mesh says about someone it hardly knows belongs in the picture."""

SEED = 2_000
_LOOKED_AT_MAX = 2_000


def sample_document(dataset: Dataset, num_samples: int = NUM_SAMPLES, seed: int = SEED) -> Document:
    """Choose held-out requests of different users, those with a longer past first.

    A small catalog gives fewer candidates a request; a data set without users that qualify gives no sample.

    Args:
        dataset: Data with a split.
        num_samples: Most requests to choose, at least 1.
        seed: Same dataset and seed: same document.

    Returns:
        ``dataset``, ``provenance``, ``as_of_s`` (start of the held-out period) and ``samples``: a list of
        ``user_id``, ``timestamp_s``, ``surface``, ``profile``, ``num_earlier``, ``history`` (newest first: ``item_id``,
        ``weight``, ``timestamp_s``), ``candidates`` (item ids in random order), ``true_next`` (those that the user
        chose next) and ``next_weights`` (the ratings they then gave, same order).
    """
    num_sampled = min(NUM_CANDIDATES - NUM_NEXT, max(len(dataset.catalog) // 2 - NUM_NEXT, 0))
    num_short = min(NUM_SHORT, num_samples // 4)
    known: list[HeldOutRequest] = []
    new: list[HeldOutRequest] = []
    for request in islice(held_out_requests(dataset, NUM_NEXT, num_sampled, seed), _LOOKED_AT_MAX):
        group, limit = (new, num_short) if request.num_earlier < SHORT_HISTORY else (known, num_samples - num_short)
        if len(group) < limit:
            group.append(request)
        if len(new) + len(known) == num_samples:
            break
    return {
        "dataset": dataset.name,
        "provenance": dataset.provenance,
        "as_of_s": dataset.split.test_start_s,
        "samples": [_sample(dataset, request) for request in (*known, *new)],
    }


def display_document(dataset: Dataset) -> Document:
    """Return ``items``: item id as text -> ``title``, ``year`` (0 when unknown) and ``genres``, for every item."""
    catalog = dataset.catalog
    return {
        "items": {
            str(item_id): {
                "title": catalog.title[position],
                "year": int(catalog.year[position]),
                "genres": list(catalog.genres(position)),
            }
            for position, item_id in enumerate(catalog.item_id.tolist())
        }
    }


def _sample(dataset: Dataset, request: HeldOutRequest) -> Document:
    user = np.array([request.user_index])
    history = HistoryReader(dataset.log, NUM_HISTORY, "strict").read_at(user, request.timestamp_s)
    length = int(history.lengths[0])
    columns = (history.item_ids[0, :length], history.ratings[0, :length], history.timestamps_s[0, :length])
    events = zip(*(column[::-1].tolist() for column in columns), strict=True)
    return {
        "user_id": request.user_id,
        "timestamp_s": request.timestamp_s,
        "surface": request.surface,
        "profile": dataset.users.profile(request.user_index),
        "num_earlier": request.num_earlier,
        "history": [{"item_id": item, "weight": weight, "timestamp_s": second} for item, weight, second in events],
        "candidates": request.candidates.tolist(),
        "true_next": request.candidates[request.is_next].tolist(),
        "next_weights": request.ratings[request.is_next].tolist(),
    }
