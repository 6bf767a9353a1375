"""Which kernels and which dtype run the network: the words for it, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

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
    """

    backend: Backend
    precision: Precision
    reason: str

    @property
    def name(self) -> str:
        """Kernels and dtype as one word, as searches and plans name it."""
        return f"{self.backend}_{self.precision}"

    def __str__(self) -> str:
        """Return what a start-up line and a status say."""
        return f"{self.backend} {self.precision} ({self.reason})"


REFERENCE = Execution("reference", "float32", "as configured")
"""The training modules themselves."""


class ExecutionConfig(Config):
    """What a deployment file says about kernels and dtype; ``models.execution.choose_execution`` answers it.

    Args:
        backend: ``auto``: the native library where it is built and can run the dtype, else stock torch; a name is kept
            or refused.
        precision: Of stored activations and packed weights. ``float32`` answers as the oracle does, to rounding;
            ``bfloat16`` pays for large models; ``auto``: whichever product is faster on this machine.
    """

    backend: BackendChoice = "auto"
    precision: PrecisionChoice = "float32"
