"""AotCase: one kernel with the types and constants that it is compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class AotCase:
    """One kernel, one configuration.

    Args:
        name: Unique; the key in the golden file.
        kernel: The ``@jit`` function.
        arguments: Run-time arguments in order: triton's type names, such as ``*bf16`` and ``i32``.
        constants: Compile-time arguments.
        aligned: Arguments known to be divisible by 16, as the launcher finds at run time; else loads are scalar.
        num_warps: Launch option.
        num_stages: Launch option.
        tensor_cores: Instructions that must occur: ``hgmma`` (bf16 warp group), ``qgmma`` (FP8), ``hmma`` (one warp),
            or None.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    tensor_cores: Literal["hgmma", "qgmma", "hmma"] | None = None
