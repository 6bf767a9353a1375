"""The embedded server: data that stays, one owner a folder, no orphan. A server starts in 0.1 s."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.clock import SystemClock
from shared.errors import ConfigError, StoreUnavailableError
from shared.schema.api import Event
from shared.userlog import EmbeddedStore, EmbeddedStoreConfig, RedisUserLog, StoreConfig, UserLogConfig, connect
from shared.userlog.embedded import StoreProcess, find_server

CONFIG = EmbeddedStoreConfig(die_with_parent=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    store = EmbeddedStore(tmp_path / "a store", CONFIG)  # the space is on purpose
    yield store
    store.stop()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool]) -> bool:
    clock = SystemClock()
    end_s = clock.monotonic_s() + 10
    while not condition() and clock.monotonic_s() < end_s:
        clock.block_s(0.005)
    return condition()


async def num_events(url: str, append: str | None = None) -> int:
    client = connect(StoreConfig(url=url))
    log = RedisUserLog(client, UserLogConfig())
    if append is not None:
        await log.append([Event(event_id=append, user_id=1, item_id=2, weight=1, timestamp_s=3)])
    num_total = (await log.read(1, 10, 10)).num_total
    await client.aclose()
    return num_total


async def test_data_outlives_stop_and_kill(store: EmbeddedStore, tmp_path: Path) -> None:
    first = store.start()
    assert store.running() == first
    assert store.url == first.url == f"redis://127.0.0.1:{first.port}/0"
    assert await num_events(store.url, append="a") == 1
    assert store.stop()
    assert not is_alive(first.pid)
    assert store.running() is None

    second = store.start()
    assert await num_events(store.url, append="b") == 2
    os.kill(second.pid, signal.SIGKILL)
    assert wait_until(lambda: store.running() is None)  # the state file is stale, and known to be
    assert (tmp_path / "a store" / "store.json").exists()

    third = store.start()
    assert third.pid != second.pid
    assert await num_events(store.url) == 2


def test_a_folder_has_one_owner(store: EmbeddedStore, tmp_path: Path) -> None:
    running = store.start()
    other = EmbeddedStore(tmp_path / "a store", CONFIG)
    with pytest.raises(ConfigError, match=f"another store owns .*: process {running.pid} on port {running.port}"):
        other.start()
    assert is_alive(running.pid)
    assert other.running() == running
    assert other.url == store.url


def test_another_process_can_stop_it(store: EmbeddedStore, tmp_path: Path) -> None:
    running = store.start()
    code = "import sys; from pathlib import Path; from shared.userlog import EmbeddedStore;"
    code += "sys.exit(0 if EmbeddedStore(Path(sys.argv[1])).stop() else 1)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a store")], check=False, timeout=30)
    assert done.returncode == 0
    assert not is_alive(running.pid)
    assert not store.stop()


def test_nothing_is_stopped_that_is_not_ours(store: EmbeddedStore, tmp_path: Path) -> None:
    """A state file may name a process id that is another program's by now."""
    folder = tmp_path / "a store"
    folder.mkdir()
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        stale = StoreProcess(pid=bystander.pid, port=1, started_ticks=1)
        (folder / "store.json").write_text(stale.model_dump_json())
        assert store.running() is None
        assert not store.stop()
        running = store.start()
        (folder / "store.json").write_text(stale.model_dump_json())
        assert store.running() is None  # locked, but not by that process
        assert not store.stop()
        assert bystander.poll() is None
        (folder / "store.json").write_text(running.model_dump_json())
    finally:
        bystander.kill()
        bystander.wait()


def test_no_orphan_when_the_parent_dies(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path;"
    code += "from shared.userlog import EmbeddedStore, EmbeddedStoreConfig as C;"
    code += "print(EmbeddedStore(Path(sys.argv[1]), C(die_with_parent=True)).start().pid, flush=True);"
    code += "os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=30, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    assert wait_until(lambda: not is_alive(pid))


def test_a_detached_server_outlives_its_parent(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from shared.userlog import EmbeddedStore;"
    code += "EmbeddedStore(Path(sys.argv[1])).start()"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=30)
    store = EmbeddedStore(tmp_path)
    running = store.running()
    assert running is not None
    assert is_alive(running.pid)
    assert store.stop()
    assert not is_alive(running.pid)


def test_a_given_port_is_taken_or_refused(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        store = EmbeddedStore(tmp_path, EmbeddedStoreConfig(port=port, die_with_parent=True))
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is taken"):
            store.start()
    assert store.start().port == port  # and the folder is not left locked
    assert store.stop()


def test_it_listens_on_loopback_only(store: EmbeddedStore) -> None:
    port = store.start().port
    hexport = f"{port:04X}"
    tables = [Path(name).read_text() for name in ("/proc/net/tcp", "/proc/net/tcp6") if Path(name).exists()]
    addresses = [line.split()[1] for table in tables for line in table.splitlines()[1:] if line.split()[3] == "0A"]
    assert [address for address in addresses if address.endswith(f":{hexport}")] == [f"0100007F:{hexport}"]


def test_a_server_that_cannot_start_shows_its_log(store: EmbeddedStore, tmp_path: Path) -> None:
    folder = tmp_path / "a store"
    folder.mkdir()
    (folder / "appendonlydir").write_text("in the way")
    with pytest.raises(StoreUnavailableError, match=r"(?s)ended with exit status 1; its log ends:.*appendonlydir"):
        store.start()
    (folder / "appendonlydir").unlink()
    store.start()


def test_start_from_another_thread_is_refused_when_the_system_watches_threads(tmp_path: Path) -> None:
    errors: list[ConfigError] = []

    def start() -> None:
        try:
            EmbeddedStore(tmp_path, CONFIG).start()
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert [error.context["field"] for error in errors] == ["die_with_parent"]


def test_no_url_without_a_server(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="no embedded store runs"):
        _ = EmbeddedStore(tmp_path / "none").url
    assert not EmbeddedStore(tmp_path / "none").stop()


def test_the_binary_is_that_of_the_wheel() -> None:
    path = find_server()
    assert path.name == "valkey-server"
    assert os.access(path, os.X_OK)
