"""Hostile bytes into every parser of what comes from outside: an error of its own or a sound value, nothing else.

Inputs are valid ones that are cut, spliced, flipped and given other numbers, with checksums put right again, so that
they come past the first look. No crash, no hang (the lane's time limit), no more memory than a small multiple.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fsspec
import numpy as np
import pytest
import safetensors.numpy

from services.ingress import body
from services.ingress.question import RankQuestion
from shared.errors import RankMeshError, StoreUnavailableError, WeightsError
from shared.schema.api import ApiLimits, EventsRequest
from shared.userlog.blocks import decode_blocks, encode_blocks
from shared.userlog.records import RECORD
from shared.weights import WeightStore
from shared.weights.deltas import ENVELOPE_BYTES, Delta, RowDelta
from shared.weights.layout import view_tensors
from shared.weights.manifest import Manifest
from shared.wire import BatchLimits, CandidateBatch, columns_of, decode_batch, encode_batch, encode_request

LIMITS = BatchLimits(candidates_max=100, features_max=4, feature_ids_max=400)
MEMORY_BYTES_MAX = 32 * 2**20
"""More than any of these inputs, which have some hundred bytes, may make a parser hold."""

NUMBERS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]
WORDS: list[Any] = [None, True, -1, 2**70, 1e400, float("nan"), "", "..", "/etc/passwd", "\x00", [], {}, [[]], {"a": 1}]
DEEP = b"[" * 20_000


def mutate(rng: random.Random, valid: bytes) -> bytes:
    """Return a valid input after one to four changes."""
    data = bytearray(valid)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at : at + rng.randint(1, 16)]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randint(1, 16))
        elif kind == 3:
            layout = rng.choice(["<B", "<H", "<I", "<Q"])
            number = rng.choice(NUMBERS) & (2 ** (8 * struct.calcsize(layout)) - 1)
            data[at : at + struct.calcsize(layout)] = struct.pack(layout, number)
        elif kind == 4:
            other = rng.randrange(len(data) + 1)
            data[at:at] = data[other : other + rng.randint(1, 64)]
        else:
            data = data[:at]
    return bytes(data)


def mutate_document(rng: random.Random, value: Any) -> Any:
    """Return a JSON value with one part of it exchanged, dropped or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(sorted(value))
        if rng.random() < 0.15:
            return {other: item for other, item in value.items() if other != name}
        return {**value, name: mutate_document(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], mutate_document(rng, value[at]), *value[at + rng.randint(0, 1) :]]
    return rng.choice(WORDS)


def attack(
    num_examples: int,
    draw: Callable[[random.Random], bytes],
    parse: Callable[[bytes], object],
    own: type[Exception],
) -> None:
    """Give a parser many inputs; fail on any other error than its own, and on memory."""
    tracemalloc.start()
    try:
        for seed in range(num_examples):
            data = draw(random.Random(seed))
            try:
                parse(data)
            except own:
                continue
            except BaseException as error:
                error.add_note(f"input {seed}: {data[:200]!r}")
                raise
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES_MAX
    finally:
        tracemalloc.stop()


BATCH = CandidateBatch.of([1, 2, 2**63 - 1, "ad", "é"], columns_of([{"price": 1.5, "tags": [1, 2]}, {}, {}, {}, {}]))
BLOCK = encode_batch(BATCH)
REQUEST = encode_request({"user_id": 7, "deadline_ms": 100}, BATCH)
RANK = {"user_id": 7, "candidates": [1, 2, "ad"], "deadline_ms": 100, "limit": 2, "features": [{"price": 1.5}, {}, {}]}
EVENTS = {"events": [{"event_id": "e", "user_id": 7, "item_id": 1, "weight": 4.5, "timestamp_s": 100}]}


def test_blocks_of_candidates(num_examples: int) -> None:
    attack(num_examples, lambda rng: mutate(rng, BLOCK), lambda data: decode_batch(data, LIMITS), RankMeshError)


def test_columns_bodies(num_examples: int) -> None:
    limits = ApiLimits(candidates_max=100)

    def parse(data: bytes) -> None:
        RankQuestion.parse(data, "application/vnd.rankmesh.columns", limits)

    attack(num_examples, lambda rng: mutate(rng, REQUEST), parse, RankMeshError)


@pytest.mark.parametrize("media", body.MEDIA_TYPES)
def test_documents_of_the_api(num_examples: int, media: str) -> None:
    limits = ApiLimits(candidates_max=100)

    def draw(rng: random.Random) -> bytes:
        document = mutate_document(rng, rng.choice([RANK, EVENTS]))
        try:
            whole = body.encode(document, media)
        except (TypeError, ValueError, OverflowError):
            whole = json.dumps(document).encode()
        return rng.choice([whole, mutate(rng, whole), DEEP]) if rng.random() < 0.5 else whole

    def parse(data: bytes) -> None:
        try:
            RankQuestion.parse(data, media, limits)
        finally:
            body.validate(EventsRequest, body.decode(data, media))

    attack(num_examples, draw, parse, RankMeshError)


def described(path: str, content: bytes) -> dict[str, Any]:
    """Return what a manifest says of a file of one chunk."""
    digest = hashlib.sha256(content).hexdigest()
    return {"path": path, "bytes": len(content), "sha256": digest, "chunk_bytes": 2**20, "chunks": [digest]}


