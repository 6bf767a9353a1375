"""Answers, statuses and catalogues as a mesh would give them, small and with everything in them."""

from __future__ import annotations

from typing import Any

from cluster.cli.catalogue import Catalogue, Item, PastEvent, Sample
from services.ingress.directory import StatusBody
from shared.schema.api import Level, Pass, RankResponse

NUM_CANDIDATES = 40
VERSION = "20261129-201233-9f31c2aa"


def catalogue() -> Catalogue:
    """Return 60 items and one sample request of user 6040: items 4 and 33 come next, rated 5 and 2."""
    items = {
        str(item): Item(title=f"Film {item}", year=1900 + item, genres=("Drama", "Comedy")) for item in range(1, 61)
    }
    items["4"] = Item(
        title="Dr. Strangelove or: How I Learned to Stop Worrying and Love the Bomb (1963)", year=1963, genres=("War",)
    )
    sample = Sample(
        user_id=6040,
        timestamp_s=978_300_000,
        profile={"gender": "F", "age": "25", "occupation": "artist"},
        num_earlier=1_234,
        history=(
            PastEvent(item_id=50, weight=4, timestamp_s=978_200_000),
            PastEvent(item_id=51, weight=1, timestamp_s=978_100_000),
        ),
        candidates=tuple(range(1, NUM_CANDIDATES + 1)),
        true_next=(4, 33),
        next_weights=(5.0, 2.0),
    )
    return Catalogue(items=items, samples=(sample,), as_of_s=978_000_000, provenance="tiny", dataset="synthetic")


def answer(**changes: Any) -> dict[str, Any]:
    """Return the body of an answer: item ``i`` on place ``i``, the first ten by the full pass, three exact hits."""
    return {
        "request_id": "r-1",
        "user_id": 6040,
        "weights_version": VERSION,
        "tier": "full",
        "tier_reason": "default",
        "candidates": [_candidate(place) for place in range(1, NUM_CANDIDATES + 1)],
        "num_candidates": NUM_CANDIDATES,
        "history_length": 50,
        "degraded": [],
        "reasons": {},
        "num_oov": {"item_id": 0},
        "stages": [
            {"name": "admission", "start_ms": 0.0, "duration_ms": 0.4, "critical": True},
            {"name": "preprocess", "start_ms": 0.4, "duration_ms": 4.0, "compute_ms": 2.0, "critical": True},
            {"name": "sequence", "start_ms": 0.4, "duration_ms": 8.0, "compute_ms": 8.0, "critical": False},
            {"name": "ranking:full", "start_ms": 4.4, "duration_ms": 15.6, "compute_ms": 12.0, "critical": True},
        ],
        "total_ms": 20.0,
        **changes,
    }


def response(**changes: Any) -> RankResponse:
    """Return the same, validated."""
    return RankResponse.model_validate(answer(**changes))


def _candidate(place: int) -> dict[str, Any]:
    click = 1 - place / (NUM_CANDIDATES + 1)
    level: Level = "exact" if place <= 3 else "user" if place <= 6 else "none"
    scored_by: Pass = "full" if place <= 10 else "first"
    scores = {"click": click, "conversion": click / 2}
    return {"id": place, "scores": scores, "value": 1.5 * click, "scored_by": scored_by, "speculative": level}


def status_body(**changes: Any) -> StatusBody:
    """Return a mesh of three stations, one of two embedding replicas down."""
    return StatusBody.model_validate(
        {
            "name": "rankmesh",
            "ready": True,
            "version": VERSION,
            "replica": "ingress#1",
            "counters": {},
            "store": {"kind": "embedded", "url": "redis://127.0.0.1:6401", "healthy": True, "pid": 77},
            "deployments": [
                {"name": "ingress", "target": 1, "replicas": [{"id": "ingress#1", "state": "ready", "pid": 11}]},
                {
                    "name": "embedding:0",
                    "target": 2,
                    "replicas": [
                        {
                            "id": "embedding:0#1",
                            "state": "ready",
                            "pid": 12,
                            "version": VERSION,
                            "counters": {"lookups": 1_234},
                        },
                        {"id": "embedding:0#2", "state": "down", "pid": 13, "version": "older"},
                    ],
                },
                {"name": "foundation", "target": 1, "replicas": []},
            ],
            **changes,
        }
    )
