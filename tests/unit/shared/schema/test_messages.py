"""The messages between stations: frozen, slotted, and the same after a trip to another process."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from shared.errors import VersionMismatchError
from shared.schema.embeddings import EmbeddingRows, PooledEmbeddings
from shared.schema.features import FeatureBatch, JaggedIds, PreprocessTask
from shared.schema.ranking import RankedList, RankTask
from shared.schema.speculative import (
    HitLevel,
    PrecomputedBatch,
    SpeculativeEmbedding,
    SpeculativeEmbeddings,
    SpeculativeTask,
)
from shared.schema.stamp import Stamp, check_version
from shared.schema.user import EncodeTask, UserHistory, UserState

STAMP = Stamp("r", "v", "embedding:1", "a#1", 0.5)
IDS = np.arange(3, dtype=np.int64)
VECTORS = np.ones((3, 2), np.float32)

MESSAGES: list[Any] = [
    STAMP,
    PreprocessTask("r", "v", "ml-1m", b"block", 50.0),
    JaggedIds(np.zeros(2, np.int32), np.array([0, 2, 2], np.int32)),
    FeatureBatch(STAMP, IDS, IDS, {"item": IDS}, {}, VECTORS, {"item_id": 0}),
    EmbeddingRows(STAMP, 1, {"item": VECTORS}),
    PooledEmbeddings(("item_id",), VECTORS[:, None], (1,)),
    EncodeTask("r", "v", "u", "ml-1m", 10, 50.0),
    UserHistory(IDS, VECTORS[:, 0], IDS, 3, {"age": "25"}),
    UserState(STAMP, {"x": VECTORS}, 3, 2, 10),
    SpeculativeTask("r", "v", 1, 10, 50.0),
    SpeculativeEmbeddings(STAMP, VECTORS, np.zeros(3, np.int8)),
    SpeculativeEmbedding(1, 2, VECTORS[0], 10),
    PrecomputedBatch(STAMP, IDS, IDS, VECTORS, 10),
    RankTask("r", "v", 10, 50.0),
    RankedList(
        STAMP, IDS.astype(np.int32), VECTORS, VECTORS[:, 0], IDS > 0, IDS.astype(np.int8), (), False, "", 3, (STAMP,),
        0.1, 0.2, {},
    ),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_trip(message: Any) -> None:
    copy = pickle.loads(pickle.dumps(message, protocol=5))
    assert type(copy) is type(message)
    np.testing.assert_equal(dataclasses.asdict(copy), dataclasses.asdict(message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_cannot_be_changed(message: Any) -> None:
    name = dataclasses.fields(message)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(message, name, None)
    assert not hasattr(message, "__dict__")


def test_versions_are_never_mixed() -> None:
    check_version("v1", "v1", "ranking:full")
    with pytest.raises(VersionMismatchError, match="ranking:full holds weights v2, asked for v1") as caught:
        check_version("v1", "v2", "ranking:full")
    assert caught.value.context == {"asked": "v1", "held": "v2", "station": "ranking:full"}
    assert caught.value.retryable


def test_an_empty_history() -> None:
    history = UserHistory.empty()
    assert len(history) == history.num_total == 0
    assert history.profile == {}
    assert history.item_keys.dtype == history.timestamps_s.dtype == np.int64
    assert history.weights.dtype == np.float32
    assert UserHistory.empty().profile is not history.profile


def test_counts() -> None:
    assert len(UserHistory(IDS, VECTORS[:, 0], IDS, 7)) == 3
    assert FeatureBatch(STAMP, IDS, IDS, {}, {}, VECTORS, {}).num_candidates == 3


def test_hit_levels_have_names_and_an_order() -> None:
    assert [level.label for level in HitLevel] == ["none", "user", "exact"]
    assert HitLevel.NONE < HitLevel.USER_AGGREGATE < HitLevel.EXACT
    assert HitLevel(int(np.int8(3))) is HitLevel.EXACT
