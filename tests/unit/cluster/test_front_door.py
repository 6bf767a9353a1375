"""Who may reach a mesh: checked before anything starts, TLS at a real HAProxy, clients that know whom they trust."""

from __future__ import annotations

import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from cluster.access import access
from cluster.cli.client import Client
from cluster.config import HttpConfig, MeshConfig, TlsConfig
from cluster.front_door import check_wide, pem_bundle, secured
from cluster.local import Mesh
from cluster.loopback import get_status, is_listening, write_haproxy
from shared.clock import SystemClock
from shared.errors import ConfigError, StageUnavailableError, UnauthenticatedError
from shared.settings import Settings, child_environment, load_settings
from tests.helpers.certificate import (
    CERTIFICATE,
    KEY,
    KEY_WITH_PASS_PHRASE,
    OTHER_CERTIFICATE,
    OTHER_KEY,
    write_certificate,
)
from tests.helpers.mesh_answers import status_body

TOKEN = "feed-" + "a" * 30
WIDE = ["0.0.0.0", "10.0.0.7", "192.168.1.1", "1.127.0.1"]


def mesh(**http: object) -> MeshConfig:
    return MeshConfig(name="door", http=HttpConfig.model_validate(http))


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.yaml"
    path.write_text(f"tokens: [{{name: feed-1, tenant: feed, token: {TOKEN}}}]", encoding="utf-8")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("host", WIDE)
def test_a_mesh_that_others_reach_does_not_start_without_tokens(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="bearer tokens") as caught:
        Mesh.start(mesh(host=host), var_dir=tmp_path)
    assert caught.value.context == {"field": "http.tokens_file", "value": host}
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="tokens_file"):
        check_wide(HttpConfig(host=host))


@pytest.mark.parametrize("host", WIDE)
def test_it_starts_with_tokens_of_the_file_or_of_the_setting(tokens_file: Path, host: str) -> None:
    assert secured(mesh(host=host, tokens_file=tokens_file), Settings()).http.tokens_file == tokens_file
    found = secured(mesh(host=host), Settings(tokens_file=tokens_file))
    assert found.http.tokens_file == tokens_file
    check_wide(found.http)


def test_loopback_needs_none() -> None:
    assert secured(mesh(), Settings()) == mesh()
    check_wide(mesh().http)


def test_a_file_of_tokens_that_is_missing_is_refused_on_loopback_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        secured(mesh(tokens_file=tmp_path / "none"), Settings())


