"""Histories are loaded by a process of the mesh itself: what came of it, and what is said when nothing did."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.histories import HistorySource
from cluster.loading import HistoryLoad, HistoryRequest, LoadRequest
from shared.clock import SystemClock
from shared.errors import ConfigError, StageUnavailableError
from shared.userlog import EmbeddedStore, EmbeddedStoreConfig, StoreConfig, UserLogConfig
from training.data import SyntheticConfig, load_dataset

SYNTHETIC = SyntheticConfig(num_events=1_000, num_users=40, num_ads=60, num_groups=6)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    with EmbeddedStore(tmp_path / "store", EmbeddedStoreConfig(die_with_parent=True)) as store:
        yield store.url


def request(store: str, data_dir: Path, dataset: str = "synthetic") -> LoadRequest:
    made = load_dataset("synthetic", data_dir, seed=3, synthetic=SYNTHETIC)
    source = HistorySource(dataset, made.provenance, made.split.test_start_s, 100)
    wanted = HistoryRequest(source=source, seed=3, synthetic=SYNTHETIC, data_dir=data_dir)
    return LoadRequest(wanted=wanted, store=StoreConfig(url=store), log=UserLogConfig(namespace="mesh"))


async def test_it_is_loaded_once(store: str, tmp_path: Path) -> None:
    first = await request(store, tmp_path).load()
    assert (first.num_users, first.already) == (40, False)
    assert first.num_events > 100
    again = await request(store, tmp_path).load()
    assert (again.num_users, again.num_events, again.already) == (40, first.num_events, True)


@pytest.mark.slow
def test_a_process_of_its_own_does_it(store: str, tmp_path: Path) -> None:
    load = HistoryLoad(request(store, tmp_path))
    loaded = load.wait(lambda: SystemClock().block_s(0.01))
    assert (loaded.num_users, loaded.already) == (40, False)


@pytest.mark.slow
def test_what_went_wrong_is_said(tmp_path: Path) -> None:
    load = HistoryLoad(request("redis://127.0.0.1:1/0", tmp_path))
    with pytest.raises(StageUnavailableError, match=r"histories could not be loaded: .*read load mark"):
        load.wait(lambda: SystemClock().block_s(0.01))


def test_who_waits_may_end_the_wait(tmp_path: Path) -> None:
    def stop() -> None:
        raise ConfigError("to be ended")

    load = HistoryLoad(request("redis://127.0.0.1:1/0", tmp_path))
    with pytest.raises(ConfigError):
        load.wait(stop)
    assert load._process.returncode == -signal.SIGKILL
