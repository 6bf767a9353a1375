"""The fused C++ form: weights and what the requests give are packed once, then one call runs the whole stack."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.native import PackedKeys, pack_keys
from kernels.native.attention import PackedKeysStruct
from kernels.native.checks import sort_by_request
from kernels.native.library import check_done, load, num_threads, pointer
from kernels.native.packing import PackedMatrix, PackedMatrixStruct, pack_matrix, pair_rows
from kernels.wukong_layer.weights import LayerGiven, LayerWeights, split_last

CHUNK_BYTES = 900 * 1024
"""Activations of one chunk: what a core's second-level cache of 1 MB holds. Measured for 32 tokens of width 64 (10.5 kB
a candidate): 36, 48, 60 and 84 candidates reach 80, 82, 83 and 85 % of the GEMM rate."""
CHUNK_MIN, CHUNK_MAX = 12, 96
"""Candidates of one chunk, at least and at most: two to sixteen tiles of six rows."""


class _LayerStruct(ctypes.Structure):
    _fields_ = [
        ("num_tokens", ctypes.c_int32),
        ("num_queries", ctypes.c_int32),
        ("num_mixtures", ctypes.c_int32),
        ("num_mlp_tokens", ctypes.c_int32),
        ("num_linear_tokens", ctypes.c_int32),
        ("num_residual_tokens", ctypes.c_int32),
        ("product_epsilon", ctypes.c_float),
        ("query_tokens", ctypes.c_void_p),
        ("query", PackedMatrixStruct),
        ("attention_out", PackedMatrixStruct),
        ("mixtures", ctypes.c_void_p),
        ("product_gain", ctypes.c_void_p),
        ("up", PackedMatrixStruct),
        ("down", PackedMatrixStruct),
        ("linear", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("gain", ctypes.c_void_p),
    ]


class _GivenStruct(ctypes.Structure):
    _fields_ = [
        ("queries", ctypes.c_void_p),
        ("mixtures", ctypes.c_void_p),
        ("linear", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("keys", PackedKeysStruct),
    ]


class _StackStruct(ctypes.Structure):
    _fields_ = [
        ("tokens", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("requests", ctypes.c_void_p),
        ("layers", ctypes.POINTER(_LayerStruct)),
        ("given", ctypes.POINTER(_GivenStruct)),
        ("num_candidates", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("num_layers", ctypes.c_int32),
        ("width", ctypes.c_int32),
    ]


@dataclass(frozen=True, slots=True)
class _PackedLayer:
    """One layer's packed weights; ``tensors`` keeps the memory alive that ``struct`` points to."""

    struct: _LayerStruct
    tensors: tuple[Tensor | PackedMatrix | None, ...]


@dataclass(frozen=True, slots=True)
class NativeGiven:
    """What the requests give to every layer, packed.

    Args:
        structs: One a layer.
        num_requests: B.
    """

    structs: ctypes.Array[_GivenStruct] = field(repr=False)
    num_requests: int
    _alive: tuple[Tensor | PackedKeys, ...] = field(repr=False)


class NativeLayers:
    """The fused stack: bf16 storage, fp32 sums, norms and softmax.

    Args:
        weights: One a layer, checked.

    Raises:
        NativeUnavailableError: there is no native library.
    """

    def __init__(self, weights: Sequence[LayerWeights]) -> None:
        self._library = load()
        self.width = weights[0].width
        self.num_out = weights[-1].num_out
        self._sizes = tuple((layer.num_queries, layer.num_heads) for layer in weights)
        self._chunk_most = _chunk_most(weights)
        self._layers = tuple(_pack_layer(layer) for layer in weights)
        self._structs = (_LayerStruct * len(weights))(*(layer.struct for layer in self._layers))

    def give(self, given: Sequence[LayerGiven], mask: Tensor | None) -> NativeGiven:
        """Pack what the requests give, once for all their candidates."""
        mask = None if mask is None else mask.contiguous()
        structs: list[_GivenStruct] = []
        alive: list[Tensor | PackedKeys] = []
        for layer, (num_queries, num_heads) in zip(given, self._sizes, strict=True):
            queries = _pad_heads(layer.queries.float(), num_heads) if num_queries else layer.queries.float()
            mixtures = _pad(layer.mixtures.float().transpose(1, 2), 16, 16)
            linear, hidden = _pad(layer.linear.float(), 1, 16), _pad(layer.hidden.float(), 1, 16)
            struct = _GivenStruct(pointer(queries), pointer(mixtures), pointer(linear), pointer(hidden))
            alive += [queries, mixtures, linear, hidden]
            if num_queries:
                both = (x.detach().to(torch.bfloat16) for x in (layer.keys, layer.values))
                keys, values = (split_last(x, num_heads).contiguous() for x in both)
                packed = pack_keys(keys, values, mask=mask)
                struct.keys = packed.struct
                alive.append(packed)
            structs.append(struct)
        return NativeGiven((_GivenStruct * len(structs))(*structs), len(given[0].hidden), tuple(alive))

    def run(self, tokens: Tensor, given: NativeGiven, request: Tensor) -> Tensor:
        """Run all layers: bf16 [C, n, D], request int64 [C] -> bf16 [C, tokens that leave, D]."""
        num_candidates = len(tokens)
        tokens = tokens.detach().to(torch.bfloat16).contiguous()
        out = torch.empty(num_candidates, self.num_out, self.width, dtype=torch.bfloat16)
        if num_candidates == 0:
            return out
        order, _ = sort_by_request(request, given.num_requests)
        requests = request.to(torch.int32)
        stack = _StackStruct(
            pointer(tokens),
            pointer(out),
            pointer(order),
            pointer(requests),
            self._structs,
            given.structs,
            num_candidates,
            chunk_size(num_candidates, num_threads(), self._chunk_most),
            len(self._layers),
            self.width,
        )
        code = self._library.rankmesh_wukong_layers(ctypes.byref(stack), ctypes.c_int(num_threads()))
        check_done(code, "wukong_layers")
        return out


