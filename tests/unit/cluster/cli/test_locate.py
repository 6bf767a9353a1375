"""Which mesh a command line means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from cluster.cli.locate import mesh_url, running_mesh_url
from cluster.config import MeshConfig
from cluster.state import first_state
from shared.errors import StageUnavailableError
from tests.helpers.mesh_owner import owner_of


@pytest.fixture
def meshes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a mesh ``rankmesh`` at 8341 and a mesh ``b`` at 8461."""
    monkeypatch.setenv("RANKMESH_VAR_DIR", str(tmp_path))
    with owner_of("id") as pid:
        for name, port in (("rankmesh", 8_341), ("b", 8_461)):
            (tmp_path / name).mkdir()
            config = MeshConfig.model_validate({"name": name, "http": {"port": port}})
            first_state(config, "id", pid, 1.0).write(tmp_path / name / "mesh.json")
        yield


@pytest.mark.usefixtures("meshes")
def test_url_then_port_then_name() -> None:
    assert mesh_url("b", 8_341, "http://elsewhere:1") == "http://elsewhere:1"
    assert mesh_url("rankmesh", 9_000, None) == "http://127.0.0.1:9000"
    assert mesh_url("b", None, None) == mesh_url("b", 8_461, None) == "http://127.0.0.1:8461"
    with pytest.raises(StageUnavailableError, match=r"no mesh called c runs here.* --name, --port or --url"):
        mesh_url("c", None, None)


@pytest.mark.usefixtures("meshes")
def test_a_verb_that_takes_a_name_alone_asks_for_no_more() -> None:
    assert running_mesh_url("b") == "http://127.0.0.1:8461"
    with pytest.raises(StageUnavailableError, match=r"or name one with --name$"):
        running_mesh_url("c")


@pytest.mark.usefixtures("meshes")
@pytest.mark.parametrize(
    ("name", "where"), [("b", "is at http://127.0.0.1:8461, not at port 8341"), ("c", "does not run here")]
)
def test_name_and_port_that_disagree_are_refused(name: str, where: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        mesh_url(name, 8_341, None)
    assert f"mesh {name} {where}" in caught.value.message


def test_why_the_last_one_ended_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKMESH_VAR_DIR", str(tmp_path))
    (tmp_path / "b").mkdir()
    failed = first_state(MeshConfig(name="b"), "id", 1, 1.0).model_copy(update={"phase": "failed", "doing": "Ray died"})
    failed.write(tmp_path / "b" / "mesh.json")
    with pytest.raises(StageUnavailableError, match=r"no mesh called b runs here \(the last one ended: Ray died\)"):
        mesh_url("b", None, None)
