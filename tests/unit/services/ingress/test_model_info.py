from __future__ import annotations

import json

from models.random_weights import TINY
from models.source import MemorySource
from services.ingress.model_info import ModelInfo


def source(**documents: object) -> MemorySource:
    return MemorySource("v7", {}, {"model": TINY.model_dump(mode="json"), **documents})  # type: ignore[dict-item]


def test_only_the_model_document_is_needed() -> None:
    info = ModelInfo.from_weights(source())

    assert (info.version, info.metrics, info.samples) == ("v7", {}, None)
    body = info.body(["full", "light"])
    assert (body.history_length, body.tiers, body.objectives) == (
        TINY.history_length,
        ["full", "light"],
        ["click", "conversion"],
    )


def test_metrics_are_what_was_measured_not_how_it_was_trained() -> None:
    evaluation = {"split": "test", "history_mode": "strict", "tier": "full", "objectives": {"click": {"auc": 0.797}}}
    metrics = {"dataset": "ml-1m", "train": {"seed": 3}, "evaluations": [evaluation]}
    info = ModelInfo.from_weights(source(metrics=metrics))

    assert info.metrics == {"dataset": "ml-1m", "test.strict.full.click.auc": 0.797}


def test_metrics_are_flattened_to_dotted_names() -> None:
    metrics = {"click": {"auc": 0.79, "curve": [1, 2]}, "rows": 97_002, "data": "ml-1m"}
    info = ModelInfo.from_weights(source(metrics=metrics))

    assert info.metrics == {"click.auc": 0.79, "rows": 97_002, "data": "ml-1m"}


def test_samples_and_names_become_one_document() -> None:
    info = ModelInfo.from_weights(source(samples={"samples": [1]}, display={"items": {"1": {"title": "Ran"}}}))

    assert info.samples is not None
    assert json.loads(info.samples) == {"samples": [1], "items": {"1": {"title": "Ran"}}}


def test_samples_without_names_are_not_shown() -> None:
    assert ModelInfo.from_weights(source(samples={"samples": []})).samples is None
