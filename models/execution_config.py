"""Which kernels and which dtype run the network: the words for it, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

from pydantic import model_validator

from shared.config import Config

Backend: TypeAlias = Literal["reference", "torch", "native"]
BackendChoice: TypeAlias = Literal["auto", "reference", "torch", "native"]
Precision: TypeAlias = Literal["float32", "bfloat16"]
PrecisionChoice: TypeAlias = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Execution:
    """A choice of kernels and dtype.

    Args:
        backend: Whose kernels.
        precision: Of stored activations and packed weights; sums, norms, softmax and scores are float32.
        reason: Why these, in words, with what was measured.
        is_mixed: Whether a plan runs layers in formats of their own, which the reason counts; precision is the lowest.
    """

    backend: Backend
    precision: Precision
    reason: str
    is_mixed: bool = False

    @property
    def name(self) -> str:
        """Kernels and dtype as one word, as searches and plans name it."""
        return f"{self.backend}_{self.precision}"

    def __str__(self) -> str:
        """Return what a start-up line and a status say."""
        return f"{self.backend} {'mixed' if self.is_mixed else self.precision} ({self.reason})"


ONLY_PRECISION: dict[BackendChoice, Precision] = {"reference": "float32", "native": "bfloat16"}
"""The precision of those backends that have but one."""

REFERENCE = Execution("reference", "float32", "as configured")
"""The training modules themselves."""


class ExecutionConfig(Config):
    """What a deployment file says about kernels and dtype; ``models.execution.choose_execution`` answers it.

    Args:
        backend: ``auto``: the native library where it is built and can run the dtype, else stock torch; a name is kept
            or refused. ``native`` has bfloat16 only, ``reference`` float32 only.
        precision: Of stored activations and packed weights. ``float32`` answers as the oracle does, to rounding;
            ``bfloat16`` pays for large models; ``auto``: whichever product is faster on this machine.
    """

    backend: BackendChoice = "auto"
    precision: PrecisionChoice = "float32"

    @model_validator(mode="after")
    def _exists(self) -> Self:
        # Asked of the file, not only of a replica: that is minutes later.
        if (only := ONLY_PRECISION.get(self.backend)) and self.precision not in (only, "auto"):
            raise ValueError(f"precision of backend {self.backend} must be {only} or auto, is {self.precision}")
        return self
