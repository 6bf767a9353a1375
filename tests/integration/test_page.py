"""The page as a browser sees it: over HTTP always, in headless Chromium where there is one (else that test says so).

Most of it over the real stations in one process, with titles that try to be markup; once over a mesh.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from benchmarks.site import Site
from services.ingress.http import create_app
from tests.helpers.local_mesh import LocalMesh
from tests.helpers.weights import random_weights

pytestmark = pytest.mark.integration

NUM_ITEMS = 40
USER = 7
TRUE_NEXT = list(range(1, 12))
"""So many of the 30 candidates that whatever random weights prefer, some are among the 20 films of the page."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
START_TIMEOUT_S = 30.0
BROWSER_TIMEOUT_S = 60.0
VIRTUAL_TIME_MS = 8_000
"""Time of the page's own clock that the browser lets pass; it stands still while an answer is awaited."""


def samples_document() -> dict[str, object]:
    sample = {
        "user_id": USER,
        "timestamp_s": 978_300_000,
        "surface": "ml-1m",
        "history": [{"item_id": 3, "weight": 4.0, "timestamp_s": 978_200_000}],
        "candidates": list(range(1, NUM_ITEMS + 1)),
        "true_next": TRUE_NEXT,
        "next_weights": [5] * len(TRUE_NEXT),
    }
    return {"dataset": "random", "provenance": "random weights", "as_of_s": 978_000_000, "samples": [sample]}


def display_document() -> dict[str, object]:
    items = {
        str(item): {"title": f"<b>Film</b> & {item}", "year": 1990, "genres": ["Drama"]}
        for item in range(1, NUM_ITEMS + 1)
    }
    return {"items": items}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve the stations from a thread of this process."""
    source = random_weights(num_items=NUM_ITEMS)
    source.documents.update(samples=samples_document(), display=display_document())
    port = free_port()
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        async with LocalMesh.running(source) as mesh:
            config = uvicorn.Config(create_app(mesh.ingress), host="127.0.0.1", port=port, log_level="warning")
            servers.append(uvicorn.Server(config))
            await servers[0].serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="page-mesh")
    thread.start()
    base = f"http://127.0.0.1:{port}"
    transport = httpx.HTTPTransport(retries=20)  # connection refused: tried again, each time after a longer wait
    with httpx.Client(transport=transport, trust_env=False, timeout=START_TIMEOUT_S) as client:
        assert client.get(f"{base}/readyz").status_code == 200
    yield base
    servers[0].should_exit = True
    thread.join(START_TIMEOUT_S)
    assert not thread.is_alive()


def test_page_over_http(url: str) -> None:
    with httpx.Client(base_url=url, trust_env=False) as client:
        page = client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        loaded = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
        scripts = [name for name in loaded if name.endswith(".js")]
        assert scripts
        for name in scripts:  # modules load modules
            loaded += [f"page/{other}" for other in re.findall(r'from "\./([^"]+)"', client.get(f"/{name}").text)]
        types = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
        for name in loaded:
            answer = client.get(f"/{name}")
            assert answer.status_code == 200, name
            assert answer.headers["content-type"].startswith(types[name.rpartition(".")[2]])
        for link in re.findall(r'<a href="([^"#]+)"', page.text):
            assert client.get(f"/{link}").status_code == 200, link


def dom_of(address: str, profile: Path) -> str:
    """Return what the browser made of the page, as HTML; skip where there is no browser."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine: the page was checked over HTTP alone")
    command = [browser, *FLAGS, f"--user-data-dir={profile}", f"--virtual-time-budget={VIRTUAL_TIME_MS}"]
    done = subprocess.run(
        [*command, "--dump-dom", address], capture_output=True, text=True, check=True, timeout=BROWSER_TIMEOUT_S
    )
    return done.stdout


def test_page_in_chromium(url: str, tmp_path: Path) -> None:
    dom = dom_of(f"{url}/?user={USER}&candidates=30&tier=full", tmp_path)
    visible = re.sub(r"<[^>]+>", " ", dom)
    for station in ("ingress", "preprocess", "sequence", "embedding:0", "embedding:1", "speculative", "foundation"):
        assert f"{station}: 1 of 1 replicas ready" in visible
    assert 'data-state="ready">ready<' in dom
    assert "30 candidates ranked in" in visible
    assert dom.count('class="film"') == 20
    assert "★ rated 5 next" in visible
    assert "&lt;b&gt;Film&lt;/b&gt; &amp; " in dom, "titles are text, never markup"
    assert "Critical path: admission" in visible
    waterfall = re.search(r'<svg id="waterfall".*?</svg>', dom, re.DOTALL)
    assert waterfall is not None
    assert "ranking:full" in waterfall[0]
    assert 'role="alert" hidden' in dom


def test_real_mesh_in_chromium(site: Site, tmp_path: Path) -> None:
    """The same page over real replicas: it shows those that the mesh says it has, and an answer of theirs."""
    with httpx.Client(base_url=site.url, trust_env=False, timeout=START_TIMEOUT_S) as client:
        samples = client.get("/v1/samples").json()["samples"]
        deployments = client.get("/v1/status").json()["deployments"]
    visible = re.sub(r"<[^>]+>", " ", dom_of(f"{site.url}/?user={samples[0]['user_id']}&candidates=20", tmp_path))
    for deployment in deployments:
        assert f"{deployment['name']}: {deployment['target']} of {deployment['target']} replicas ready" in visible
    assert "20 candidates ranked in" in visible
    assert "whole answer" in visible
