"""The thin client against a real socket, and what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import zstandard

from shared.wire import MEDIA_TYPE, CandidateBatch, split_request
from shared.wire.client import RankClient

BATCH = CandidateBatch.of(list(range(0, 3_000_000, 997)))


class _Server(HTTPServer):
    takes_zstd = True
    seen: list[tuple[str, str, bytes]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        encoding = self.headers.get("Content-Encoding", "")
        self.server.seen.append((self.headers["Content-Type"], encoding, body))
        status, answer = (200, {"num": len(body)}) if self.server.takes_zstd or not encoding else (415, {"code": "x"})
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.seen = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def client(server: _Server, **options: bool) -> RankClient:
    return RankClient(f"http://127.0.0.1:{server.server_port}", **options)


def test_a_body_is_compressed_and_says_so(server: _Server) -> None:
    sender = client(server)
    status, answer = sender.rank(BATCH, 7, limit=3)
    sender.close()

    [(media, encoding, body)] = server.seen
    assert (status, answer, media, encoding) == (200, {"num": len(body)}, MEDIA_TYPE, "zstd")
    header, _ = split_request(zstandard.ZstdDecompressor().decompress(body))
    assert json.loads(header) == {"user_id": 7, "limit": 3}


def test_a_server_without_zstd_gets_plain_bodies_from_then_on(server: _Server) -> None:
    server.takes_zstd = False
    sender = client(server)
    assert [sender.rank(BATCH, 7)[0] for _ in range(2)] == [200, 200]
    sender.close()
    assert [encoding for _, encoding, _ in server.seen] == ["zstd", "", ""]


def test_small_bodies_and_clients_that_do_not_want_to_are_plain(server: _Server) -> None:
    for sender, batch in ((client(server), CandidateBatch.of([1])), (client(server, compress=False), BATCH)):
        sender.rank(batch, 7)
        sender.close()
    assert [encoding for _, encoding, _ in server.seen] == ["", ""]


@pytest.mark.parametrize("url", ["https://x", "x:80", "http://"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http://host:port"):
        RankClient(url)


def test_a_client_needs_numpy_and_nothing_else() -> None:
    code = "import sys, shared.wire.client; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "pydantic", "ray", "fastapi", "models"} & set(done.stdout.split())