def test_paths_do_not_depend_on_where_a_replica_runs(
    tokens_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_certificate(tmp_path)
    monkeypatch.chdir(tmp_path)
    tls = TlsConfig(certificate_file=Path("certificate.pem"), key_file=Path("key.pem"))
    found = secured(mesh(tokens_file=Path(tokens_file.name), tls=tls), Settings()).http
    assert found.tokens_file == tokens_file
    assert found.tls == TlsConfig(certificate_file=tmp_path / "certificate.pem", key_file=tmp_path / "key.pem")
    assert found.url == "https://127.0.0.1:8341"


@pytest.mark.parametrize(
    ("certificate", "key"),
    [(CERTIFICATE, OTHER_KEY), (KEY, KEY), (CERTIFICATE, ""), ("", KEY), (CERTIFICATE, KEY_WITH_PASS_PHRASE)],
    ids=["another key", "no certificate", "empty key", "empty certificate", "a pass phrase"],
)
def test_certificates_that_cannot_be_used_are_refused_before_anything_starts(
    tmp_path: Path, certificate: str, key: str
) -> None:
    tls = write_certificate(tmp_path, certificate, key)
    with pytest.raises(ConfigError, match="no certificate and its key"):
        secured(mesh(tls=tls), Settings())
    tls.key_file.unlink()
    with pytest.raises(ConfigError, match="there is no file"):
        secured(mesh(tls=tls), Settings())


@contextmanager
def haproxy(folder: Path, tls: TlsConfig, server: int) -> Iterator[str]:
    """Run the HAProxy of a mesh over a configuration of the shape that Ray writes, in front of a plain server."""
    port = _free_port()
    bundle = pem_bundle(tls, folder)
    assert bundle.stat().st_mode & 0o777 == 0o600
    configuration = folder / "haproxy.cfg"
    configuration.write_text(
        f"defaults\n    mode http\n    timeout connect 5s\n    timeout client 5s\n    timeout server 5s\n"
        f"    option abortonclose\nfrontend http_frontend\n    bind *:{port}\n    default_backend app\n"
        f"backend app\n    server one 127.0.0.1:{server}\n",
        encoding="utf-8",
    )
    program = write_haproxy(folder, port=port, bundle=bundle)
    process = subprocess.Popen([program, "-db", "-f", configuration], stderr=subprocess.PIPE)
    try:
        clock = SystemClock()
        for _ in range(500):
            if is_listening(port):
                break
            assert process.poll() is None, process.communicate()[1].decode()
            clock.block_s(0.01)
        yield f"https://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def _free_port() -> int:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return server.server_port


_SEEN: list[str | None] = []


class _Mesh(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        _SEEN.append(self.headers.get("authorization"))
        content = status_body().model_dump_json().encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_the_front_door_speaks_tls_and_clients_check_it(tmp_path: Path) -> None:
    _SEEN.clear()
    folder = tmp_path / "with space"
    folder.mkdir()
    tls = write_certificate(tmp_path)
    other = tmp_path / "other.pem"
    other.write_text(OTHER_CERTIFICATE, encoding="utf-8")
    with HTTPServer(("127.0.0.1", 0), _Mesh) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with haproxy(folder, tls, server.server_port) as url:
                assert get_status(f"{url}/readyz", 5, tls.certificate_file) == 200
                assert get_status(f"{url}/readyz", 5, other) is None
                assert get_status(f"{url}/readyz", 5) is None
                assert get_status(f"{url.replace('https', 'http')}/readyz", 5) in (None, 400)
                trusting = Settings(ca_file=tls.certificate_file, token=SecretStr(TOKEN))
                with Client(url, settings=trusting) as client:
                    assert client.get("/v1/status")["name"]
                for distrusting in (Settings(ca_file=other), Settings()):
                    with Client(url, settings=distrusting) as client, pytest.raises(StageUnavailableError) as caught:
                        client.get("/v1/status")
                    assert "is not trusted" in caught.value.message
                    assert "RANKMESH_CA_FILE" in caught.value.message
                plain = f"http://127.0.0.1:{server.server_port}"
                for wrong in (url.replace("https", "http"), plain.replace("http", "https")):
                    with Client(wrong, settings=trusting) as client, pytest.raises(StageUnavailableError) as caught:
                        client.get("/v1/status")
                    assert "its URL begins with http" in caught.value.message
        finally:
            server.shutdown()
            thread.join()
    assert [None, f"Bearer {TOKEN}"] == _SEEN


def test_the_command_line_sends_its_token_and_shows_it_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def respond(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(401, json={"code": "unauthenticated", "message": "nobody has this token", "context": {}})

    def ask() -> str:
        with Client("http://mesh.test", httpx.MockTransport(respond)) as client:
            with pytest.raises(UnauthenticatedError) as caught:
                client.get("/v1/status")
            return f"{caught.value.message} {caught.value.context} {client!r} {load_settings()!r}"

    monkeypatch.delenv("RANKMESH_TOKEN", raising=False)
    monkeypatch.delenv("RANKMESH_TOKEN_FILE", raising=False)
    assert TOKEN not in ask()
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n", encoding="utf-8")
    monkeypatch.setenv("RANKMESH_TOKEN_FILE", str(path))
    assert TOKEN not in ask()
    monkeypatch.setenv("RANKMESH_TOKEN", "other-" + "b" * 30)
    assert "bbbb" not in ask()
    assert seen == [None, f"Bearer {TOKEN}", "Bearer other-" + "b" * 30]
    assert "RANKMESH_TOKEN" not in child_environment()
    monkeypatch.delenv("RANKMESH_TOKEN")
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is empty"):
        Client("http://mesh.test")
    path.unlink()
    with pytest.raises(ConfigError, match="cannot read the token"):
        Client("http://mesh.test")


@pytest.mark.parametrize(
    ("host", "is_named"),
    [
        ("127.0.0.1", False),
        ("127.8.0.2", False),
        ("127.mesh.test", True),
        ("127.0.0.1.x.test", True),
        ("10.0.0.1", True),
    ],
)
def test_only_the_address_of_this_machine_need_not_be_named_by_its_certificate(
    tmp_path: Path, host: str, is_named: bool
) -> None:
    tls = write_certificate(tmp_path)
    found = access(f"https://{host}:8341", Settings(ca_file=tls.certificate_file)).verify
    assert isinstance(found, ssl.SSLContext)
    assert found.check_hostname == is_named
