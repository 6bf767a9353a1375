"""Estimated sizes of messages against those that the stations really make."""

from __future__ import annotations

import numpy as np
import pytest

from models.config import EncoderConfig, RankerConfig
from models.features import FeatureExtractor
from models.payload import PayloadSizes
from models.source import MemorySource
from models.stations import RequestEncoder, TableShard
from shared.schema.features import FeatureBatch
from shared.schema.stamp import Stamp
from shared.schema.user import UserHistory
from tests.helpers.weights import random_weights

SMALL = RankerConfig(width=16, history_length=20, encoder=EncoderConfig(num_events=20))
WIDE = RankerConfig(width=64, history_length=300, num_layers=4, encoder=EncoderConfig(num_events=200, num_summaries=6))


@pytest.fixture(scope="module", params=[SMALL, WIDE], ids=["small", "wide"])
def source(request: pytest.FixtureRequest) -> MemorySource:
    return random_weights(request.param, seed=0)


def config_of(source: MemorySource) -> RankerConfig:
    return RankerConfig.model_validate(source.json("model"))


def test_a_full_user_state_is_as_large_as_estimated(source: MemorySource) -> None:
    config = config_of(source)
    length = config.history_length
    history = UserHistory(
        np.arange(length, dtype=np.int64), np.ones(length, np.float32), np.arange(length, dtype=np.int64), length, {}
    )
    state = RequestEncoder(source).encode(history, "u", "s", as_of_s=10 * length)
    found = sum(tensor.nbytes for tensor in state.values())
    assert 0.9 * found <= PayloadSizes.of(config).state_bytes <= 1.1 * found


def test_no_message_about_candidates_is_larger_than_estimated(source: MemorySource) -> None:
    extractor = FeatureExtractor.from_weights(source)
    candidates = list(range(1, 101))
    made = extractor.extract_ids(candidates)
    features: FeatureBatch = made.stamped(Stamp("r", source.version, "preprocess", "preprocess-0", 0.0))
    estimate = len(candidates) * PayloadSizes.of(config_of(source)).candidate_bytes
    own = features.candidate_keys.nbytes + features.group_keys.nbytes + features.dense.nbytes
    own += sum(rows.nbytes for rows in features.unique_rows.values())
    own += sum(each.values.nbytes + each.offsets.nbytes for each in features.features.values())
    rows = [TableShard(source, shard, 2).lookup(features) for shard in range(2)]
    largest = max(own, *(sum(part.nbytes for part in shard.values()) for shard in rows))
    # The few rows that all candidates share (genres, out of vocabulary) come on top.
    assert largest <= 1.5 * estimate
