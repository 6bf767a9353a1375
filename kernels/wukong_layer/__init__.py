"""The candidate side of a stack of Wukong interaction layers, for candidates of one or several requests. See README.md.

``pack`` once a model, ``give`` once a request (or batch of requests), ``rank`` once a batch of candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from kernels.native.checks import check_requests
from kernels.wukong_layer.cpu import TorchLayers
from kernels.wukong_layer.reference import ReferenceLayers
from kernels.wukong_layer.weights import LayerGiven, LayerWeights, check_weights, copy_of

__all__ = ["Backend", "LayerGiven", "LayerWeights", "PackedGiven", "PackedLayers", "give", "pack", "rank"]

Backend: TypeAlias = Literal["reference", "torch", "native"]

_DTYPES = {
    "reference": (torch.float32, torch.bfloat16),
    "torch": (torch.float32, torch.bfloat16),
    "native": (torch.bfloat16,),
}


class _Layers(Protocol):
    # What `give` makes is a type of its own in each backend, and only that backend's `run` ever gets it.
    def give(self, given: Sequence[LayerGiven], mask: Tensor | None) -> Any: ...

    def run(self, tokens: Tensor, given: Any, request: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PackedLayers:
    """A stack of layers, packed for one backend; opaque, made by ``pack``.

    Args:
        backend: Which one computes.
        dtype: Of the stored activations and of the answer.
        num_tokens: Tokens that enter: n.
        num_out: Tokens that leave.
        width: D.
    """

    backend: Backend
    dtype: torch.dtype
    num_tokens: int
    num_out: int
    width: int
    _weights: tuple[LayerWeights, ...] = field(repr=False)
    _layers: _Layers = field(repr=False)


@dataclass(frozen=True, slots=True)
class PackedGiven:
    """What B requests give to every layer of one packed stack; opaque, made by ``give``."""

    num_requests: int
    _of: PackedLayers = field(repr=False)
    _given: Any = field(repr=False)


def pack(weights: Sequence[LayerWeights], *, backend: Backend, dtype: torch.dtype = torch.bfloat16) -> PackedLayers:
    """Pack a stack of layers. Later changes of the weights do not reach it: pack again.

    Args:
        weights: One a layer, the first first.
        backend: ``reference``: plain PyTorch; ``torch``: oneDNN-packed operators; ``native``: fused C++.
        dtype: Of the stored activations; sums are fp32. ``native`` has bf16 only.

    Raises:
        ValueError: the weights do not fit together, or the backend does not exist or has no such dtype.
        kernels.native.NativeUnavailableError: ``native`` was asked for and cannot be used here.
    """
    check_weights(weights)
    if backend not in _DTYPES:
        raise ValueError(f"backend must be one of {sorted(_DTYPES)}, is {backend!r}")
    if dtype not in _DTYPES[backend]:
        raise ValueError(f"dtype of backend {backend} must be one of {_DTYPES[backend]}, is {dtype}")
    layers: _Layers
    if backend == "native":
        # Imported here, so that the other backends do not depend on the binding.
        from kernels.wukong_layer.native import NativeLayers

        layers = NativeLayers(weights)
    else:
        layers = (TorchLayers if backend == "torch" else ReferenceLayers)([copy_of(layer) for layer in weights], dtype)
    first, last = weights[0], weights[-1]
    return PackedLayers(backend, dtype, first.num_tokens, last.num_out, first.width, tuple(weights), layers)


def give(layers: PackedLayers, given: Sequence[LayerGiven], *, mask: Tensor | None = None) -> PackedGiven:
    """Pack what B requests give, once for all their candidates.

    Args:
        layers: The stack.
        given: One a layer.
        mask: bool [B, T], true where a key may be seen; None: all of them. A request without any is answered by 0.

    Raises:
        ValueError: a shape does not fit the stack.
    """
    if len(given) != len(layers._weights):
        raise ValueError(f"given must have one entry for each of {len(layers._weights)} layers, has {len(given)}")
    num_requests = len(given[0].hidden)
    for index, (own, weights) in enumerate(zip(given, layers._weights, strict=True)):
        if len(own.hidden) != num_requests:
            raise ValueError(f"given[{index}] must be of {num_requests} requests, is of {len(own.hidden)}")
        own.check(f"given[{index}]", weights)
        if mask is not None and weights.num_queries and (mask.shape != own.keys.shape[:2] or mask.dtype != torch.bool):
            shape = list(own.keys.shape[:2])
            raise ValueError(f"mask must be torch.bool {shape}, is {mask.dtype} {list(mask.shape)}")
    return PackedGiven(num_requests, layers, layers._layers.give(given, mask))


def rank(
    layers: PackedLayers, tokens: Tensor, given: PackedGiven, candidate_to_request: Tensor | None = None
) -> Tensor:
    """Run the candidates through all layers.

    A candidate's result depends on its own tokens and its request alone: with ``native`` it is equal to the bit for any
    batch, any split of it, any mix of requests and any number of threads.

    Args:
        layers: The stack.
        tokens: [C, n, D], any floating dtype, candidate-major; C may be 0.
        given: What ``give`` made for this stack.
        candidate_to_request: int32 [C] in [0, B), any order; None: there is one request.

    Returns:
        [C, tokens that leave, D] of the stack's dtype.

    Raises:
        ValueError: a shape, a dtype or an index breaks a rule, or ``given`` belongs to another stack.
    """
    if given._of is not layers:
        raise ValueError("given must have been made for these layers")
    if tokens.dim() != 3 or tokens.shape[1:] != (layers.num_tokens, layers.width):
        raise ValueError(f"tokens must be [C, {layers.num_tokens}, {layers.width}], are {list(tokens.shape)}")
    if not tokens.is_floating_point() or tokens.device.type != "cpu":
        raise ValueError(f"tokens must be floating-point on the CPU, are {tokens.dtype} on {tokens.device}")
    request = check_requests(candidate_to_request, len(tokens), given.num_requests).long()
    with torch.no_grad():
        return layers._layers.run(tokens, given._given, request)
