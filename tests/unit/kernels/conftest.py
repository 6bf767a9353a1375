"""What kernel tests share: kernels made before a test changes the environment; memory whose unwritten bytes show."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

KERNELS = Path(__file__).resolve().parents[3] / "kernels"


@pytest.fixture(scope="session", autouse=True)
def made_kernels() -> None:
    """Import every Triton kernel: each is made then, interpreted or not as the environment of the session asks."""
    if importlib.util.find_spec("triton") is not None:
        for path in sorted(KERNELS.glob("*/triton_kernel.py")):
            importlib.import_module(f"kernels.{path.parent.name}.triton_kernel")


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
