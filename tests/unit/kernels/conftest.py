"""What kernel tests share: memory whose every unwritten byte shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def _poison(tensor: Tensor) -> Tensor:
    # All ones: NaN in float32, bfloat16, float16 and e4m3, and -1, which is no index, in signed integers.
    if tensor.numel():
        tensor.view(torch.uint8).fill_(0xFF) if tensor.is_contiguous() else tensor.fill_(float("nan"))
    return tensor


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every tensor that comes from ``torch.empty`` or ``torch.empty_like``."""
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned_empty(*args: Any, **kwargs: Any) -> Tensor:
        return _poison(empty(*args, **kwargs))

    def poisoned_empty_like(*args: Any, **kwargs: Any) -> Tensor:
        return _poison(empty_like(*args, **kwargs))

    monkeypatch.setattr(torch, "empty", poisoned_empty)
    monkeypatch.setattr(torch, "empty_like", poisoned_empty_like)
