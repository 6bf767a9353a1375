"""The thin client against a real socket, and what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import zstandard

from shared.wire import MEDIA_TYPE, CandidateBatch, split_request
from shared.wire.client import RankClient

BATCH = CandidateBatch.of(list(range(0, 3_000_000, 997)))


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a client that keeps its connection must not hold up the end of a test
    block_on_close = False
    takes_zstd = True
    closes = False
    hangs: threading.Event | None = None
    words: bytes | None = None
    seen: list[tuple[str, str, bytes]]
    tokens: list[str | None]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        encoding = self.headers.get("Content-Encoding", "")
        self.server.seen.append((self.headers["Content-Type"], encoding, body))
        self.server.tokens.append(self.headers["Authorization"])
        status, answer = (200, {"num": len(body)}) if self.server.takes_zstd or not encoding else (415, {"code": "x"})
        if (gate := self.server.hangs) is not None:
            gate.wait(5)
        content = json.dumps(answer).encode() if self.server.words is None else self.server.words
        self.close_connection = self.server.closes
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.seen, server.tokens = [], []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def client(server: _Server, *, compress: bool = True) -> RankClient:
    return RankClient(f"http://127.0.0.1:{server.server_port}", compress=compress)


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


@pytest.mark.parametrize(
    "url", ["ftp://x", "x:80", "http://", "http://x/prefix", "http://x?a=1", "http://user:hidden@x:80", "http://user@x"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http://host:port") as caught:
        RankClient(url)
    assert "hidden" not in str(caught.value)


def test_a_connection_that_was_closed_meanwhile_is_opened_again(server: _Server) -> None:
    server.closes = True
    sender = client(server)
    assert [sender.rank(BATCH, 7)[0] for _ in range(3)] == [200, 200, 200]
    sender.close()
    assert len(server.seen) == 3


def test_after_a_timeout_the_next_request_gets_its_own_answer(server: _Server) -> None:
    server.hangs = threading.Event()
    sender = RankClient(f"http://127.0.0.1:{server.server_port}", timeout_s=0.05)
    with pytest.raises(TimeoutError):
        sender.rank(BATCH, 7)
    server.hangs.set()
    server.hangs = None
    assert sender.rank(CandidateBatch.of([1]), 8)[1] != {"num": len(server.seen[0][2])}
    sender.close()


def test_nobody_listening_is_an_error_at_once(server: _Server) -> None:
    sender = client(server)
    sender.rank(BATCH, 7)
    sender.close()
    server.server_close()
    with pytest.raises(ConnectionError):
        sender.rank(BATCH, 7)


@pytest.mark.parametrize("words", [b"<html>no route</html>", b"[]", b""])
def test_an_answer_that_is_no_document_is_told_in_its_words(server: _Server, words: bytes) -> None:
    server.words = words
    sender = client(server)
    assert sender.rank(BATCH, 7) == (200, {"code": "not_json", "message": words.decode(), "context": {}})
    sender.close()


def test_a_token_is_sent(server: _Server) -> None:
    sender = RankClient(f"http://127.0.0.1:{server.server_port}", token="secret")
    sender.rank(BATCH, 7)
    sender.close()
    assert server.tokens == ["Bearer secret"]


@pytest.mark.parametrize("token", ["secret\n", " secret", "secret\u00e9", "sec ret", ""])
def test_what_no_header_can_carry_is_no_token_and_is_not_shown(token: str) -> None:
    with pytest.raises(ValueError, match="token must be of visible ASCII") as caught:
        RankClient("http://127.0.0.1:1", token=token)
    assert "secret" not in str(caught.value)


def test_a_client_needs_numpy_and_nothing_else() -> None:
    code = "import sys, shared.wire.client; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "pydantic", "ray", "fastapi", "models"} & set(done.stdout.split())
