"""Publishes a trained model: groups of tensors, documents and a golden request, manifest last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from models.config import WEIGHTS_FORMAT
from models.golden import GoldenRequest, add_golden
from shared.hashing import EntityId
from shared.schema.user import UserHistory
from shared.weights import Derivation, WeightStore
from training.config import TrainConfig
from training.data import Dataset
from training.evaluate import Evaluation
from training.model import TrainedModel
from training.samples import display_document, sample_document

_NUM_GOLDEN_CANDIDATES = 24
_UNKNOWN_CANDIDATES: tuple[EntityId, ...] = (2**62, "no-such-item")


def publish(
    model: TrainedModel,
    config: TrainConfig,
    dataset: Dataset,
    evaluations: list[Evaluation],
    store: WeightStore,
    train_s: float,
    notes: Mapping[str, Any] | None = None,
    derived: Derivation | None = None,
) -> str:
    """Write a version of the weights.

    Args:
        model: What is published.
        config: How it was trained.
        dataset: What it was trained on.
        evaluations: Its measured quality.
        store: Where to.
        train_s: Seconds that training took.
        notes: More entries of the document ``metrics``: what was done to the model after training.
        derived: The version that the model was made of; None: it was trained.

    Returns:
        The version.

    Raises:
        WeightsError: the stations disagree with the oracle on the golden request, or the store refuses.
    """
    source = model.source()
    add_golden(source, golden_request(dataset, model.ranker.config.history_length))
    metrics: dict[str, Any] = {
        "format": WEIGHTS_FORMAT,
        "dataset": dataset.name,
        "provenance": dataset.provenance,
        "train_s": train_s,
        "train": config.model_dump(mode="json"),
        "evaluations": [evaluation.model_dump(mode="json") for evaluation in evaluations],
        **(notes or {}),
    }
    with store.writer(derived=derived) as writer:
        for group, tensors in source.groups.items():
            writer.add_tensors(group, tensors)
        for name, document in (source.documents | {"metrics": metrics}).items():
            writer.add_json(name, document)
        writer.add_json("samples", sample_document(dataset))
        writer.add_json("display", display_document(dataset))
        return writer.commit()


def golden_request(dataset: Dataset, history_length: int) -> GoldenRequest:
    """Return the first test row's request: its user and time, its item among others, and two items nobody knows."""
    log, rows = dataset.log, dataset.split.test
    user_index, as_of_s = int(rows.user_index[0]), int(rows.timestamp_s[0])
    end = int(log.position_before(rows.user_index[:1], as_of_s)[0])
    newest = slice(max(end - history_length, int(log.user_offsets[user_index])), end)
    history = UserHistory(
        item_keys=log.item_id[newest],
        weights=log.rating[newest].astype(np.float32),
        timestamps_s=log.timestamp_s[newest],
        num_total=end - int(log.user_offsets[user_index]),
        profile={name: value for name, value in dataset.users.profile(user_index).items() if value},
    )
    spread = dataset.catalog.item_id[:: max(len(dataset.catalog) // _NUM_GOLDEN_CANDIDATES, 1)][:_NUM_GOLDEN_CANDIDATES]
    candidates: list[EntityId] = list(dict.fromkeys([int(rows.item_id[0]), *spread.tolist()]))
    return GoldenRequest(
        user=int(dataset.users.user_id[user_index]),
        candidates=[*candidates, *_UNKNOWN_CANDIDATES],
        surface=dataset.surfaces[int(rows.surface[0])],
        as_of_s=as_of_s,
        history=history,
    )
