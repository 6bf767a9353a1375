"""The documents that a mesh shows to people."""

from __future__ import annotations

import json

import pytest

from tests.helpers.tiny_dataset import tiny_dataset
from training.samples import NUM_HISTORY, NUM_NEXT, SHORT_HISTORY, display_document, sample_document


def test_samples_are_held_out_requests_of_different_users() -> None:
    dataset = tiny_dataset()
    document = sample_document(dataset)
    samples = document["samples"]
    assert len({sample["user_id"] for sample in samples}) == len(samples) > 8
    known_items = set(dataset.catalog.item_id.tolist())
    for sample in samples:
        assert sample["timestamp_s"] >= document["as_of_s"] == dataset.split.test_start_s
        assert len(sample["true_next"]) == len(sample["next_weights"]) == NUM_NEXT
        assert set(sample["true_next"]) < set(sample["candidates"]) <= known_items
        assert len(set(sample["candidates"])) == len(sample["candidates"])
        assert all(1 <= weight <= 5 for weight in sample["next_weights"])


def test_the_shown_history_is_the_newest_past_newest_first() -> None:
    dataset = tiny_dataset()
    log = dataset.log
    for sample in sample_document(dataset)["samples"]:
        user = int((dataset.users.user_id == sample["user_id"]).argmax())
        events = slice(int(log.user_offsets[user]), int(log.user_offsets[user + 1]))
        earlier = [
            {"item_id": item, "weight": float(rating), "timestamp_s": second}
            for item, rating, second in zip(
                log.item_id[events].tolist(), log.rating[events].tolist(), log.timestamp_s[events].tolist(), strict=True
            )
            if second < sample["timestamp_s"]
        ]
        assert sample["num_earlier"] == len(earlier)
        assert sample["history"] == earlier[::-1][:NUM_HISTORY]


def test_known_users_come_first() -> None:
    is_new = [sample["num_earlier"] < SHORT_HISTORY for sample in sample_document(tiny_dataset())["samples"]]
    assert is_new == sorted(is_new)


def test_same_seed_same_document_and_it_is_json() -> None:
    first, second = (sample_document(tiny_dataset(), num_samples=6, seed=4) for _ in range(2))
    assert json.loads(json.dumps(first)) == second
    assert first != sample_document(tiny_dataset(), num_samples=6, seed=5)
    assert len(first["samples"]) <= 6


@pytest.mark.parametrize("position", [0, 17])
def test_display_names_every_item(position: int) -> None:
    catalog = tiny_dataset().catalog
    items = json.loads(json.dumps(display_document(tiny_dataset())))["items"]
    assert len(items) == len(catalog)
    item = items[str(catalog.item_id[position])]
    assert item["title"] == catalog.title[position]
    assert item["year"] == catalog.year[position]
    assert item["genres"] == list(catalog.genres(position))
