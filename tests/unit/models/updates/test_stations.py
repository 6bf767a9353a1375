"""What the stations hold of a version follows its deltas, answers for each state apart, and refuses wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.execution_config import REFERENCE
from models.features import FeatureExtractor
from models.golden import Golden
from models.random_weights import TINY
from models.source import MemorySource
from models.stations import CandidateRanker, RequestEncoder, TableShard
from models.updates.live import LiveConfig
from models.updates.series import LiveSeries
from models.updates.stations import encoder_series, ranker_series, shard_series
from shared.errors import VersionMismatchError, WeightsError
from shared.weights import WeightReader, WeightStore
from shared.weights.delta_log import DeltaLog
from shared.weights.errors import DeltaGapError
from tests.helpers.weights import random_weights
from training.deltas import DeltaPublisher, resume_series

CONFIG = LiveConfig(block_rows=4)
SEEDS = (0, 1, 2)


class Published:
    """A version in a store, with deltas to the weights of other seeds."""

    def __init__(self, folder: Path) -> None:
        self.store = WeightStore(folder)
        self.sources = [random_weights(TINY, seed=seed, version="v") for seed in SEEDS]
        with self.store.writer("v") as writer:
            for group, tensors in self.sources[0].groups.items():
                writer.add_tensors(group, tensors)
            for name, document in self.sources[0].documents.items():
                writer.add_json(name, document)
            writer.commit()
        self.log = DeltaLog(self.store, "v")

    @property
    def reader(self) -> WeightReader:
        return self.store.open("v")

    def publisher(self) -> DeltaPublisher:
        return resume_series(self.store, "v")

    def step(self, source: MemorySource, groups: Callable[[str], bool] = lambda name: True) -> str:
        """Publish the step to another source's tensors, of some groups only; returns the stamp."""
        publisher = self.publisher()
        now = publisher.state.groups()
        wanted = {name: source.groups[name] if groups(name) else now[name] for name in now}
        documents = {"golden": source.documents["golden"]} if groups("golden") else {}
        return publisher.publish(wanted, documents).stamp


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return Published(tmp_path)


def features(source: MemorySource) -> Any:
    return Golden.from_weights(source).row_batch()


def shard(published: Published) -> LiveSeries[Any]:
    return shard_series(published.reader, published.log, 1, 2, "fbgemm", CONFIG)


def encoder(published: Published) -> LiveSeries[RequestEncoder]:
    return encoder_series(published.reader, published.log, REFERENCE, CONFIG)


def ranker(published: Published) -> LiveSeries[CandidateRanker]:
    return ranker_series(published.reader, published.log, REFERENCE, None, CONFIG)


MAKERS = (shard, encoder, ranker)


def check(made: Any, source: MemorySource) -> None:
    """Check a part by the golden request of the weights that it should have."""
    golden = Golden.from_weights(source)
    if isinstance(made, CandidateRanker):
        golden.check_ranker(made, FeatureExtractor.from_weights(source))
    elif isinstance(made, RequestEncoder):
        golden.check_encoder(made)
    else:
        expected = TableShard(source, 1, 2).lookup(features(source))
        found = made.lookup(features(source))
        assert {name: rows.tobytes() for name, rows in found.items()} == {
            name: rows.tobytes() for name, rows in expected.items()
        }


@pytest.mark.parametrize("make", MAKERS)
def test_each_held_state_answers_with_its_own_weights(published: Published, make: Any) -> None:
    series = make(published)
    for source in published.sources[1:]:
        published.step(source)
    for sequence in (1, 2):
        series.advance(sequence)
    assert series.stamps() == ("v", "v+1", "v+2")
    for stamp, source in zip(series.stamps(), published.sources, strict=True):
        check(series.at(stamp), source)
    series.keep(["v+1"])
    assert series.stamps() == ("v+1", "v+2")
    with pytest.raises(VersionMismatchError):
        series.at("v")


@pytest.mark.parametrize("make", MAKERS)
def test_a_replica_that_comes_late_takes_the_deltas_at_once(published: Published, make: Any) -> None:
    for source in published.sources[1:]:
        published.step(source)
    series = make(published)
    series.advance(2)
    assert series.stamps() == ("v", "v+2"), "nobody asks for a state in between"
    check(series.at("v+2"), published.sources[2])


@pytest.mark.parametrize("make", MAKERS)
def test_what_does_not_give_its_golden_answers_is_refused(published: Published, make: Any) -> None:
    series = make(published)
    wrong = random_weights(TINY, seed=1, version="v")
    wrong.groups["golden"] = {
        name: value + 1 if value.dtype == np.float32 else value for name, value in wrong.groups["golden"].items()
    }
    published.step(wrong)
    with pytest.raises(WeightsError, match="golden"):
        series.advance(1)
    assert series.stamps() == ("v",)
    check(series.at("v"), published.sources[0])


def test_rows_alone_build_no_network(published: Published) -> None:
    request_side, candidate_side = encoder(published), ranker(published)
    before = candidate_side.at("v"), request_side.weights.state.built
    published.step(published.sources[1], lambda name: name == "tables/item")
    request_side.advance(1)
    assert request_side.weights.state.built is before[1]
    candidate_side.advance(1)
    assert candidate_side.at("v+1") is not before[0], "row 0 changed: it stands in for a missing shard"
    known = random_weights(TINY, seed=2, version="v")
    known.groups["tables/item"]["weight"][0] = published.sources[1].groups["tables/item"]["weight"][0]
    published.step(known, lambda name: name == "tables/item")
    candidate_side.advance(2)
    assert candidate_side.at("v+2") is candidate_side.at("v+1")


def test_an_encoder_reads_the_rows_of_its_state(published: Published) -> None:
    series = encoder(published)
    published.step(published.sources[1], lambda name: name.startswith("tables/"))
    series.advance(1)
    first, second = published.sources[:2]
    tables = {name: part for name, part in second.groups.items() if name.startswith("tables/")}
    mixed = MemorySource("v", first.groups | tables, first.documents)
    request = Golden.from_weights(published.sources[0]).request
    asked = (request.history, request.user, request.surface, request.as_of_s)
    expected = RequestEncoder(mixed).encode(*asked)
    for name, value in series.at("v+1").encode(*asked).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-6, err_msg="mapped files align products otherwise")
    old = RequestEncoder(published.sources[0]).encode(*asked)
    assert any(float(np.abs(old[name] - value).max()) > 0.01 for name, value in expected.items())
    for name, value in series.at("v").encode(*asked).items():
        np.testing.assert_allclose(value, old[name], atol=1e-6)


def test_a_delta_that_is_not_there(published: Published) -> None:
    series = encoder(published)
    published.step(published.sources[1])
    with pytest.raises(DeltaGapError, match="delta 3 of v is asked for, the state is 1"):
        series.advance(3)
