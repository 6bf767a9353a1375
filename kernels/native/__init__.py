"""Native CPU kernels in C++ for processors with AVX512-BF16 and VNNI, loaded only where they can run. See README.md.

``status()`` says whether they can be used and why not; every other function raises ``NativeUnavailableError`` when they
cannot. Nothing is built or loaded at import.
"""

from __future__ import annotations

from kernels.native.attention import PackedKeys, block_attention, broadcast_attention, pack_keys
from kernels.native.library import NativeStatus, NativeUnavailableError, load, status
from kernels.native.linear import BroadcastLinear, Int8Linear, quantize_rows
from kernels.native.topk import segmented_topk

__all__ = [
    "BroadcastLinear",
    "Int8Linear",
    "NativeStatus",
    "NativeUnavailableError",
    "PackedKeys",
    "block_attention",
    "broadcast_attention",
    "load",
    "pack_keys",
    "quantize_rows",
    "segmented_topk",
    "status",
]
