"""The plan of a trained model: a layer with an outlier stays in float32, and the joint change is within the budget."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from models.execution import choose_execution
from models.quantize.formats import Format
from models.random_weights import TINY
from models.wukong import InteractionLayer
from shared.clock import Clock
from shared.weights import WeightStore
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import OptimizerConfig, TrainConfig
from training.evaluate import predict
from training.loop import train
from training.model import TrainedModel
from training.publish import publish
from training.quantize import HeldOut, make_plan, quantize_version, show_plan

_CONFIG = TrainConfig(
    name="tiny",
    dataset="synthetic",
    threads=1,
    batch_rows=256,
    train_share=0.3,
    model=TINY,
    optimizer=OptimizerConfig(network_rate=0.01, table_rate=0.02, warmup_steps=2),
)
_OUTLIER = "layers.0.candidate.down"
_BUDGET = 2e-3


def _int8_is_fast(
    layers: Mapping[str, nn.Linear], formats: Sequence[Format], counts: Sequence[int], clock: Clock, rounds: int
) -> dict[str, dict[Format, float]]:
    return {name: {"fp32": 1.0, "int8": 0.4} for name in layers}


def _passes(seconds: dict[str, float], stack_s: float) -> Callable[..., dict[str, float]]:
    """Return a timing that never runs anything: these figures, and one for every packed form of this machine."""

    def time_passes(_: object, variants: object, stacks: Mapping[str, object], *rest: object) -> dict[str, float]:
        return seconds | dict.fromkeys(stacks, stack_s)

    return time_passes


@pytest.fixture
def _int8_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine does at this size, which is too small for any format to pay."""
    monkeypatch.setattr("training.quantize.time_layers", _int8_is_fast)
    monkeypatch.setattr("training.quantize._time_passes", _passes({"fp32": 1.0, "bf16": 0.6, "plan": 0.5}, 0.9))


@pytest.fixture
def model() -> TrainedModel:
    return train(_CONFIG, tiny_dataset())


def _plant_outlier(model: TrainedModel) -> None:
    """Scale one hidden unit up and its reader down: the same function, with an input a thousand times the others'."""
    layer = cast(InteractionLayer, model.ranker.network.layers[0])
    inputs: list[torch.Tensor] = []
    handle = layer.candidate.down.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    predict(model, tiny_dataset(), tiny_dataset().split.valid, "strict")
    handle.remove()
    unit = int(torch.cat(inputs).mean(0).argmax())  # one that is mostly open
    with torch.no_grad():
        layer.candidate.up.weight[unit] *= 4096
        layer.cross_up.weight[unit] *= 4096
        layer.candidate.down.weight[:, unit] /= 4096


@pytest.mark.usefixtures("_int8_pays")
def test_a_layer_with_an_outlier_stays_in_float32(model: TrainedModel) -> None:
    dataset = tiny_dataset()
    before = predict(model, dataset, dataset.split.valid.select(slice(0, 300)), "strict")
    plain = make_plan(HeldOut(model, dataset, dataset.split.valid), "v", budget=_BUDGET, counts=(8,), rounds=1)
    _plant_outlier(model)
    after = predict(model, dataset, dataset.split.valid.select(slice(0, 300)), "strict")
    np.testing.assert_allclose(after[2], before[2], rtol=0, atol=1e-4)
    held_out = HeldOut(model, dataset, dataset.split.valid)
    plan = make_plan(held_out, "v", budget=_BUDGET, counts=(8,), rounds=1)
    assert plan.layers[_OUTLIER.replace("down", "up")] == "int8"
    assert plain.layers[_OUTLIER] == "int8"
    assert _OUTLIER not in plan.layers
    damage = [abs(each.evidence[_OUTLIER].ne_changes["int8"]) for each in (plain, plan)]
    assert damage[1] > _BUDGET > damage[0]
    assert abs(plan.ne_change) <= _BUDGET
    assert abs(held_out.change(plan.layers)) == abs(plan.ne_change)
    assert plan.score_error_max > 0


