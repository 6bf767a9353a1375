"""Finds the mesh that a verb speaks to."""

from __future__ import annotations

from cluster.cli.group import usage_error
from cluster.cli.options import DEFAULT_NAME
from cluster.environment import MeshFolders
from cluster.state import MeshState, read_state
from shared.errors import StageUnavailableError
from shared.settings import load_settings

HOST = "127.0.0.1"


def running_mesh_url(name: str) -> str:
    """Return the base URL of the running mesh of that name, for verbs that need its files too.

    Raises:
        StageUnavailableError: none runs on this machine.
    """
    state = read_state(MeshFolders.of(load_settings().var_dir, name).state)
    if state is None or not state.runs:
        raise _nowhere(name, state, "--name")
    return state.url


def mesh_url(name: str, port: int | None, url: str | None) -> str:
    """Return the base URL: the one given, else loopback at the port, else the running mesh of that name.

    Raises:
        StageUnavailableError: no mesh of that name runs on this machine.
        typer.BadParameter: name and port are both given, and that mesh is elsewhere.
    """
    if url is not None:
        return url
    state = read_state(MeshFolders.of(load_settings().var_dir, name).state)
    found = None if state is None or not state.runs else state.url
    if port is not None:
        at_port = f"http://{HOST}:{port}"
        if name == DEFAULT_NAME or (found is not None and found.endswith(f":{port}")):
            return found if found is not None and found.endswith(f":{port}") else at_port
        where = f"is at {found}" if found else "does not run here"
        raise usage_error(f"mesh {name} {where}, not at port {port}; give one of --name and --port", "--port")
    if found is None:
        raise _nowhere(name, state, "--name, --port or --url")
    return found


def _nowhere(name: str, state: MeshState | None, options: str) -> StageUnavailableError:
    why = f" (the last one ended: {state.doing})" if state is not None and state.phase == "failed" else ""
    return StageUnavailableError(
        f"no mesh called {name} runs here{why}; start one with `rankmesh up`, or name one with {options}", stage="mesh"
    )
