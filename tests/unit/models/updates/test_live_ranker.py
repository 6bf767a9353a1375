"""The dense half of a station: built from each state, checked by the golden request that the update brings."""

from __future__ import annotations

import numpy as np
import pytest

from models.features import FeatureExtractor
from models.golden import DOCUMENT, Golden
from models.random_weights import TINY, random_weights
from models.source import MemorySource, WeightSource
from models.stations import CandidateRanker
from models.updates import LiveConfig, LiveSource, LiveWeights, built_by, live_weights
from shared.errors import WeightsError
from shared.weights.deltas import Delta
from shared.weights.state import TensorState


def checked(source: WeightSource) -> CandidateRanker:
    """Build the candidate path, as a ranking replica does."""
    ranker = CandidateRanker.from_weights(source)
    Golden.from_weights(source).check_ranker(ranker, FeatureExtractor.from_weights(source))
    return ranker


def station(base: MemorySource) -> LiveWeights:
    config = LiveConfig(block_rows=4, keep_states=2)
    return live_weights(base, base.groups, config, build=built_by(base, checked), documents=(DOCUMENT,))


@pytest.fixture(scope="module")
def versions() -> tuple[MemorySource, MemorySource]:
    """Two sets of weights of one form, each with its golden request."""
    return random_weights(TINY, seed=0, version="v"), random_weights(TINY, seed=1, version="w")


def step(base: MemorySource, target: MemorySource, groups: tuple[str, ...] | None = None) -> Delta:
    new = {name: (target if groups is None or name in groups else base).groups[name] for name in base.groups}
    state = TensorState("v", base.groups, base.documents)
    return state.step(new, "now", {DOCUMENT: target.documents[DOCUMENT]} if groups is None else None)


def test_a_network_of_another_state_serves_after_the_switch(versions: tuple[MemorySource, MemorySource]) -> None:
    base, target = versions
    weights = station(base)
    old = weights.state
    weights.apply(step(base, target))
    assert weights.state.stamp == "v+1"
    Golden.from_weights(target).check_ranker(weights.state.built, FeatureExtractor.from_weights(target))
    with pytest.raises(WeightsError):
        Golden.from_weights(target).check_ranker(old.built, FeatureExtractor.from_weights(target))
    for group, tensors in target.groups.items():
        for name, array in LiveSource(base, weights.state).tensors(group).items():
            np.testing.assert_array_equal(array, tensors[name])
    weights.roll_back("v")
    Golden.from_weights(base).check_ranker(weights.state.built, FeatureExtractor.from_weights(base))


def test_an_update_that_does_not_answer_its_golden_request_is_refused(
    versions: tuple[MemorySource, MemorySource],
) -> None:
    base, target = versions
    weights = station(base)
    built = weights.state.built
    with pytest.raises(WeightsError):
        weights.apply(step(base, target, groups=("dense",)))  # other weights, the old answers
    assert weights.state.built is built
    assert weights.state.stamp == "v"
    assert weights.status().reason.startswith("v+1: ")
    assert "golden" in weights.status().reason
    weights.apply(step(base, target))
    assert weights.status().reason == ""