@pytest.mark.parametrize(
    ("plan_s", "stack_s"),
    [
        pytest.param(1.1, 2.0, id="the modules are faster"),
        pytest.param(0.5, 0.4, id="what a replica runs without a plan is faster"),
    ],
)
def test_a_plan_that_does_not_make_the_whole_pass_faster_is_taken_back(
    model: TrainedModel, monkeypatch: pytest.MonkeyPatch, plan_s: float, stack_s: float
) -> None:
    monkeypatch.setattr("training.quantize.time_layers", _int8_is_fast)
    passes = _passes({"fp32": 1.0, "bf16": 1.2, "plan": plan_s}, stack_s)
    monkeypatch.setattr("training.quantize._time_passes", passes)
    held_out = HeldOut(model, tiny_dataset(), tiny_dataset().split.valid)
    plan = make_plan(held_out, "v", budget=_BUDGET, counts=(8,), rounds=1)
    assert (plan.layers, plan.ne_change, plan.score_error_max) == ({}, 0.0, 0.0)
    assert _OUTLIER in plan.rolled_back
    assert plan.without_plan == choose_execution().name
    assert {"torch_float32", plan.without_plan} <= set(plan.stack_ne_changes)


@pytest.mark.usefixtures("_int8_pays")
def test_a_plan_that_no_replica_would_obey_is_taken_back(model: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = HeldOut(model, tiny_dataset(), tiny_dataset().split.valid)
    monkeypatch.setattr(held_out, "score_error", lambda _: 0.06)
    plan = make_plan(held_out, "v", budget=_BUDGET, counts=(8,), rounds=1)
    assert (plan.layers, plan.score_error_max) == ({}, 0.0)
    assert _OUTLIER in plan.rolled_back


def test_a_folder_that_cannot_be_made_is_found_before_anything_is_measured(
    model: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.quantize.dataset_of", lambda *_: pytest.fail("it was measured"))
    store = WeightStore(str(tmp_path / "weights"))
    version = publish(model, _CONFIG, tiny_dataset(), [], store, 1.0)
    (tmp_path / "file").touch()
    quiet = Console(file=io.StringIO())
    with pytest.raises(FileExistsError):
        quantize_version(store, version, tmp_path, tmp_path / "file", 2e-4, quiet, quiet)


@pytest.mark.usefixtures("_int8_pays")
def test_no_budget_means_no_low_precision(model: TrainedModel) -> None:
    held_out = HeldOut(model, tiny_dataset(), tiny_dataset().split.valid)
    plan = make_plan(held_out, "v", budget=0.0, counts=(8,), rounds=1)
    assert plan.layers == {}
    assert (plan.ne_change, plan.score_error_max) == (0.0, 0.0)
    text = io.StringIO()
    show_plan(plan, Console(file=text, width=160))
    assert "nothing pays here" in text.getvalue()


def test_a_published_version_gets_a_plan_for_this_device(
    model: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.quantize.dataset_of", lambda *_: tiny_dataset())
    monkeypatch.setattr("training.quantize.CANDIDATE_COUNTS", (8,))
    store = WeightStore(str(tmp_path / "weights"))
    version = publish(model, _CONFIG, tiny_dataset(), [], store, 1.0)
    text, told = io.StringIO(), io.StringIO()
    consoles = Console(file=text, width=80), Console(file=told, width=80)
    plan = quantize_version(store, version, tmp_path, tmp_path / "plans", 2e-4, *consoles)
    assert "held-out rows" in told.getvalue()
    shown = text.getvalue()
    assert "…" not in shown, "a table must fit an ordinary terminal"
    assert all(
        name in shown for name in ("fp32_packed", "bf16_packed", "int8_native", "layers.1.candidate.attention_out")
    )
    assert (tmp_path / "plans" / plan.file_name()).exists()
    assert abs(plan.ne_change) <= 2e-4
    assert set(plan.pass_seconds) >= {"fp32", "plan", "torch_float32", plan.without_plan}
    # The packed form in float32 is the same network to rounding.
    assert abs(plan.stack_ne_changes["torch_float32"]) < 1e-5
    words = (
        version,
        "layers.0.candidate.up",
        "whole full pass",
        "budget 0.0002",
        "replicas obey a plan when execution.backend is auto",
        "torch_float32: NE",
        "without a plan",
    )
    for word in words:
        assert word in text.getvalue()
