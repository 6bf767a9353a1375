"""One file describes a mesh; parts that must agree do."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from cluster import config as module
from cluster.bounds import PORTS_PER_MESH
from cluster.config import DEFAULT_PATH, EDGES, NICENESS, NICENESS_STEPS_MAX, MeshConfig, load_mesh
from cluster.names import deployment_name, station_configs
from cluster.priority import START_NICENESS
from shared.errors import ConfigError

ROOT = Path(module.__file__).parents[1]
FILES = sorted((ROOT / "configs" / "serve").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_deployment_file_loads(path: Path) -> None:
    assert load_mesh(path).name


def test_the_default_file_says_what_the_classes_say() -> None:
    """It claims so, and a reader of either must not be misled."""
    written = load_mesh(ROOT / DEFAULT_PATH)
    assert written.edges == EDGES
    assert written.niceness == NICENESS
    assert written.model_copy(update={"edges": {}, "niceness": {}}) == MeshConfig()


def test_the_default_file_gives_reasons() -> None:
    lines = (ROOT / DEFAULT_PATH).read_text(encoding="utf-8").splitlines()
    explained = [line.split(":")[0].strip() for line in lines if re.search(r"^\s+\w+: .*# .{20,}", line)]
    tuned = {"max_ongoing_requests", "max_queued_requests", "health_check_period_s", "max_surge_percent", "num_cpus"}
    assert tuned <= set(explained)


def test_deployment_files_do_not_share_ports() -> None:
    ports = sorted(load_mesh(path).http.port for path in FILES)
    assert all(second - first >= PORTS_PER_MESH for first, second in itertools.pairwise(ports))


def test_values_given_by_name_win() -> None:
    config = load_mesh(ROOT / DEFAULT_PATH, name="other", port=9_000, weights__version="v7", http__ingress=None)
    assert (config.name, config.http.port, config.weights.version, config.http.ingress) == (
        "other",
        9_000,
        "v7",
        "haproxy",
    )


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_mesh(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"ranking": {"full": {}}}, "ingress.service.tiers"),
        ({"edges": {"ranking.guess": "value"}}, "ranking.guess"),
        ({"sequence": {"replicas": {"max_ongoing_requests": 65}}}, "queue_max 64, is 65"),
        ({"ranking": {"full": {"replicas": {"max_ongoing_requests": 33}}, "light": {}}}, "queue_max 32, is 33"),
        ({"ingress": {"service": {"hedge": {"share_max": 0.05}}}}, "hedge needs embedding.replicas.replicas"),
        ({"embedding": {"map_dir": "rows"}}, "map_dir needs backend reference, is fbgemm"),
        ({"http": {"host": "localhost"}}, "http.host"),
        ({"http": {"port": 65_535 - PORTS_PER_MESH + 1}}, "http.port"),
        ({"name": "Upper"}, "name"),
        ({"niceness": {"gateway": 5}}, "gateway"),
        ({"niceness": {"ranking": NICENESS_STEPS_MAX + 1}}, "niceness.ranking"),
        ({"niceness": {"ranking": -1}}, "niceness.ranking"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_what_does_not_fit_is_refused(section: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text(yaml.safe_dump(section), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_mesh(path)


def test_limits_are_allowed_at_their_value() -> None:
    MeshConfig.model_validate({"sequence": {"replicas": {"max_ongoing_requests": 64}}})
    MeshConfig.model_validate({"http": {"port": 65_535 - PORTS_PER_MESH}})
    hedged = {"ingress": {"service": {"hedge": {"share_max": 0.05}}}, "embedding": {"replicas": {"replicas": 2}}}
    MeshConfig.model_validate(hedged)


def test_parts_of_a_mesh_carry_its_name_and_size() -> None:
    config = MeshConfig.model_validate({"name": "blue", "embedding": {"num_shards": 3}})
    assert (config.ingress_service().mesh, config.ingress_service().num_shards) == ("blue", 3)
    assert config.user_log().namespace == "blue"
    assert (config.speculative_service(24).namespace, config.speculative_service(24).width) == ("blue", 24)
    assert (config.embedding_service(2).shard, config.embedding_service(2).num_shards) == (2, 3)
    assert config.ranking_service("light").tier == "light"
    mapped = MeshConfig.model_validate({"embedding": {"backend": "reference", "map_dir": "rows"}})
    assert mapped.embedding_service(1).map_dir == Path("rows")
    with pytest.raises(ValidationError):
        config.embedding_service(3)


def test_transport_is_by_station_and_method() -> None:
    config = MeshConfig.model_validate({"edges": {"embedding.lookup": "value"}})
    assert config.transport("embedding:1", "lookup") == "value"
    assert config.transport("ranking:full", "rank") == "by_size"
    assert config.transport("sequence", "append") == "value"
    assert config.transport("sequence", "status") == "value"


def test_what_decides_is_never_behind_what_computes() -> None:
    config = MeshConfig.model_validate({"niceness": {"embedding": 7}})
    niceness = {name: config.niceness_of(name) for name in station_configs(config)}
    assert niceness["embedding:1"] == 7
    assert niceness["ingress"] == min(niceness.values()) == 0
    assert niceness["foundation"] == max(niceness.values()) <= START_NICENESS


def test_every_call_of_the_ingress_has_a_transport() -> None:
    """A call that is not listed would go by value, through the ingress, without anybody having decided so."""
    folder = ROOT / "services" / "ingress"
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
    methods = set(re.findall(r"\.call\(\s*\"(\w+)\"", source)) | set(re.findall(r", \"(\w+)\", (?:task|self)", source))
    known = {edge.partition(".")[2] for edge in EDGES}
    assert methods
    assert methods <= known


def test_stations_in_the_order_of_a_request() -> None:
    names = list(station_configs(MeshConfig()))
    assert names[:4] == ["ingress", "preprocess", "embedding:0", "embedding:1"]
    assert names[-1] == "foundation"
    without = MeshConfig.model_validate({"foundation": None})
    assert "foundation" not in station_configs(without)


def test_serve_names_have_no_colon() -> None:
    assert deployment_name("ranking:full") == "ranking-full"


def test_the_url_for_clients_of_this_machine() -> None:
    everywhere = MeshConfig.model_validate({"http": {"host": "0.0.0.0", "port": 9_000}}).http
    assert (everywhere.url, everywhere.is_loopback) == ("http://127.0.0.1:9000", False)
    assert MeshConfig().http.is_loopback


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("http: {host: 999.1.1.1}", r"http.host.*999"),
        ("http: {host: 127.0.0.01}", r"http.host.*127.0.0.01"),
        ("store: {kind: redis, client: {url: 'http://127.0.0.1:6379'}}", "client.url must begin with redis://"),
        ("store: {kind: redis, client: {url: 127.0.0.1}}", "client.url must begin with redis://"),
        ("weights: {url: 's3://key:s3cr3t@bucket/x'}", "weights.url.*s3:// takes no credentials in the URL"),
        ("weights: {url: 's3://key:s3c/r3t@bucket/x'}", "weights.url.*s3:// takes no credentials in the URL"),
        ("[" * 2_000, "nested too deeply"),
    ],
)
def test_what_cannot_be_used_is_refused_when_it_is_read(tmp_path: Path, document: str, words: str) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text(document, encoding="utf-8")
    with pytest.raises(ConfigError, match=words) as caught:
        load_mesh(path)
    assert "\n" not in caught.value.message
    assert "r3t" not in str(caught.value.body())
