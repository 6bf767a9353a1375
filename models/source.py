"""Where a part of the ranker reads its weights from: any weight reader, or memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shared.errors import WeightsError

Tensors = dict[str, npt.NDArray[Any]]


class WeightSource(Protocol):
    """One weights version; ``shared.weights.WeightReader`` is one."""

    @property
    def version(self) -> str:
        """Name of the version."""
        ...

    def json(self, name: str) -> dict[str, Any]:
        """Return the JSON document ``name``."""
        ...

    def tensors(self, group: str) -> Tensors:
        """Return all tensors of a group."""
        ...


@dataclass(frozen=True)
class MemorySource:
    """Weights that are not in a store: what publishing checks before it writes, and what tests use.

    Args:
        version: Name of the version.
        groups: group -> name -> array.
        documents: name -> JSON document.
    """

    version: str
    groups: dict[str, Tensors] = field(default_factory=dict)
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)

    def json(self, name: str) -> dict[str, Any]:
        """Return the JSON document ``name``.

        Raises:
            WeightsError: there is none of that name.
        """
        if name not in self.documents:
            raise WeightsError(f"weights {self.version} have no document {name}", version=self.version, file=name)
        return self.documents[name]

    def tensors(self, group: str) -> Tensors:
        """Return all tensors of a group.

        Raises:
            WeightsError: there is no such group.
        """
        if group not in self.groups:
            raise WeightsError(f"weights {self.version} have no group {group}", version=self.version, file=group)
        return self.groups[group]


def tensor(source: WeightSource, group: str, name: str, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """Return one tensor of a group.

    Args:
        source: The weights.
        group: Group name.
        name: Tensor name.
        dtype: What it must be, None: anything.

    Raises:
        WeightsError: the tensor is missing or has another dtype.
    """
    tensors = source.tensors(group)
    if name not in tensors:
        raise WeightsError(
            f"group {group} of weights {source.version} has no tensor {name}", version=source.version, file=group
        )
    found = tensors[name]
    if dtype is not None and found.dtype != np.dtype(dtype):
        raise WeightsError(
            f"tensor {group}/{name} must be {np.dtype(dtype)}, is {found.dtype}", version=source.version, file=group
        )
    return found
