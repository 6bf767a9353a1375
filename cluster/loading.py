"""Loads histories into the store of a mesh while its stations start."""

from __future__ import annotations

import asyncio
import threading
from typing import cast

from cluster.config import MeshConfig
from cluster.histories import HistorySource, HistoryStore, Loaded
from cluster.local import Mesh
from shared.errors import RankMeshError, StoreUnavailableError
from shared.settings import Settings
from shared.userlog import RedisUserLog, StoreConfig, connect
from training.config import TrainConfig
from training.data import Dataset, DatasetName, load_dataset


class HistoryThread(threading.Thread):
    """Loads histories beside the start of the stations; start it when the store answers.

    Args:
        config: The mesh.
        settings: Folders.
        source: What is to be in the store.
        train: How the weights were made; says how to load their data.
    """

    def __init__(self, config: MeshConfig, settings: Settings, source: HistorySource, train: TrainConfig) -> None:
        super().__init__(name="histories", daemon=True)
        self._config = config
        self._settings = settings
        self._source = source
        self._train = train
        self._loaded: Loaded | None = None
        self._error: RankMeshError | None = None

    def run(self) -> None:
        """Load; keep what came of it."""
        try:
            self._loaded = asyncio.run(self._load())
        except RankMeshError as error:
            self._error = error

    def result(self) -> Loaded:
        """Wait for the end and return what is in the store.

        Raises:
            RankMeshError: the load failed.
        """
        self.join()
        if self._error is not None:
            raise self._error
        if self._loaded is None:
            raise StoreUnavailableError("histories were not loaded; the error above says why")
        return self._loaded

    async def _load(self) -> Loaded:
        client = connect(self._store_config())
        try:
            log = RedisUserLog(client, self._config.user_log())
            store = HistoryStore(client, log, self._config.name)
            return await store.find(self._source) or await store.load(self._source, self._dataset())
        finally:
            await client.aclose()

    def _store_config(self) -> StoreConfig:
        section = self._config.store
        if section.kind == "redis":
            return section.client
        mesh = Mesh.find(self._config.name, self._settings.var_dir)
        if mesh is None or not mesh.store_url:
            raise StoreUnavailableError("the mesh ended before its store could be used")
        return section.client.model_copy(update={"url": mesh.store_url, "topology": "single"})

    def _dataset(self) -> Dataset:
        # By the name in the weights: a stand-in stays one, also when the real data could be fetched by now.
        name = cast(DatasetName, self._source.dataset)
        return load_dataset(name, self._settings.data_dir, seed=self._train.seed, synthetic=self._train.synthetic)
