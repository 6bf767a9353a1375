"""A replica is built only from weights that answer their golden request as they did when they were published."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from models.source import MemorySource
from services.embedding.config import EmbeddingConfig
from services.embedding.service import EmbeddingService
from services.preprocess.config import PreprocessConfig
from services.preprocess.service import PreprocessService
from services.ranking.config import RankingConfig
from services.ranking.service import RankingService
from services.sequence.config import SequenceConfig
from services.sequence.service import SequenceService
from services.speculative.config import FoundationConfig
from services.speculative.foundation import FoundationService
from shared.clock import ManualClock
from shared.errors import WeightsError
from shared.userlog import MemoryUserLog
from tests.helpers.weights import random_weights

CLOCK = ManualClock()
BUILDERS: dict[str, Callable[[MemorySource], Any]] = {
    "preprocess": lambda source: PreprocessService.from_weights(PreprocessConfig(), source, CLOCK, "p-0"),
    "embedding": lambda source: EmbeddingService.from_weights(EmbeddingConfig(shard=1), source, CLOCK, "e-0"),
    "sequence": lambda source: SequenceService.from_weights(SequenceConfig(), source, MemoryUserLog(), CLOCK, "s-0"),
    "ranking": lambda source: RankingService.from_weights(RankingConfig(), source, CLOCK, "r-0"),
    "foundation": lambda source: FoundationService.from_weights(FoundationConfig(), source, CLOCK, "f-0"),
}
BREAKS: dict[str, Callable[[MemorySource], None]] = {
    "preprocess": lambda source: _add(source.groups["golden"], "features.unique.item", 1),
    "embedding": lambda source: _add(source.groups["tables/item"], "weight", 0.5),
    "sequence": lambda source: _add(source.groups["dense"], "network.encoder.summaries", 0.5),
    "ranking": lambda source: _add(source.groups["dense"], "network.presence", 0.5),
    "foundation": lambda source: _add(source.groups["dense"], "network.heads.speculative.weight", 0.5),
}


PUBLISHED = random_weights()


def published() -> MemorySource:
    """Return weights as publishing leaves them, free to be changed."""
    groups = {name: dict(tensors) for name, tensors in PUBLISHED.groups.items()}
    return MemorySource(PUBLISHED.version, groups, dict(PUBLISHED.documents))


def _add(tensors: dict[str, Any], name: str, number: float) -> None:
    tensors[name] = tensors[name] + np.asarray(number, tensors[name].dtype)


@pytest.mark.parametrize("station", BUILDERS)
async def test_a_station_is_built_from_weights_that_answer(station: str) -> None:
    service = BUILDERS[station](published())

    assert service.status()["version"] == "random"
    await service.check_health()


@pytest.mark.parametrize("station", BUILDERS)
async def test_a_station_is_not_built_from_weights_that_answer_otherwise(station: str) -> None:
    source = published()
    BREAKS[station](source)

    with pytest.raises(WeightsError, match="golden"):
        BUILDERS[station](source)


@pytest.mark.parametrize("station", BUILDERS)
async def test_weights_without_a_golden_request_are_refused(station: str) -> None:
    source = published()
    del source.documents["golden"]

    with pytest.raises(WeightsError):
        BUILDERS[station](source)


def test_stations_that_compute_nothing_do_not_import_torch() -> None:
    modules = "services.preprocess.service, services.ingress.http, services.speculative.service"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
