"""The process that owns a mesh: what it does in which order, with a Ray that is none."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.config import MeshConfig
from cluster.environment import MeshFolders
from cluster.histories import HistorySource, Loaded
from cluster.loading import HistoryRequest, LoadRequest
from cluster.owner import Owner, OwnRequest
from cluster.state import MeshState, read_state
from shared.errors import StageUnavailableError
from shared.log import JsonLogger
from shared.weights import WeightStore
from training.data import SyntheticConfig


class ReadyHandler(BaseHTTPRequestHandler):
    """Answers 200 to everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


class FakeNode:
    """A Ray with one station that answers when it is told to run, and that ends by itself."""

    def __init__(self, told: list[str], port: int) -> None:
        self._told = told
        self._port = port
        self._server: HTTPServer | None = None
        self.served: str | None = None

    def start(self) -> None:
        self._told.append("Ray")

    def open_door(self) -> None:
        self._told.append("door")

    def run(self, place: object, progress: Callable[[int, int], None]) -> None:
        self._told.append("stations")
        self._server = HTTPServer(("127.0.0.1", self._port), ReadyHandler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.001}).start()
        progress(1, 1)

    def follow(self, place: object, folder: Path, logger: JsonLogger) -> None:
        return

    def ended(self) -> str:
        return "its raylet has ended"

    def replace_dead(self, logger: JsonLogger) -> None:
        return

    def stop(self, logger: JsonLogger) -> None:
        self._told.append("end")
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class FakeLoad:
    """A load that ends at once, well or not."""

    def __init__(self, told: list[str], failure: str) -> None:
        self._told = told
        self._failure = failure

    def __call__(self, request: LoadRequest) -> FakeLoad:
        self._told.append("load")
        assert request.log.namespace == "unit"
        return self

    def wait(self, pause: Callable[[], object]) -> Loaded:
        if self._failure:
            raise StageUnavailableError(self._failure, stage="histories")
        self._told.append("loaded")
        return Loaded(12, 3_456, already=False)


class Trial:
    """Runs an owner in this process.

    Attributes:
        told: What was done, in order.
        states: What the mesh said of itself, in order.
    """

    def __init__(self, var_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.var_dir = var_dir
        self.told: list[str] = []
        self.states: list[MeshState] = []
        self._patch = monkeypatch
        with HTTPServer(("127.0.0.1", 0), ReadyHandler) as server:
            self._port = server.server_port
        monkeypatch.setattr("cluster.node.Node", lambda *_: FakeNode(self.told, self._port))
        monkeypatch.setattr("cluster.owner._start_guardian", lambda _: SimpleNamespace(pid=0))
        monkeypatch.setattr("cluster.owner.export", lambda _: None)
        writer = WeightStore(var_dir / "weights").writer("v1")
        writer.add_json("model", {"tiers": []})
        writer.commit()

    def run(self, *, loads: bool = True, failure: str = "") -> int:
        """Run one mesh until its Ray ends; returns the exit status."""
        self._patch.setattr("cluster.owner.HistoryLoad", FakeLoad(self.told, failure))
        write = MeshState.write

        def keep(state: MeshState, path: Path) -> None:
            self.states.append(state)
            write(state, path)

        self._patch.setattr(MeshState, "write", keep)
        source = HistorySource("synthetic", "seed 3", 5, 10)
        wanted = HistoryRequest(source=source, seed=3, synthetic=SyntheticConfig(), data_dir=self.var_dir)
        config = MeshConfig.model_validate(
            {"name": "unit", "http": {"port": self._port, "ingress": "proxy"}, "store": {"kind": "redis"}}
        )
        return Owner(
            OwnRequest(
                config=config,
                var_dir=self.var_dir,
                mesh_id="0123456789abcdef",
                attached=False,
                histories=wanted if loads else None,
            )
        ).run()

    @property
    def last(self) -> MeshState | None:
        """What is left in the folder of the mesh."""
        return read_state(MeshFolders.of(self.var_dir, "unit").state)


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield Trial(tmp_path, monkeypatch)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_no_station_starts_before_the_histories_are_there(trial: Trial) -> None:
    assert trial.run() == 1
    assert trial.told == ["load", "Ray", "door", "loaded", "stations", "end"]
    ready = next(state for state in trial.states if state.phase == "ready")
    assert ready.histories == "3,456 events of 12 users loaded"


def test_a_mesh_without_its_histories_is_never_ready(trial: Trial) -> None:
    assert trial.run(failure="the store refuses") == 1
    assert "stations" not in trial.told
    assert "ready" not in {state.phase for state in trial.states}
    assert trial.last is not None
    assert (trial.last.phase, trial.last.doing) == ("failed", "the store refuses")


def test_a_mesh_that_was_not_asked_to_load_does_not(trial: Trial) -> None:
    trial.run(loads=False)
    assert trial.told == ["Ray", "door", "stations", "end"]


def test_the_end_of_ray_ends_the_mesh_and_says_so(trial: Trial) -> None:
    assert trial.run(loads=False) == 1
    assert trial.last is not None
    assert (trial.last.phase, trial.last.doing) == ("failed", "Ray has ended: its raylet has ended")
    assert not trial.last.runs