def sealed(document: dict[str, Any]) -> bytes:
    """Return a manifest whose checksum of itself is right."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return json.dumps({**document, "digest": hashlib.sha256(text.encode()).hexdigest()}).encode()


TENSORS = safetensors.numpy.save({"w": np.zeros((3, 5), np.float32), "m": np.ones(4, np.bool_)})
MODEL = b'{"width": 8}'
MANIFEST: dict[str, Any] = {
    "format_version": 2,
    "version": "v",
    "created": "2026-01-01T00:00:00.000000Z",
    "files": {
        "dense": {
            **described("dense.safetensors", TENSORS),
            "tensors": {"w": {"dtype": "F32", "shape": [3, 5]}, "m": {"dtype": "BOOL", "shape": [4]}},
        }
    },
    "documents": {"model": described("model.json", MODEL)},
    "derived": {"parent": "u", "made_by": "simplify"},
}


def mutated_manifest(rng: random.Random) -> bytes:
    document: Any = MANIFEST
    for _ in range(rng.randint(1, 3)):
        document = mutate_document(rng, document)
    return sealed(document) if isinstance(document, dict) else json.dumps(document).encode()


def test_manifests_with_a_right_checksum(num_examples: int) -> None:
    def draw(rng: random.Random) -> bytes:
        chance = rng.random()
        return DEEP if chance < 0.02 else mutate(rng, sealed(MANIFEST)) if chance < 0.3 else mutated_manifest(rng)

    def parse(data: bytes) -> None:
        for entry in Manifest.decode(data, "v").entries():
            entry.pieces()

    attack(num_examples, draw, parse, WeightsError)
    assert Manifest.decode(sealed(MANIFEST), "v").version == "v"


def test_versions_whose_checksums_are_right(num_examples: int) -> None:
    fs, store = fsspec.filesystem("memory"), WeightStore("memory://fuzz")

    def draw(rng: random.Random) -> bytes:
        tensors, model = (mutate(rng, whole) if rng.random() < 0.4 else whole for whole in (TENSORS, MODEL))
        dense = {**MANIFEST["files"]["dense"], **described("dense.safetensors", tensors)}
        whole = {**MANIFEST, "files": {"dense": dense}, "documents": {"model": described("model.json", model)}}
        fs.pipe_file("/fuzz/v/dense.safetensors", tensors)
        fs.pipe_file("/fuzz/v/model.json", model)
        return sealed(whole) if rng.random() < 0.7 else mutated_manifest(rng)

    def parse(data: bytes) -> None:
        fs.pipe_file("/fuzz/v/manifest.json", data)
        store.versions()
        store.open("v").verify()

    try:
        attack(num_examples, draw, parse, WeightsError)
    finally:
        fs.rm("/fuzz", recursive=True)


def delta() -> Delta:
    rows = {"tables/item/weight": RowDelta(np.array([1, 5], np.int64), np.ones((2, 4), np.float32))}
    whole = {"dense/w": np.zeros((3, 5), np.float32)}
    return Delta("v", 1, 0, "2026-01-01T00:00:00.000000Z", rows, whole, {"golden": {"user": 1}})


def enveloped(payload: bytes) -> bytes:
    """Return a payload in an envelope that is right for it."""
    head = bytearray(delta().encode()[:ENVELOPE_BYTES])
    whole = replace(delta(), documents={})
    at = bytes(head).index(struct.pack("<I", delta().crc))
    head[at : at + 4] = struct.pack("<I", zlib.crc32(payload))
    length_at = bytes(whole.encode()[:ENVELOPE_BYTES]).rindex(struct.pack("<Q", len(whole.payload)))
    head[length_at : length_at + 8] = struct.pack("<Q", len(payload))
    return bytes(head) + payload


def test_deltas_with_a_right_checksum(num_examples: int) -> None:
    payload = delta().payload
    size = int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8 : 8 + size])

    def draw(rng: random.Random) -> bytes:
        if rng.random() < 0.4:
            return enveloped(mutate(rng, payload))
        about = mutate_document(rng, json.loads(header["__metadata__"]["delta"]))
        text = '{"base": ' + "[" * 5_000 if rng.random() < 0.05 else json.dumps(about)
        changed = mutate_document(rng, header) if rng.random() < 0.4 else {**header, "__metadata__": {"delta": text}}
        raw = json.dumps(changed).encode()
        return enveloped(len(raw).to_bytes(8, "little") + raw + payload[8 + size :])

    attack(num_examples, draw, lambda data: Delta.decode(data, "v", 1), WeightsError)
    assert Delta.decode(enveloped(payload), "v", 1).payload == payload


def test_tensors(num_examples: int) -> None:
    payload = delta().payload
    deep = len(DEEP).to_bytes(8, "little") + DEEP

    def draw(rng: random.Random) -> bytes:
        return deep if rng.random() < 0.02 else mutate(rng, payload)

    attack(num_examples, draw, lambda data: view_tensors(memoryview(data)), ValueError)


def test_blocks_of_events(num_examples: int) -> None:
    records = np.zeros(40, RECORD)
    for name in records.dtype.names or ():
        if records[name].ndim == 1:
            records[name] = np.arange(40)
    valid = b"".join(encode_blocks(records, 16))
    attack(num_examples, lambda rng: mutate(rng, valid), lambda data: decode_blocks([data]), StoreUnavailableError)
