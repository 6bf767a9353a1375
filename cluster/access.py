"""What every client of a mesh brings: the token that it sends, and the certificates that it trusts."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import httpx

from cluster.loopback import pinned
from shared.errors import ConfigError
from shared.settings import Settings, load_settings


@dataclass(frozen=True, slots=True)
class Access:
    """How to speak to one mesh.

    Args:
        headers: Sent with every request.
        verify: What proves that the mesh is who it says: as ``httpx`` takes it.
    """

    headers: dict[str, str]
    verify: ssl.SSLContext | bool


def access(url: str, settings: Settings | None = None) -> Access:
    """Return how to speak to the mesh at a base URL.

    Args:
        url: Base URL, e.g. ``http://127.0.0.1:8341``.
        settings: Token and trusted certificates; None: of the environment.

    Raises:
        ConfigError: a token or certificates are named that cannot be read.
    """
    settings = settings or load_settings()
    token = settings.client_token()
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return Access(headers, _trust(url, settings.ca_file))


def _trust(url: str, ca_file: Path | None) -> ssl.SSLContext | bool:
    """Return the system's certificates and those of a file."""
    if ca_file is None or not url.startswith("https:"):
        return True
    try:
        if _is_loopback(httpx.URL(url).host):
            return pinned(ca_file)
        context = ssl.create_default_context()
        context.load_verify_locations(ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cannot read certificates from {ca_file}: {error}", field="RANKMESH_CA_FILE", value=str(ca_file)
        ) from error
    return context


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name, however it begins: its certificate must name it
        return False
