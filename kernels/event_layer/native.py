"""The C++ form: weights are packed once, then one call runs all layers on the calling thread."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.event_layer.weights import LayerGiven, LayerMade, LayerWeights, SelfAttention
from kernels.native.library import check_done, load, pointer
from kernels.native.packing import LANES, PackedMatrix, PackedMatrixStruct, pack_matrix


class _LayerStruct(ctypes.Structure):
    _fields_ = [
        ("feed_forward_gain", ctypes.c_void_p),
        ("attention_gain", ctypes.c_void_p),
        ("gain", ctypes.c_void_p),
        ("query_key_value", PackedMatrixStruct),
        ("attention_out", PackedMatrixStruct),
        ("key_value", PackedMatrixStruct),
    ]


class _GivenStruct(ctypes.Structure):
    _fields_ = [
        ("hidden_keys", ctypes.c_void_p),
        ("hidden_values", ctypes.c_void_p),
        ("keys_before", ctypes.c_void_p),
        ("values_before", ctypes.c_void_p),
        ("window_keys", ctypes.c_void_p),
        ("window_values", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("hidden", ctypes.c_int64),
    ]


class _StackStruct(ctypes.Structure):
    _fields_ = [
        ("tokens", ctypes.c_void_p),
        ("clock", ctypes.c_void_p),
        ("by_position", ctypes.c_void_p),
        ("by_time", ctypes.c_void_p),
        ("layers", ctypes.POINTER(_LayerStruct)),
        ("given", ctypes.POINTER(_GivenStruct)),
        ("num_events", ctypes.c_int64),
        ("first_position", ctypes.c_int64),
        ("num_before", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("window_blocks", ctypes.c_int64),
        ("num_layers", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_position", ctypes.c_int32),
        ("num_time", ctypes.c_int32),
    ]


class NativeLayers:
    """bf16 storage, fp32 sums, norms and softmax.

    Args:
        weights: One a layer, checked.
        attention: Of the layers with self-attention.

    Raises:
        NativeUnavailableError: there is no native library.
    """

    def __init__(self, weights: Sequence[LayerWeights], attention: SelfAttention | None) -> None:
        self._library = load()
        self._width = weights[0].width
        self._num_heads = 1 if attention is None else attention.num_heads
        self._window_of = None if attention is None else attention.window_of
        self._sizes = (1, 1) if attention is None else (attention.block, attention.window_blocks)
        both = () if attention is None else (attention.by_position, attention.by_time)
        self._frequencies = tuple(x.detach().clone().contiguous() for x in both)
        packed = [_pack_layer(layer) for layer in weights]
        self._structs = (_LayerStruct * len(packed))(*(struct for struct, _ in packed))
        self._alive = tuple(kept for _, kept in packed)  # what the structs point to

    def run(self, tokens: Tensor, clock: Tensor, num_before: int, given: Sequence[LayerGiven]) -> list[LayerMade]:
        """Run all layers: see ``kernels.event_layer.append``."""
        num_events, width = len(tokens), self._width
        tokens, clock = tokens.detach().contiguous(), clock.contiguous()
        seen = num_events + (0 if self._window_of is None else self._window_of(num_before))
        out = torch.empty(len(given), 2, num_events, width, dtype=torch.bfloat16)
        structs = (_GivenStruct * len(given))()
        made = []
        for struct, own, rows in zip(structs, given, out.unbind(), strict=True):
            keys, values = rows.unbind()
            struct.keys, struct.values = keys.data_ptr(), values.data_ptr()
            if own.hidden is not None:
                struct.hidden = len(own.hidden[0])
                struct.hidden_keys, struct.hidden_values = own.hidden[0].data_ptr(), own.hidden[1].data_ptr()
            window = None
            if own.window is not None:
                shape = (seen, self._num_heads, width // self._num_heads)
                window = (torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape, dtype=torch.bfloat16))
                struct.keys_before, struct.values_before = own.window[0].data_ptr(), own.window[1].data_ptr()
                struct.window_keys, struct.window_values = window[0].data_ptr(), window[1].data_ptr()
            made.append(LayerMade(keys, values, window))
        stack = _StackStruct(
            tokens.data_ptr(),
            clock.data_ptr(),
            *([x.data_ptr() for x in self._frequencies] or (None, None)),
            self._structs,
            structs,
            num_events,
            num_before,
            seen - num_events,
            *self._sizes,
            len(given),
            width,
            self._num_heads,
            *([len(x) for x in self._frequencies] or (0, 0)),
        )
        check_done(self._library.rankmesh_event_layers(ctypes.byref(stack)), "event_layers")
        return made


def _pack_layer(weights: LayerWeights) -> tuple[_LayerStruct, tuple[Tensor | PackedMatrix | None, ...]]:
    """Return what C reads, and what keeps its memory alive."""
    gains = [_gain(x) for x in (weights.norm_feed_forward, weights.norm_attention, weights.norm)]
    matrices = [
        None if x is None else pack_matrix(x)
        for x in (weights.query_key_value, weights.attention_out, weights.key_value)
    ]
    empty = PackedMatrixStruct()
    struct = _LayerStruct(*map(pointer, gains), *(empty if each is None else each.struct for each in matrices))
    return struct, (*gains, *matrices)


def _gain(x: Tensor | None) -> Tensor | None:
    """Pad with zero to whole vectors, in memory of its own."""
    return None if x is None else torch.nn.functional.pad(x.detach().float(), (0, -len(x) % LANES)).clone()
