"""A plan is obeyed for its version, device and shapes, and ignored with a reason for any other."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest

from models.features import FeatureExtractor
from models.golden import Golden, add_golden
from models.quantize.measure import eligible_layers, with_formats
from models.quantize.plan import PrecisionPlan, device_name, find_plan, shapes_digest
from models.random_weights import TINY
from models.stations import CandidateRanker, load_network
from services.ranking.config import RankingConfig
from services.ranking.service import RankingService
from shared.clock import ManualClock
from shared.errors import WeightsError
from shared.log import JsonLogger
from tests.helpers.weights import random_weights

SOURCE = random_weights()
LAYERS = eligible_layers(load_network(SOURCE, TINY))


def _plan(**changes: object) -> PrecisionPlan:
    fields: dict[str, object] = {
        "version": SOURCE.version,
        "device": device_name(),
        "shapes": shapes_digest(TINY),
        "threads": 1,
        "candidate_counts": (100,),
        "ne_budget": 2e-4,
        "ne_change": 1e-5,
        "score_error_max": 0.02,
        "layers": dict.fromkeys(LAYERS, "int8"),
    }
    return PrecisionPlan.model_validate(fields | changes)


def _reasons(stream: io.StringIO) -> list[str]:
    return [json.loads(line)["reason"] for line in stream.getvalue().splitlines()]


def test_a_plan_read_back_is_the_same(tmp_path: Path) -> None:
    plan = _plan()
    assert plan.write(tmp_path / "plans").parent == tmp_path / "plans"
    stream = io.StringIO()
    assert find_plan(tmp_path / "plans", SOURCE.version, TINY, JsonLogger(stream=stream)) == plan
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "other"}, "version is 'other', not 'random'"),
        ({"device": "an abacus"}, "device is 'an abacus'"),
        ({"shapes": "0"}, "shapes is '0'"),
        ({"layers": {}}, "says that nothing pays here"),
        ({"layers": {"layers.99.candidate.up": "int8"}}, "name ['layers.99.candidate.up']"),
        ({"layers": {"counters.0": "int8"}}, "name ['counters.0']"),
        ({"ne_change": -3e-4}, "ne_change must be within ne_budget 0.0002, is -0.0003"),
        ({"ne_change": "NaN"}, "ne_change must be within ne_budget 0.0002, is nan"),
        ({"score_error_max": 0.051}, "score_error_max must be at most 0.05, is 0.051"),
        ({"score_error_max": "Infinity"}, "score_error_max must be at most 0.05, is inf"),
    ],
)
def test_a_plan_of_something_else_is_ignored_and_logged(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    _plan(**changes).write(tmp_path)
    stream = io.StringIO()
    assert find_plan(tmp_path, SOURCE.version, TINY, JsonLogger(stream=stream)) is None
    assert reason in _reasons(stream)[0]


def test_a_plan_whose_kernels_are_not_there_is_ignored_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.quantize.plan.missing", lambda name: "not built" if name == "int8_native" else "")
    _plan(layers={"layers.0.candidate.up": "int8_native"}).write(tmp_path)
    stream = io.StringIO()
    assert find_plan(tmp_path, SOURCE.version, TINY, JsonLogger(stream=stream)) is None
    assert _reasons(stream) == ["format int8_native: not built"]


def test_a_file_that_is_no_plan_is_ignored_and_logged(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").write_bytes(b"\xff")
    stream = io.StringIO()
    assert find_plan(tmp_path, SOURCE.version, TINY, JsonLogger(stream=stream)) is None
    assert ["is no plan" in _reasons(stream)[0], "cannot be read" in _reasons(stream)[1]] == [True, True]


def test_a_pipe_and_a_device_among_the_plans_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    (tmp_path / "b.json").symlink_to("/dev/zero")
    stream = io.StringIO()
    assert find_plan(tmp_path, SOURCE.version, TINY, JsonLogger(stream=stream)) is None
    assert _reasons(stream) == ["is no regular file"] * 2


def test_a_reason_is_short_whatever_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"e" * 100_000: 1}))
    (tmp_path / "b.json").write_text("[")
    stream = io.StringIO()
    assert find_plan(tmp_path, SOURCE.version, TINY, JsonLogger(stream=stream)) is None
    assert [len(_reasons(stream)[0]) <= 300, _reasons(stream)[1].startswith("is no plan: Invalid JSON")] == [True, True]


def test_a_folder_that_is_not_there_has_no_plan(tmp_path: Path) -> None:
    assert find_plan(tmp_path / "none", SOURCE.version, TINY, JsonLogger(stream=io.StringIO())) is None


def test_a_service_obeys_its_plan_and_says_so(tmp_path: Path) -> None:
    _plan().write(tmp_path)
    config = RankingConfig(plans=str(tmp_path))
    service = RankingService.from_weights(config, SOURCE, ManualClock(), "r-0", JsonLogger(stream=io.StringIO()))
    assert service.status()["execution"] == f"reference mixed (by plan {len(LAYERS)} layers in int8, NE +0.00%)"
    plain = RankingService.from_weights(RankingConfig(), SOURCE, ManualClock(), "r-0")
    assert "plan" not in plain.status()["execution"]


def test_low_precision_answers_the_golden_request_within_what_the_plan_says() -> None:
    source = random_weights(golden=False)
    for name, weight in source.groups["dense"].items():
        if name.endswith("candidate.up.weight"):
            weight[:, 0] *= 100  # an outlier in each row: int8 keeps little of the rest
    add_golden(source, Golden.from_weights(SOURCE).request)
    golden, extractor = Golden.from_weights(source), FeatureExtractor.from_weights(source)
    golden.check_ranker(CandidateRanker(source, plan=_plan(score_error_max=0.5)), extractor)
    with pytest.raises(WeightsError, match=r"do not answer the golden request: (scores|embedding)"):
        golden.check_ranker(CandidateRanker(source, plan=_plan(score_error_max=0.0)), extractor)


def test_a_ranker_refuses_a_plan_of_something_else() -> None:
    with pytest.raises(ValueError, match="plan must be of version and shapes"):
        CandidateRanker(SOURCE, plan=_plan(version="other"))
    with pytest.raises(ValueError, match=r"layers must be among .*, name \['heads.exits.2.logits'\]"):
        CandidateRanker(SOURCE, plan=_plan(layers={"heads.exits.2.logits": "int8"}))


def test_formats_are_undone() -> None:
    network = load_network(SOURCE, TINY)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    undo = with_formats(network, {"layers.0.candidate.up": "int8", "layers.1.candidate.down": "fp32"})
    assert "layers.0.candidate.up.weight" not in network.state_dict()
    undo()
    assert before.keys() == network.state_dict().keys()
    for name, value in network.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), before[name].numpy())


def test_logits_and_norms_are_never_eligible() -> None:
    assert LAYERS
    assert not [name for name in LAYERS if name.endswith(("logits", "norm", "speculative")) or "first" in name]
