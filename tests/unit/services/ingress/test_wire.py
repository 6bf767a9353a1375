"""Rank requests as columns: the same answer as JSON gives, the same limits, bounded decompression."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard

from models.config import FeatureConfig, RankerConfig, TableConfig
from services.ingress.config import IngressConfig
from services.ingress.http import create_app
from services.ingress.model_info import ModelInfo
from services.ingress.serving import FrontModel, Serving
from services.preprocess.config import PreprocessConfig
from shared.clock import SystemClock
from shared.hashing import EntityId
from shared.schema.api import ApiLimits, ErrorBody
from shared.wire import MEDIA_TYPE, CandidateBatch, IdLists, columns_of, decode_batch, encode_request
from tests.helpers.fake_stations import VERSION, FakeMesh

LIMITS = ApiLimits(
    candidates_max=8, body_bytes_max=2_048, deadline_ms_min=50, deadline_ms_default=20_000, deadline_ms_max=20_000,
    features_max=2, feature_ids_max=5,
)  # fmt: skip
MODEL = RankerConfig.model_validate(
    {
        **RankerConfig().model_dump(),
        "tables": [*RankerConfig().tables, TableConfig(name="tag", num_rows=9), TableConfig(name="p", num_rows=3)],
        "candidate_features": [
            *RankerConfig().candidate_features,
            FeatureConfig(name="tags", table="tag", ids_max=2),
            FeatureConfig(name="price", table="p", number_bounds=(1.0,)),
        ],
    }
)
IDS: list[EntityId] = [3, "x", 2]
ROWS: list[dict[str, Any]] = [{"tags": [1, "a"], "price": 2.5}, {}, {"tags": {"ids": [7], "weights": [0.5]}}]


@pytest.fixture
def mesh() -> FakeMesh:
    mesh = FakeMesh(IngressConfig(limits=LIMITS), SystemClock())
    router = mesh.ingress.serving.model(VERSION).router
    front = FrontModel(ModelInfo(VERSION, MODEL, {}, None), router)
    mesh.ingress.serving = Serving(VERSION, front, lambda version: front, ["full", "light"], mesh.clock)
    return mesh


@pytest.fixture
async def client(mesh: FakeMesh) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(mesh.ingress), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://mesh") as client:
        yield client
    await mesh.ingress.aclose()


async def post(
    client: httpx.AsyncClient, content: bytes, media: str = MEDIA_TYPE, encoding: str = ""
) -> httpx.Response:
    headers = {"content-type": media} | ({"content-encoding": encoding} if encoding else {})
    return await client.post("/v1/rank", content=content, headers=headers)


def columns(ids: list[EntityId] | None = None, rows: list[dict[str, Any]] | None = None, **fields: Any) -> bytes:
    batch = CandidateBatch.of(IDS if ids is None else ids, columns_of(ROWS if rows is None else rows))
    return encode_request({"user_id": 42, "speculative": False, **fields}, batch)


def refusal(response: httpx.Response, status: int) -> ErrorBody:
    assert response.status_code == status, response.text
    return ErrorBody.model_validate_json(response.content)


async def test_columns_and_json_are_one_request(client: httpx.AsyncClient, mesh: FakeMesh) -> None:
    document = {"user_id": 42, "speculative": False, "candidates": IDS, "features": ROWS, "request_id": "r"}
    answers = [
        await post(client, columns(request_id="r")),
        await post(client, json.dumps(document).encode(), "application/json"),
        await post(client, zstandard.compress(columns(request_id="r")), encoding="zstd"),
    ]

    bodies = [answer.json() for answer in answers]
    for body in bodies:
        del body["stages"], body["total_ms"]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert bodies[0] == bodies[1] == bodies[2]
    assert {row["id"] for row in bodies[0]["candidates"]} == set(IDS)
    blocks = mesh.services["preprocess"].inner.blocks
    assert blocks[0] == blocks[1] == blocks[2]
    batch = decode_batch(blocks[0], PreprocessConfig().batch_limits)
    tags = batch.features["tags"]
    assert isinstance(tags, IdLists)
    np.testing.assert_array_equal(tags.offsets, [0, 2, 2, 3])


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (columns(list(range(9)), [{}] * 9), "candidates"),
        (columns([1, 1], []), "candidates.1"),
        (columns(["x", "x"], []), "candidates.1"),
        (columns(rows=[{"unheard": [1]}, {}, {}]), "features.unheard"),
        (columns(rows=[{"price": [1]}, {}, {}]), "features.price"),
        (columns(rows=[{"tags": [1, 2, 3, 4, 5, 6]}, {}, {}]), "features.tags"),
        (columns(rows=[{"tags": [1], "price": 1.0, "genres": [1]}, {}, {}]), "features"),
        (columns(limit=9), "limit"),
        (columns(deadline_ms=49), "deadline_ms"),
        (columns(candidates=[1]), "candidates"),
        (columns(unheard=1), "unheard"),
        (columns(user_id=-1), "user_id"),
    ],
)
async def test_the_limits_are_those_of_json(
    client: httpx.AsyncClient, mesh: FakeMesh, content: bytes, field: str
) -> None:
    error = refusal(await post(client, content), 422)
    assert error.context["field"] == field
    assert {"limit", "value"} <= error.context.keys()
    assert not mesh.services["preprocess"].started, "nothing reaches a station"


@pytest.mark.parametrize(
    ("features", "field"),
    [
        ([{}], "features"),
        ([{"tags": {"ids": [1], "weights": []}}, {}, {}], "features.0.tags.weights"),
        ([{"tags": 1.0}, {"tags": [1]}, {}], "features.tags"),
        ([{"price": 1e39}, {}, {}], "features.0.price"),
        ([{"a b": [1]}, {}, {}], "features.0.a b.[key]"),
        ([{"tags": [1, 2, 3, 4, 5, 6]}, {}, {}], "features.tags"),
    ],
)
async def test_features_in_json_keep_the_same_limits(
    client: httpx.AsyncClient, features: list[dict[str, Any]], field: str
) -> None:
    document = {"user_id": 1, "candidates": IDS, "features": features}
    error = refusal(await post(client, json.dumps(document).encode(), "application/json"), 422)
    assert str(error.context["field"]).startswith(field)


@pytest.mark.parametrize(
    "content", [b"", b"RMWC", b"{}", columns()[:40], columns() + b"\0", b"RMWC\x02" + columns()[5:]]
)
async def test_other_bytes_are_malformed(client: httpx.AsyncClient, content: bytes) -> None:
    assert refusal(await post(client, content), 400).code == "malformed_body"


async def test_a_small_frame_that_unpacks_to_much_is_refused(client: httpx.AsyncClient) -> None:
    bomb = zstandard.compress(b" " * 50_000_000)
    assert len(bomb) < LIMITS.body_bytes_max * 4
    for media in (MEDIA_TYPE, "application/json"):
        assert refusal(await post(client, bomb[:2_048], media, "zstd"), 413).context["limit"] == 2_048


@pytest.mark.parametrize("content", [b"", b"no frame", zstandard.compress(columns())[:-9]])
async def test_a_broken_frame_is_malformed(client: httpx.AsyncClient, content: bytes) -> None:
    assert refusal(await post(client, content, encoding="zstd"), 400).code == "malformed_body"


async def test_an_unknown_encoding_says_what_there_is(client: httpx.AsyncClient) -> None:
    response = await post(client, columns(), encoding="br")
    assert refusal(response, 415).context["field"] == "content-encoding"
    assert response.headers["accept-encoding"] == "zstd, identity"


async def test_events_are_not_columns(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/events", content=columns(), headers={"content-type": MEDIA_TYPE})
    assert refusal(response, 415).context["field"] == "content-type"
