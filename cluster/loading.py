"""Loads histories into the store of a mesh before its stations start: ``python -m cluster.loading``, run by its owner.

A process of its own: it carries the mesh's id and so ends with the mesh, the memory of a data set goes with it, and it
does not depend on the command that asked for the mesh, which may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import cast

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from cluster.histories import HistorySource, HistoryStore, Loaded
from shared.errors import RankMeshError, StageUnavailableError
from shared.userlog import RedisUserLog, StoreConfig, UserLogConfig, connect
from training.data import DatasetName, SyntheticConfig, load_dataset

_ROOT = Path(__file__).parents[1]


class HistoryRequest(BaseModel):
    """The histories that a mesh is to have before it serves.

    Args:
        source: What is to be in the store.
        seed: Of the data set.
        synthetic: The synthetic log, where the data set is one.
        data_dir: Folder of training data.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: HistorySource
    seed: int
    synthetic: SyntheticConfig
    data_dir: Path


class LoadRequest(BaseModel):
    """One load, as its process reads it.

    Args:
        wanted: What to load.
        store: Where to.
        log: Limits and namespace of the user log.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    wanted: HistoryRequest
    store: StoreConfig
    log: UserLogConfig

    async def load(self) -> Loaded:
        """Load what the store does not hold yet.

        Raises:
            RankMeshError: there are no data, or the store cannot be reached or refuses.
        """
        client = connect(self.store)
        try:
            store = HistoryStore(client, RedisUserLog(client, self.log), self.log.namespace)
            source = self.wanted.source
            if (found := await store.find(source)) is not None:
                return found
            # By the name in the weights: a stand-in stays one, also when the real data could be fetched by now.
            dataset = load_dataset(
                cast(DatasetName, source.dataset),
                self.wanted.data_dir,
                seed=self.wanted.seed,
                synthetic=self.wanted.synthetic,
            )
            return await store.load(source, dataset)
        finally:
            await client.aclose()


class HistoryLoad:
    """A load that runs.

    Args:
        request: What, and where to.
    """

    def __init__(self, request: LoadRequest) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.loading"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT
        )
        assert self._process.stdin is not None  # a pipe was asked for
        try:
            self._process.stdin.write(request.model_dump_json().encode())
            self._process.stdin.close()
        except BrokenPipeError:  # it ended before it read: ``wait`` says so
            pass

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def wait(self, pause: Callable[[], object]) -> Loaded:
        """Wait for the end and return what is in the store.

        Args:
            pause: Called again and again meanwhile; waits a little, and what it raises ends the wait.

        Raises:
            StageUnavailableError: the load failed; says why.
        """
        try:
            while self._process.poll() is None:
                pause()
        except BaseException:
            self._end()
            raise
        assert self._process.stdout is not None  # a pipe was asked for
        with self._process.stdout as stdout:
            said = stdout.read()
        if self._process.returncode == 0:
            return TypeAdapter(Loaded).validate_json(said.splitlines()[-1])
        try:
            reason = str(json.loads(said.splitlines()[-1])["error"])
        except (IndexError, ValueError):
            reason = f"its process ended with status {self._process.returncode}"
        raise StageUnavailableError(f"histories could not be loaded: {reason}", stage="histories")


def main() -> int:
    """Load what the request on standard input names; the last line on standard output says what came of it."""
    try:
        request = LoadRequest.model_validate_json(sys.stdin.buffer.read())
        loaded = asyncio.run(request.load())
    except (RankMeshError, ValidationError) as error:
        message = error.message if isinstance(error, RankMeshError) else "the request breaks a rule"
        sys.stdout.write(json.dumps({"error": message}) + "\n")
        return 1
    sys.stdout.write(json.dumps(asdict(loaded)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
