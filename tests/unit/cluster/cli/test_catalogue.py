"""Names and samples that a mesh publishes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from cluster.cli.catalogue import Catalogue
from tests.helpers.mesh_answers import catalogue
from tests.helpers.tiny_dataset import tiny_dataset
from training.samples import display_document, sample_document


def test_reads_what_training_publishes() -> None:
    dataset = tiny_dataset()
    known = Catalogue.from_documents(sample_document(dataset, num_samples=4), display_document(dataset))
    assert known.as_of_s == dataset.split.test_start_s
    sample = known.samples[0]
    assert set(sample.ratings()) == set(sample.true_next)
    assert known.item(sample.candidates[0]).title in dataset.catalog.title
    assert known.sample_of(str(sample.user_id)) is sample


def test_unknown_keys_beside_it_are_ignored_but_not_inside() -> None:
    assert Catalogue.from_documents({"items": {}, "novelty": 1}) == Catalogue()
    with pytest.raises(ValidationError):
        Catalogue.from_documents({"items": {"1": {"title": "x", "novelty": 1}}})


def test_draw_is_fixed_by_user_distinct_and_bounded_by_the_catalogue() -> None:
    known = catalogue()
    first = known.draw(6040, 30)
    assert first == known.draw("6040", 30) != known.draw(6041, 30)
    assert len(set(first)) == 30
    assert len(known.draw("someone", 1_000)) == len(known.items)
    assert Catalogue().draw(1, 5) == []


def test_draw_starts_with_the_sample_and_fills_up() -> None:
    known = catalogue()
    candidates = known.samples[0].candidates
    assert known.draw(6040, 10, candidates) == list(candidates[:10])
    more = known.draw(6040, 50, candidates)
    assert more[: len(candidates)] == list(candidates)
    assert len(set(more)) == 50


def test_no_sample_for_another_user_or_a_string_that_looks_alike() -> None:
    assert catalogue().sample_of(1) is None
    assert catalogue().sample_of("06040") is None
