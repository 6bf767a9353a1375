"""Which weights a run uses again."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.config import MeshConfig, WeightsConfig
from cluster.weights import Choice, find_trained, one_trainer, weights_url
from models.config import WEIGHTS_FORMAT
from shared.weights import Derivation, WeightStore
from training.config import TrainConfig

QUICK = TrainConfig(name="quick")


def publish(store: WeightStore, version: str, derived: Derivation | None = None, **documents: Any) -> None:
    with store.writer(version, derived=derived) as writer:
        writer.add_tensors("dense", {"w": np.zeros(1, np.float32)})
        for name, document in documents.items():
            writer.add_json(name, document)
        writer.commit()


def metrics(config: TrainConfig, dataset: str = "ml-1m") -> dict[str, Any]:
    evaluations = [
        {"split": "test", "history_mode": mode, "tier": "full", "objectives": {"click": {"auc": auc}}}
        for mode, auc in (("pub", 0.79), ("strict", 0.78))
    ]
    run = config.model_dump(mode="json")
    return {"format": WEIGHTS_FORMAT, "dataset": dataset, "train": run, "evaluations": evaluations}


def test_the_newest_version_of_exactly_this_run(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    assert find_trained(store, QUICK) is None
    publish(store, "20260101-000000-aaaaaaaa", metrics=metrics(QUICK))
    publish(store, "20260102-000000-bbbbbbbb", metrics=metrics(QUICK))
    publish(store, "20260103-000000-cccccccc", metrics=metrics(TrainConfig(name="quick", seed=1)))
    found = find_trained(store, QUICK)
    assert found is not None
    assert (found.version, found.is_new) == ("20260102-000000-bbbbbbbb", False)


def test_versions_of_something_else_are_passed_over(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    publish(store, "20260101-000000-aaaaaaaa", metrics=metrics(QUICK))
    publish(store, "20260102-000000-bbbbbbbb")
    publish(store, "20260103-000000-cccccccc", metrics={"note": "by hand"})
    publish(store, "20260104-000000-dddddddd", metrics={**metrics(QUICK), "format": WEIGHTS_FORMAT - 1})
    found = find_trained(store, QUICK)
    assert found is not None
    assert found.version == "20260101-000000-aaaaaaaa"


def test_a_version_that_was_made_of_another_is_not_taken_for_a_trained_one(tmp_path: Path) -> None:
    store, trained, smaller = WeightStore(tmp_path), "20260101-000000-aaaaaaaa", "20260102-000000-bbbbbbbb"
    publish(store, trained, metrics=metrics(QUICK))
    publish(store, smaller, Derivation(parent=trained, made_by="simplify"), metrics=metrics(QUICK))
    found = find_trained(store, QUICK)
    assert found is not None
    assert found.version == trained


@pytest.mark.parametrize(("dataset", "stands_in"), [("ml-1m", False), ("synthetic", True)])
def test_a_stand_in_for_the_data_is_known(dataset: str, stands_in: bool) -> None:
    assert Choice("v", metrics(QUICK, dataset), is_new=False).stands_in is stands_in


def test_quality_is_that_of_serving() -> None:
    assert Choice("v", metrics(QUICK), is_new=False).quality()["auc"] == 0.78
    assert Choice("v", {"train": {}}, is_new=False).quality() == {}
    assert Choice("v", metrics(QUICK), is_new=False).quality("conversion") == {}


def test_weights_lie_among_the_run_time_files_unless_told(tmp_path: Path) -> None:
    assert weights_url(MeshConfig(), tmp_path) == str(tmp_path / "weights")
    elsewhere = MeshConfig(weights=WeightsConfig(url="s3://bucket/weights"))
    assert weights_url(elsewhere, tmp_path) == "s3://bucket/weights"


def test_a_second_run_of_the_same_configuration_waits_for_the_first(tmp_path: Path) -> None:
    told: list[bool] = []
    waits = threading.Event()

    def second() -> None:
        with one_trainer(tmp_path, QUICK, waits.set) as waited:
            told.append(waited)

    with one_trainer(tmp_path, QUICK, waits.set) as waited:
        assert not waited
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(10)
        assert told == []
        with one_trainer(tmp_path, TrainConfig(name="another"), waits.set) as other_waited:
            assert not other_waited
    thread.join(10)
    assert told == [True]


def test_a_trainer_that_was_killed_holds_nobody_up(tmp_path: Path) -> None:
    program = (
        "import fcntl, pathlib, sys, time; file = pathlib.Path(sys.argv[1]).open('a');"
        "fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    )
    with one_trainer(tmp_path, QUICK, lambda: None):
        lock = next((tmp_path / "locks").iterdir())
    with subprocess.Popen([sys.executable, "-c", program, str(lock)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with one_trainer(tmp_path, QUICK, child.kill) as waited:
            assert waited
