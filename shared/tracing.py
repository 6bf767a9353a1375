"""How many bytes a message carries: what proves that tensors stay out of a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel


def payload_bytes(message: Any) -> int:
    """Return the bytes of all numpy arrays and byte strings in a message, however deep.

    Used to show that no large tensor passes through the ingress: what it awaits has at most 64 KiB by this count. An
    array that several fields share is counted each time, as pickling a view of it would copy it.
    """
    if isinstance(message, np.ndarray | np.generic | memoryview):
        return message.nbytes
    if isinstance(message, bytes | bytearray):
        return len(message)
    if isinstance(message, Mapping):
        return sum(payload_bytes(value) for value in message.values())
    if isinstance(message, list | tuple | set | frozenset):
        return sum(payload_bytes(value) for value in message)
    if isinstance(message, BaseModel):
        return sum(payload_bytes(value) for _, value in message)
    if is_dataclass(message) and not isinstance(message, type):
        return sum(payload_bytes(getattr(message, field.name)) for field in fields(message))
    return 0
