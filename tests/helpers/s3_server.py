"""A local S3 server (moto's) that counts what it gives."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

KEY = "testing"


@dataclass
class S3Server:
    """Address and counts.

    Args:
        url: Its endpoint.
        given: Object path -> bytes of bodies that were given.
        bucket: Name of a bucket that nobody else uses.
    """

    url: str
    given: Counter[str] = field(default_factory=Counter)
    bucket: str = field(default_factory=lambda: f"weights-{secrets.token_hex(4)}")  # moto keeps buckets a process

    @property
    def options(self) -> dict[str, Any]:
        """What fsspec needs to speak to it."""
        return {"key": KEY, "secret": KEY, "endpoint_url": self.url}

    @property
    def environment(self) -> dict[str, str]:
        """The same for another process."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server for the block, on loopback and a free port."""
    application: Any = DomainDispatcherApplication(create_backend_app)
    counts: Counter[str] = Counter()

    def counted(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        body = b"".join(application(environ, start))
        if environ["REQUEST_METHOD"] == "GET" and not environ.get("QUERY_STRING"):
            counts[environ["PATH_INFO"]] += len(body)
        return [body]

    server = make_server("127.0.0.1", 0, counted, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield S3Server(f"http://127.0.0.1:{server.server_port}", counts)
    finally:
        server.shutdown()
        thread.join(10)
