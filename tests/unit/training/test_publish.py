"""A trained model written to a store and read back is the same model, and its stations answer the golden request."""

from __future__ import annotations

import numpy as np
import pytest

from models.features import FeatureExtractor
from models.golden import Golden
from models.oracle import Oracle, compare, tolerance
from models.random_weights import TINY
from models.stations import CandidateRanker, RequestEncoder, TableShard
from shared.errors import WeightsError
from shared.schema.embeddings import EmbeddingRows
from shared.schema.stamp import Stamp
from shared.weights import WeightReader, WeightStore
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import TrainConfig
from training.evaluate import evaluate, predict
from training.loop import train
from training.model import TrainedModel
from training.publish import golden_request, publish

_CONFIG = TrainConfig(name="tiny", dataset="synthetic", threads=1, batch_rows=256, train_share=0.05, model=TINY)


@pytest.fixture(scope="module")
def model() -> TrainedModel:
    return train(_CONFIG, tiny_dataset())


@pytest.fixture(scope="module")
def reader(model: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> WeightReader:
    store = WeightStore(str(tmp_path_factory.mktemp("weights")))
    evaluations = [evaluate(model, tiny_dataset(), "valid", "strict", "full")]
    version = publish(model, _CONFIG, tiny_dataset(), evaluations, store, 1.5)
    assert store.versions() == [version]
    return store.open(version)


def test_read_back_it_predicts_the_same(model: TrainedModel, reader: WeightReader) -> None:
    again = TrainedModel.from_weights(reader, tiny_dataset())
    rows = tiny_dataset().split.test.select(slice(0, 300))
    expected, found = (predict(m, tiny_dataset(), rows, "strict") for m in (model, again))
    assert set(found) == set(expected) == {0, 1, 2}
    for depth, values in expected.items():
        np.testing.assert_array_equal(found[depth], values)
        np.testing.assert_array_equal(
            again.calibration.apply(found[depth], depth), model.calibration.apply(values, depth)
        )


def test_documents_say_what_it_is(reader: WeightReader) -> None:
    metrics = reader.json("metrics")
    assert TrainConfig.model_validate(metrics["train"]) == _CONFIG
    assert metrics["train_s"] == 1.5
    assert metrics["dataset"] == "synthetic"
    assert 0 < metrics["evaluations"][0]["objectives"]["click"]["ne"] < 2


def test_stations_answer_the_golden_request(reader: WeightReader) -> None:
    golden, extractor = Golden.from_weights(reader), FeatureExtractor.from_weights(reader)
    golden.check_extractor(extractor)
    for shard in range(3):
        golden.check_shard(TableShard(reader, shard, 3), extractor)
    golden.check_encoder(RequestEncoder.from_weights(reader))
    golden.check_ranker(CandidateRanker.from_weights(reader), extractor)


def test_stations_of_other_weights_do_not(model: TrainedModel, reader: WeightReader) -> None:
    golden, extractor = Golden.from_weights(reader), FeatureExtractor.from_weights(reader)
    other = train(_CONFIG.model_copy(update={"seed": 9}), tiny_dataset()).source()
    with pytest.raises(WeightsError, match=r"do not answer the golden request: rows\.item on shard 0"):
        golden.check_shard(TableShard(other, 0, 1), extractor)
    with pytest.raises(WeightsError, match="golden request: state"):
        golden.check_encoder(RequestEncoder.from_weights(other))
    with pytest.raises(WeightsError, match="golden request: scores"):
        golden.check_ranker(CandidateRanker.from_weights(other), extractor)
    other.groups["catalog"] = other.groups["catalog"] | {"group_keys": other.groups["catalog"]["group_keys"] + 1}
    with pytest.raises(WeightsError, match=r"golden request: features\.group_keys"):
        golden.check_extractor(FeatureExtractor.from_weights(other))


def test_published_stations_equal_the_oracle_and_training(model: TrainedModel, reader: WeightReader) -> None:
    dataset = tiny_dataset()
    extractor, encoder = FeatureExtractor.from_weights(reader), RequestEncoder.from_weights(reader)
    ranker, oracle = CandidateRanker.from_weights(reader), Oracle.from_weights(reader)
    stamp = Stamp("r", reader.version, "test", "0", 0.0)
    golden = golden_request(dataset, TINY.history_length)
    features = extractor.extract_ids(golden.candidates).stamped(stamp)
    state = encoder.encode(golden.history, golden.user, golden.surface, golden.as_of_s)
    rows = [EmbeddingRows(stamp, 0, TableShard(reader, 0, 1).lookup(features))]
    ranking = ranker.rank(features, state, rows, None, "full", 50)
    answer = oracle.rank(golden.user, golden.candidates, golden.history, golden.surface, golden.as_of_s, "full", 50)
    assert compare(answer, ranking, tolerance(TINY)) == []
    # The first test row is the golden request's first candidate: training's own path must say the same of it.
    trained = predict(model, dataset, dataset.split.test.select(slice(0, 1)), "strict")
    chance = 1 / (1 + np.exp(-model.calibration.apply(trained[2], 2)[0, 0]))
    assert ranking.scores[ranking.order.tolist().index(0), 0] == pytest.approx(chance, abs=tolerance(TINY))
