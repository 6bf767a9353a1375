"""A mesh to measure or verify: where it is, what it ranks with, which data it was made from.

``running_site`` takes one that runs (by URL, or by its name on this machine) or brings one up and ends it afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import httpx
from rich.console import Console

from benchmarks.client import get_json
from cluster.bounds import PORTS_PER_MESH
from cluster.claims import PortClaim
from cluster.config import DEFAULT_PATH, MeshConfig, WeightsConfig, load_mesh
from cluster.environment import Ports
from cluster.local import Mesh
from cluster.loopback import is_listening
from cluster.weights import weights_url
from models.execution_config import Precision
from models.source import WeightSource
from shared.clock import SystemClock
from shared.errors import ConfigError, StageUnavailableError
from shared.settings import load_settings
from shared.weights import WeightStore
from shared.weights.deltas import parse_stamp
from training.config import TrainConfig
from training.data import Dataset, DatasetName, load_dataset

UNKNOWN_CONFIG = "unknown"
"""Configuration digest of a mesh that was not started on this machine."""

_MESHES_MAX = 32
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Site:
    """A running mesh.

    Args:
        url: Base URL.
        config_hash: Digest of its resolved configuration, or ``UNKNOWN_CONFIG``.
        dataset: Data that its weights were trained on and its user log holds.
        source: Its weights.
        default_limit: Returned candidates when a request names no limit.
        precompute_max: Candidates of one answer that are followed up.
        num_shards: Embedding shards.
        vector_dtype: How speculative embeddings are stored.
        precision: Dtype in which its stations execute the network.
        best_tier: Name of its best tier.
    """

    url: str
    config_hash: str
    dataset: Dataset
    source: WeightSource
    default_limit: int = 100
    precompute_max: int = 128
    num_shards: int = 2
    vector_dtype: str = "float32"
    precision: Precision = "float32"
    best_tier: str = "full"

    @classmethod
    def of(
        cls,
        url: str,
        config: MeshConfig,
        config_hash: str,
        dataset: Dataset,
        source: WeightSource,
        precision: Precision = "float32",
    ) -> Site:
        """Describe a mesh by its configuration."""
        return cls(
            url=url,
            config_hash=config_hash,
            dataset=dataset,
            source=source,
            default_limit=config.ingress.service.limits.limit_default,
            precompute_max=config.ingress.service.precompute.candidates_max,
            num_shards=config.embedding.num_shards,
            vector_dtype=config.speculative.service.vector_dtype,
            precision=precision,
            best_tier=config.ingress.service.tiers[0].name,
        )

    @property
    def history_length(self) -> int:
        """L of the model."""
        return int(self.source.json("model")["history_length"])


@dataclass(frozen=True, slots=True)
class Where:
    """Which mesh.

    Args:
        url: Base URL of one that runs; None: look for ``name``.
        name: Name of one on this machine; when none of that name runs, one is brought up under ``<name>-bench``.
        config: Deployment file, also of a mesh that runs; None: the default.
    """

    url: str | None = None
    name: str = "rankmesh"
    config: Path | None = None


@contextmanager
def running_site(where: Where) -> Iterator[Site]:
    """Yield a running mesh; one that was brought up here is ended at the end of the block.

    Progress of bringing one up goes to standard error.

    Raises:
        RankMeshError: it cannot be reached or brought up, or its weights or data are not on this machine.
    """
    config = load_mesh(where.config or DEFAULT_PATH)
    found = Mesh.find(where.name) if where.url is None else None
    if where.url is not None:
        yield _attach(where.url.rstrip("/"), config, UNKNOWN_CONFIG)
    elif found is not None:
        yield _attach(found.url, config, found.state.config_digest)
    else:
        with own_site(where) as site:
            yield site


@contextmanager
def own_site(where: Where, weights: WeightsConfig | None = None) -> Iterator[Site]:
    """Bring a mesh up under ``<name>-bench``, and end it at the end of the block.

    Args:
        where: Its name and deployment file.
        weights: What it serves instead of what the file says.

    Raises:
        RankMeshError: it cannot be brought up.
    """
    from cluster.cli.bring_up import Plan, bring_up
    from cluster.cli.steps import Steps

    steps = Steps(Console(stderr=True, highlight=False), SystemClock())
    port = free_port(load_mesh(where.config or DEFAULT_PATH))
    plan = Plan.of(f"{where.name}-bench", port, where.config, None)
    if weights is not None:
        plan = replace(plan, mesh=plan.mesh.model_copy(update={"weights": weights}))
    with bring_up(plan, steps, detached=False).mesh as mesh:
        yield _attach(mesh.url, plan.mesh, mesh.state.config_digest)


def free_port(config: MeshConfig) -> int:
    """Return a port from which on a mesh of this configuration finds all its ports free.

    Raises:
        ConfigError: there is none near the configured one.
    """
    first = config.http.port
    # Each process begins to look elsewhere: two that start at one moment should not find the same.
    for number in range(_MESHES_MAX):
        port = first + (1 + (os.getpid() + number) % _MESHES_MAX) * PORTS_PER_MESH
        ports = Ports(port).promised(config)
        if PortClaim.is_free(ports) and not any(is_listening(each) for each in ports):
            return port
    raise ConfigError(f"no room for another mesh above port {first}", field="http.port", value=first)


def _attach(url: str, config: MeshConfig, config_hash: str) -> Site:
    settings = load_settings()
    model = _model(url)
    store = WeightStore(weights_url(config, settings.var_dir))
    source = _served(url, store)
    metrics = source.json("metrics")
    train = TrainConfig.model_validate(metrics["train"])
    # By the name in the weights: a stand-in stays one, also when the real data could be fetched by now.
    name = cast(DatasetName, metrics["dataset"])
    dataset = load_dataset(name, settings.data_dir, seed=train.seed, synthetic=train.synthetic)
    # What the replicas say, not what the file asks for: that may leave the choice to them.
    is_low = any(" float32 (" not in execution for execution in model["execution"].values())
    return Site.of(url, config, config_hash, dataset, source, "bfloat16" if is_low else "float32")


def _served(url: str, store: WeightStore) -> WeightSource:
    """Return the weights that answers are made with now: a version, or a version with some deltas.

    Raises:
        StageUnavailableError: the mesh does not say.
    """
    try:
        stamp = str(get_json(url, "/readyz", _TIMEOUT_S)["version"])
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise StageUnavailableError(f"the mesh at {url} is not ready: {error}", stage="ingress") from error
    if not parse_stamp(stamp)[1]:
        return store.open(stamp)
    from benchmarks.weights.drift import States

    return States(store).source(stamp)


def _model(url: str) -> dict[str, Any]:
    try:
        models = get_json(url, "/v1/models", _TIMEOUT_S)["models"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise StageUnavailableError(f"no mesh answers at {url}: {error}", stage="ingress") from error
    return next(dict(model) for model in models if model["current"])
