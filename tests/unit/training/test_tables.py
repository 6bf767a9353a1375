"""Published rows in fewer bytes: what the shards of the new version give is what its oracle computes with."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from models.config import RankerConfig
from models.embedding.plan import choose_hot_rows
from models.features import FeatureExtractor
from models.golden import Golden
from models.random_weights import TINY
from models.stations import TableShard
from shared.errors import ConfigError
from shared.weights import WeightStore
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import TrainConfig
from training.loop import train
from training.model import TrainedModel
from training.publish import publish
from training.tables import store_tables

CONFIG = TrainConfig(name="tiny", dataset="synthetic", threads=1, batch_rows=256, train_share=0.05, model=TINY)


@pytest.fixture(scope="module")
def model() -> TrainedModel:
    return train(CONFIG, tiny_dataset())


@pytest.fixture
def store(model: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightStore:
    monkeypatch.setattr("training.tables.dataset_of", lambda *_: tiny_dataset())
    store = WeightStore(str(tmp_path))
    publish(model, CONFIG, tiny_dataset(), [], store, 1.0)
    return store


def test_reads_are_those_of_the_training_events(model: TrainedModel) -> None:
    dataset, index = tiny_dataset(), model.index
    events = dataset.log.rows(np.flatnonzero(dataset.log.timestamp_s < dataset.split.valid.timestamp_s[0]))
    places = dataset.catalog.positions(events.item_id)
    for table, rows in (("item", index.item_rows), ("year", index.item_years)):
        expected = np.bincount(rows[places], minlength=index.num_rows[table])
        np.testing.assert_array_equal(index.reads[table], expected)
    genres = np.concatenate([index.catalog.attributes(dataset.catalog.item_id[[place]]).genre_rows for place in places])
    np.testing.assert_array_equal(index.reads["genre"], np.bincount(genres, minlength=index.num_rows["genre"]))


def test_a_version_with_int8_rows_and_hot_rows(store: WeightStore, tmp_path: Path) -> None:
    old = store.latest()
    text = io.StringIO()
    made, report = store_tables(store, old, tmp_path, "int8", 7, Console(file=text, width=120))

    reader = store.open(made)
    config = RankerConfig.model_validate(reader.json("model"))
    assert {config.table(name).row_type for name in config.candidate_tables} == {"int8"}
    item = next(cost for cost in report.tables if cost.name == "item")
    assert (item.hot_rows, item.bytes_after) == (7, item.rows * (TINY.width + 4))
    assert 0 < item.hot_share < 1
    assert 0 < item.error_max < 0.01
    assert set(report.quality) == set(TINY.tiers)
    assert reader.json("metrics")["tables"]["source"] == old
    for word in ("int8", "item", "NE", made):
        assert word in text.getvalue()

    dataset = tiny_dataset()
    trained = TrainedModel.from_weights(reader, dataset)
    chosen = reader.tensors("placement")["item.hot"]
    np.testing.assert_array_equal(chosen, choose_hot_rows(trained.index.reads["item"], 7))
    extractor = FeatureExtractor.from_weights(reader)
    for shard in range(2):
        Golden.from_weights(reader).check_shard(TableShard(reader, shard, 2, "fbgemm"), extractor)


def test_rows_are_not_rounded_twice(store: WeightStore, tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    made, _ = store_tables(store, store.latest(), tmp_path, "fp16", 0, console)
    with pytest.raises(ConfigError, match=f"rows of {made} must be fp32"):
        store_tables(store, made, tmp_path, "int4", 0, console)
