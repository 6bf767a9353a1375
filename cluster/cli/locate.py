"""Finds the mesh that a verb speaks to."""

from __future__ import annotations

from cluster.state import read_state
from shared.errors import StageUnavailableError
from shared.settings import load_settings

HOST = "127.0.0.1"


def mesh_url(name: str, port: int | None, url: str | None) -> str:
    """Return the base URL: the one given, else loopback at the port, else the running mesh of that name.

    Raises:
        StageUnavailableError: no mesh of that name runs on this machine.
    """
    if url is not None:
        return url
    if port is not None:
        return f"http://{HOST}:{port}"
    state = read_state(load_settings().var_dir / name / "mesh.json")
    if state is None or not state.runs:
        raise StageUnavailableError(
            f"no mesh called {name} runs here; start one with `rankmesh up`, or name one with --name, --port or --url",
            stage="mesh",
        )
    return state.url
