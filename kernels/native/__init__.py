"""Native CPU kernels in C++ for processors with AVX512-BF16 and VNNI, loaded only where they can run. See README.md.

``status()`` says whether they can be used and why not; every other function raises ``NativeUnavailableError`` when they
cannot. Nothing is built or loaded at import.
"""

from __future__ import annotations

from kernels.native.attention import PackedKeys, block_attention, broadcast_attention, pack_keys
from kernels.native.library import NativeStatus, NativeUnavailableError, status

__all__ = [
    "NativeStatus",
    "NativeUnavailableError",
    "PackedKeys",
    "block_attention",
    "broadcast_attention",
    "pack_keys",
    "status",
]
