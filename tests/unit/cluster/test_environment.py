"""Folders, ports and variables of a mesh: nothing that two meshes share."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from cluster.bounds import PORTS_PER_MESH
from cluster.config import MeshConfig, RayConfig
from cluster.environment import SOCKET_PATH_BYTES_MAX, MeshFolders, Ports, ray_environment
from shared.errors import ConfigError

SHARED = {  # the same in every mesh, and meant to be
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
    "RAY_AUTH_MODE",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH",
    "PYTHONPATH",
}


def variables(name: str, port: int, ingress: str = "haproxy") -> dict[str, str]:
    config = MeshConfig.model_validate({"name": name, "http": {"port": port, "ingress": ingress}})
    return ray_environment(config, MeshFolders.of(Path("/data/var"), name), Path("/code"))


def test_two_meshes_share_no_folder_and_no_port() -> None:
    first, second = variables("a", 8_000), variables("b", 8_000 + PORTS_PER_MESH)
    assert first.keys() == second.keys()
    for name, value in first.items():
        if name not in SHARED and name.endswith(("_PORT", "_PATH", "_LOC", "_BASE", "_FILE")):
            assert second[name] != value, name


def test_ports_of_neighbours_do_not_meet() -> None:
    config = MeshConfig()
    own = Ports(8_000)
    fixed = own.promised(config)
    assert len(set(fixed)) == len(fixed)
    assert max(*fixed, own.replicas[1]) < 8_000 + PORTS_PER_MESH
    assert own.fallback < own.replicas[0]


def test_the_python_proxy_needs_one_port() -> None:
    config = MeshConfig.model_validate({"http": {"port": 8_000, "ingress": "proxy"}})
    assert Ports(8_000).promised(config) == (8_000,)
    assert not any("HAPROXY" in name or "HA_PROXY" in name for name in variables("a", 8_000, "proxy"))


def test_ray_listens_on_loopback_and_asks_for_a_secret() -> None:
    found = variables("a", 8_000)
    assert found["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert found["RAY_AUTH_MODE"] == "token"
    assert found["RAY_AUTH_TOKEN_PATH"] == "/data/var/a/token"


def test_the_limit_of_inline_results_reaches_ray() -> None:
    config = MeshConfig.model_validate({"ray": {"inline_bytes_max": 2_048}})
    found = ray_environment(config, MeshFolders.of(Path("/data/var"), "a"), Path("/code"))
    assert found["RAY_max_direct_call_object_size"] == "2048"


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_folder_too_deep_for_sockets_is_replaced_by_a_short_one(extra: int) -> None:
    room = SOCKET_PATH_BYTES_MAX - 66 - len("/a/run") + extra
    folders = MeshFolders.of(Path("/" + "d" * (room - 1)), "a")
    assert (folders.runtime == folders.short / "ray") == (extra > 0)
    assert len(str(folders.short)) < 40 or len(tempfile.gettempdir()) > 20


def test_folders_and_secret_are_the_users_alone(tmp_path: Path) -> None:
    folders = MeshFolders.of(tmp_path, "private")
    folders.make()
    try:
        for folder in (folders.root, folders.short):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(folders.auth_token.stat().st_mode) == 0o600
        first = folders.auth_token.read_text(encoding="ascii")
        assert len(first) == 64
        folders.make()
        assert folders.auth_token.read_text(encoding="ascii") != first
    finally:
        folders.short.rmdir() if not list(folders.short.iterdir()) else None


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_242)
    with pytest.raises(ConfigError, match="belongs to another user"):
        MeshFolders.of(tmp_path, "stolen").make()


def test_a_control_store_that_is_kept_is_kept_for_one_start(tmp_path: Path) -> None:
    folders = MeshFolders.of(tmp_path, "trial")
    kept = ray_environment(MeshConfig(ray=RayConfig(gcs_storage="rocksdb")), folders, tmp_path)
    assert kept["RAY_gcs_storage"] == "rocksdb"
    assert Path(kept["RAY_gcs_storage_path"]).is_relative_to(folders.runtime)
    assert "RAY_gcs_storage" not in ray_environment(MeshConfig(), folders, tmp_path)
    folders.make()
    (folders.control / "tables").touch()
    folders.make()
    assert list(folders.control.iterdir()) == []
