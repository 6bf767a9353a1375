"""A request whose candidates carry 30 features, and a model that takes them: subject of ``wire`` and ``preprocess``.

Made up, and said so: public data sets with such features may not be redistributed. Ids are drawn from Zipf laws, as ids
of categories and interests are; weights and rates have as many digits as logs keep of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from models.config import CATALOG_FEATURES, FeatureConfig, RankerConfig, TableConfig
from models.random_weights import TINY
from shared.wire import CandidateBatch, Column, IdLists, Numbers

NUM_WEIGHTED, NUM_LISTS, NUM_SINGLE, NUM_NUMBERS = 6, 6, 10, 8
NUM_FEATURES = NUM_WEIGHTED + NUM_LISTS + NUM_SINGLE + NUM_NUMBERS
LENGTH_MAX = 6
IDS_KEPT = 4
"""Ids that the model takes of a list; a third of the lists are longer and are cut."""

NUM_ROWS = 100_003
NUM_BOUNDS = 64
ID_MAX = 10**7
_EXPONENT = 1.3


def feature_names() -> dict[str, tuple[str, ...]]:
    """Return the names of the 30 features by kind."""
    kinds = {"weighted": NUM_WEIGHTED, "list": NUM_LISTS, "single": NUM_SINGLE, "number": NUM_NUMBERS}
    return {kind: tuple(f"{kind}_{index}" for index in range(count)) for kind, count in kinds.items()}


def carrying_config() -> RankerConfig:
    """Return a small ranker with the catalog's three features and these 30, a table each."""
    names = feature_names()
    bounds = tuple(float(bound) for bound in np.linspace(0.02, 8.0, NUM_BOUNDS))
    features = [
        *(FeatureConfig(name=name, table=name, ids_max=IDS_KEPT) for name in names["weighted"] + names["list"]),
        *(FeatureConfig(name=name, table=name) for name in names["single"]),
        *(FeatureConfig(name=name, table=name, number_bounds=bounds) for name in names["number"]),
    ]
    tables = [
        TableConfig(name=feature.name, num_rows=NUM_BOUNDS + 2 if feature.number_bounds else NUM_ROWS)
        for feature in features
    ]
    known = [feature for feature in TINY.candidate_features if feature.name in CATALOG_FEATURES]
    document = TINY.model_dump() | {"tables": [*TINY.tables, *tables], "candidate_features": [*known, *features]}
    return RankerConfig.model_validate(document)


def carrying_batch(num_candidates: int, seed: int) -> CandidateBatch:
    """Return candidates with integer ids that carry all 30 features."""
    rng = np.random.default_rng(seed)
    names = feature_names()

    def lists(is_weighted: bool) -> IdLists:
        offsets = np.concatenate([[0], np.cumsum(rng.integers(0, LENGTH_MAX + 1, num_candidates))]).astype(np.int64)
        ids = np.minimum(rng.zipf(_EXPONENT, offsets[-1]), ID_MAX).astype(np.int64)
        weights = rng.random(offsets[-1]).round(3).astype(np.float32)
        return IdLists(offsets, ids, weights if is_weighted else None)

    features: dict[str, Column] = {name: lists(True) for name in names["weighted"]}
    features |= {name: lists(False) for name in names["list"]}
    single = np.arange(num_candidates + 1, dtype=np.int64)
    for name in names["single"]:
        features[name] = IdLists(single, np.minimum(rng.zipf(_EXPONENT, num_candidates), ID_MAX).astype(np.int64))
    for name in names["number"]:
        features[name] = Numbers(rng.lognormal(0.0, 1.0, num_candidates).round(4).astype(np.float32))
    return CandidateBatch(rng.permutation(ID_MAX)[:num_candidates].astype(np.int64), (), features)


def carrying_rows(batch: CandidateBatch) -> list[dict[str, Any]]:
    """Return what the candidates carry as one map each, the form that JSON takes; numbers with their own digits."""
    rows: list[dict[str, Any]] = [{} for _ in range(len(batch))]
    for name, column in batch.features.items():
        if isinstance(column, Numbers):
            for row, value in zip(rows, column.values.tolist(), strict=True):
                row[name] = round(value, 4)
            continue
        ends, ids = column.offsets.tolist(), column.ids.tolist()
        weights = None if column.weights is None else [round(weight, 3) for weight in column.weights.tolist()]
        for place, row in enumerate(rows):
            own = slice(ends[place], ends[place + 1])
            row[name] = ids[own] if weights is None else {"ids": ids[own], "weights": weights[own]}
    return rows
