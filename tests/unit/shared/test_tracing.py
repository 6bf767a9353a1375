"""Message sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from pydantic import BaseModel

from shared.schema.embeddings import EmbeddingRows
from shared.schema.stamp import Stamp
from shared.schema.user import UserState
from shared.tracing import payload_bytes

STAMP = Stamp("r", "v", "x", "x#1", 0.0)


class Body(BaseModel):
    data: bytes
    parts: list[bytes]


@dataclass
class Holder:
    inner: object


@pytest.mark.parametrize(
    ("message", "num_bytes"),
    [
        (np.zeros((10, 4), np.float32), 160),
        (np.zeros((10, 4), np.float32)[:, :2], 80),
        (np.float64(1), 8),
        (b"abc", 3),
        (bytearray(5), 5),
        (memoryview(bytes(32)), 32),
        ({"a": np.zeros(3, np.int8), "b": {"c": b"xy"}}, 5),
        ([np.zeros(2, np.int64), (np.zeros(1, np.int64), None)], 24),
        (EmbeddingRows(STAMP, 0, {"item": np.zeros((5, 8), np.float32), "year": np.zeros((1, 8), np.float32)}), 192),
        (UserState(STAMP, {"k": np.zeros((2, 3), np.float32)}, 1, 2, 3), 24),
        (Body(data=b"abc", parts=[b"d", b"e"]), 5),
        (Holder(Holder([Body(data=b"abc", parts=[])])), 3),
        (STAMP, 0),
        ("a long text", 0),
        (None, 0),
        (Holder, 0),
    ],
)
def test_payload_bytes(message: object, num_bytes: int) -> None:
    assert payload_bytes(message) == num_bytes
