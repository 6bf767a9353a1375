from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.config import MeshConfig, load_mesh
from cluster.scaling.config import ScalingConfig
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"min_replicas": 5}, "min_replicas must be at most max_replicas 4, is 5"),
        ({"busy_low": 0.7}, "busy_low must be below busy_target 0.7, is 0.7"),
        ({"down_after_s": 9.0}, "down_after_s must be at least window_s 10, is 9"),
        ({"trend_s": 9.0}, "trend_s must be at least window_s 10, is 9"),
        ({"zero_after_s": 14.0}, "zero_after_s must be at least start_s 15"),
        ({"busy_target": 1.0}, "less than 1"),
        ({"max_replicas": 1_001}, "less than or equal to 1000"),
        ({"min_replicas": -1}, "greater than or equal to 0"),
        ({"signal": "gpu"}, "'compute' or 'sm'"),
        ({"targets": 1}, "Extra inputs"),
    ],
)
def test_a_block_that_breaks_a_rule_is_refused(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScalingConfig.model_validate(block)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"preprocess": {"replicas": {"replicas": 5, "autoscaling": {}}}}, "replicas must be 1 to 4, is 5"),
        ({"preprocess": {"replicas": {"replicas": 0}}}, "replicas must be at least 1, is 0"),
        (
            {"preprocess": {"replicas": {"replicas": 2, "autoscaling": {"min_replicas": 0}}}},
            "preprocess.replicas.autoscaling.min_replicas must be at least 1",
        ),
        ({"ingress": {"replicas": {"autoscaling": {}}}}, "ingress.replicas.autoscaling is not possible"),
        (
            {
                "embedding": {"replicas": {"replicas": 2, "autoscaling": {}}},
                "ingress": {"service": {"hedge": {"share_max": 0.1}}},
            },
            "hedge needs embedding.replicas.replicas of at least 2",
        ),
    ],
)
def test_a_mesh_that_cannot_scale_so_is_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeshConfig.model_validate(document)


def test_foundation_workers_may_start_at_none() -> None:
    block = {"replicas": 0, "autoscaling": {"min_replicas": 0, "max_replicas": 3}}
    config = MeshConfig.model_validate({"foundation": {"replicas": block}})
    assert config.foundation is not None
    assert (config.foundation.replicas.replicas_min, config.foundation.replicas.replicas_max) == (0, 3)


def test_a_file_names_the_field(tmp_path: Path) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text("sequence: { replicas: { autoscaling: { busy_target: 2 } } }", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"sequence.replicas.autoscaling.busy_target must be under 1, is 2"):
        load_mesh(path)


def test_the_time_of_silence() -> None:
    config = ScalingConfig(max_replicas=5, window_s=10, down_after_s=100, down_every_s=30)
    assert config.silence_s == 10 + 100 + 3 * 30
    assert ScalingConfig(max_replicas=1).silence_s == 0
    assert ScalingConfig(min_replicas=0, max_replicas=1, zero_after_s=50).silence_s == 50
