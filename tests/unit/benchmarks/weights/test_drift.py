"""A drifting trainer: its deltas fit, move what they say, and every state can be made again for an oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.weights.drift import Drift, States
from models.features import FeatureExtractor
from models.golden import Golden
from models.stations import CandidateRanker
from shared.errors import WeightsError
from shared.weights import WeightStore
from tests.helpers.updated_mesh import publish_source
from tests.helpers.weights import random_weights

SOURCE = random_weights(version="v")


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    store = WeightStore(tmp_path)
    publish_source(store, SOURCE)
    return store


def drift(store: WeightStore) -> Drift:
    return Drift(store, "v", Golden.from_weights(SOURCE).request, seed=2)


def test_rows_move_and_row_0_stays(store: WeightStore) -> None:
    delta = drift(store).rows(7)
    assert set(delta.rows) == {"tables/item/weight", "tables/user/weight"}
    assert all(len(part.ids) == 7 and part.ids[0] > 0 for part in delta.rows.values())
    assert delta.whole == {}


def test_a_network_that_moves_brings_its_answers_and_a_wrong_one_does_not(store: WeightStore) -> None:
    trainer = drift(store)
    for delta in (trainer.rows(3), trainer.network(), trainer.wrong()):
        trainer.append(delta)
    states = States(store)
    for stamp in ("v", "v+2"):
        source = states.source(stamp)
        extractor = FeatureExtractor.from_weights(source)
        Golden.from_weights(source).check_ranker(CandidateRanker.from_weights(source), extractor)
    wrong = states.source("v+3")
    with pytest.raises(WeightsError, match="golden"):
        Golden.from_weights(wrong).check_ranker(
            CandidateRanker.from_weights(wrong), FeatureExtractor.from_weights(wrong)
        )


def test_every_state_can_be_had_again_in_any_order(store: WeightStore) -> None:
    trainer, weights = drift(store), [SOURCE.groups["tables/item"]["weight"].copy()]
    for _ in range(3):
        delta = trainer.rows(5)
        trainer.append(delta)
        weight = weights[-1].copy()
        weight[delta.rows["tables/item/weight"].ids] = delta.rows["tables/item/weight"].values
        weights.append(weight)
    states = States(store)
    for sequence in (2, 0, 3, 1):
        source = states.source(f"v+{sequence}" if sequence else "v")
        np.testing.assert_array_equal(source.tensors("tables/item")["weight"], weights[sequence])
    with pytest.raises(ValueError, match=r"v\+4 is not in the log, it ends at v\+3"):
        states.source("v+4")