def chunk_size(num_candidates: int, threads: int, most: int) -> int:
    """Return how many candidates a chunk takes: full tiles of six, and the same work for every thread.

    Args:
        num_candidates: C, at least 1.
        threads: Threads that work.
        most: Most that a chunk may have, a multiple of 6.
    """
    of_a_thread = -(-num_candidates // threads)
    rounds = -(-of_a_thread // most)
    tiles = -(-of_a_thread // (rounds * 6))
    return min(tiles * 6, most)


def _chunk_most(weights: Sequence[LayerWeights]) -> int:
    def activation_bytes(layer: LayerWeights) -> int:
        tokens = max(layer.num_seen, layer.num_out) * layer.width
        stored = tokens + layer.num_seen * layer.num_mixtures + layer.hidden
        return 2 * stored + 4 * layer.num_mlp_tokens * layer.width

    candidates = CHUNK_BYTES // max(activation_bytes(layer) for layer in weights)
    return min(max(candidates // 6 * 6, CHUNK_MIN), CHUNK_MAX)


def _pack_layer(weights: LayerWeights) -> _PackedLayer:
    width, heads = weights.width, weights.num_heads
    query, attention_out, query_tokens = None, None, None
    if weights.num_queries:
        query_tokens = _even(weights.query_tokens)
        query = pack_matrix(_pad_heads(weights.query.float().T, heads).T)
        attention_out = pack_matrix(_pad_heads(weights.attention_out.float(), heads))
    down = weights.down.float().reshape(weights.num_mlp_tokens, width, weights.hidden)
    down = _pad(down.transpose(1, 2), 1, 16)
    packed_down = pack_matrix(down.transpose(1, 2).flatten(0, 1))
    up = pack_matrix(weights.up)
    mixtures = pair_rows(_pad(weights.mixtures.float().T, 2, 16))
    product_gain = _pad(weights.norm_products.float()[None], 1, 32)
    linear = _even(weights.linear)
    residual = None if weights.residual is None else _even(weights.residual)
    gain = _pad(weights.norm.float()[None], 1, 16)
    struct = _LayerStruct(
        weights.num_tokens,
        weights.num_queries,
        weights.num_mixtures,
        weights.num_mlp_tokens,
        weights.num_linear_tokens,
        weights.num_residual_tokens,
        weights.product_epsilon,
        pointer(query_tokens),
        PackedMatrixStruct() if query is None else query.struct,
        PackedMatrixStruct() if attention_out is None else attention_out.struct,
        pointer(mixtures),
        pointer(product_gain),
        up.struct,
        packed_down.struct,
        pointer(linear),
        pointer(residual),
        pointer(gain),
    )
    kept = (query_tokens, query, attention_out, mixtures, product_gain, up, packed_down, linear, residual, gain)
    return _PackedLayer(struct, kept)


def _even(weights: Tensor) -> Tensor:
    """Pad the last axis with zero to an even length, in bf16."""
    return _pad(weights.detach().to(torch.bfloat16), 1, 2)


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    """Pad the last two axes with zero to multiples of ``rows`` and ``columns``."""
    add = (-x.shape[-2] % rows, -x.shape[-1] % columns)
    return torch.nn.functional.pad(x.detach(), (0, add[1], 0, add[0])).contiguous()


def _pad_heads(x: Tensor, num_heads: int) -> Tensor:
    """Pad each head's channels of the last axis with zero to a multiple of 16."""
    split = split_last(x.detach(), num_heads)
    return torch.nn.functional.pad(split, (0, -split.shape[-1] % 16)).flatten(-2).contiguous()
