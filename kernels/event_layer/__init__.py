"""All layers of the history encoder for a few new events of one user, in one call. See README.md.

``pack`` once a model, ``append`` once a request. Shape letters: n new events, w events of the window before them,
D width, H heads, K head width, m hidden units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from kernels.event_layer.reference import ReferenceLayers
from kernels.event_layer.weights import LayerGiven, LayerMade, LayerWeights, SelfAttention, check_weights

__all__ = ["Backend", "LayerGiven", "LayerMade", "LayerWeights", "PackedLayers", "SelfAttention", "append", "pack"]

Backend: TypeAlias = Literal["reference", "native"]

_DTYPES = {"reference": (torch.float32, torch.bfloat16), "native": (torch.bfloat16,)}


class _Layers(Protocol):
    def run(self, tokens: Tensor, clock: Tensor, num_before: int, given: Sequence[LayerGiven]) -> list[LayerMade]: ...


@dataclass(frozen=True, slots=True)
class PackedLayers:
    """A stack of layers, packed for one backend; opaque, made by ``pack``.

    Args:
        backend: Which one computes.
        dtype: Of tokens, of what is given and of what is made.
        width: D.
        attention: Of the layers that have self-attention; None: none has.
    """

    backend: Backend
    dtype: torch.dtype
    width: int
    attention: SelfAttention | None
    _weights: tuple[LayerWeights, ...] = field(repr=False)
    _layers: _Layers = field(repr=False)


def pack(
    weights: Sequence[LayerWeights],
    attention: SelfAttention | None = None,
    *,
    backend: Backend,
    dtype: torch.dtype = torch.bfloat16,
) -> PackedLayers:
    """Pack a stack of layers. Later changes of the weights do not reach it: pack again.

    Args:
        weights: One a layer, the first first.
        attention: Heads, blocks and turns; None where no layer has self-attention.
        backend: ``reference``: plain PyTorch; ``native``: C++, on the calling thread.
        dtype: Of stored values; sums are fp32. ``native`` has bf16 only.

    Raises:
        ValueError: the weights do not fit together, or the backend does not exist or has no such dtype.
        kernels.native.NativeUnavailableError: ``native`` was asked for and cannot be used here.
    """
    check_weights(weights, attention)
    if backend not in _DTYPES:
        raise ValueError(f"backend must be one of {sorted(_DTYPES)}, is {backend!r}")
    if dtype not in _DTYPES[backend]:
        raise ValueError(f"dtype of backend {backend} must be one of {_DTYPES[backend]}, is {dtype}")
    layers: _Layers
    if backend == "native":
        # Imported here, so that the reference does not depend on the binding.
        from kernels.event_layer.native import NativeLayers

        layers = NativeLayers(weights, attention)
    else:
        layers = ReferenceLayers(weights, attention, dtype)
    return PackedLayers(backend, dtype, weights[0].width, attention, tuple(weights), layers)


def append(
    layers: PackedLayers, tokens: Tensor, clock: Tensor, num_before: int, given: Sequence[LayerGiven]
) -> list[LayerMade]:
    """Run new events through all layers.

    What is made of an event depends on it and on what it sees alone: with ``native`` it is equal to the bit however
    events are cut into calls.

    Args:
        layers: The stack.
        tokens: [n, D] of the stack's dtype, embedded events, the oldest first; n at least 1.
        clock: float64 [n], log time between events, summed.
        num_before: Events before the new ones, at least 0.
        given: One a layer, contiguous, of the stack's dtype.

    Returns:
        One a layer.

    Raises:
        ValueError: a shape or dtype breaks a rule.
    """
    num_events = len(tokens)
    if tokens.dim() != 2 or tokens.shape[1] != layers.width or tokens.dtype != layers.dtype or not num_events:
        wanted = f"{layers.dtype} [n, {layers.width}], n at least 1"
        raise ValueError(f"tokens must be {wanted}, are {tokens.dtype} {list(tokens.shape)}")
    if tokens.device.type != "cpu":
        raise ValueError(f"tokens must be on the CPU, are on {tokens.device}")
    if clock.shape != (num_events,) or clock.dtype != torch.float64 or clock.device.type != "cpu":
        found = f"{clock.dtype} {list(clock.shape)} on {clock.device}"
        raise ValueError(f"clock must be torch.float64 [{num_events}] on the CPU, is {found}")
    if num_before < 0:
        raise ValueError(f"num_before must be at least 0, is {num_before}")
    if len(given) != len(layers._weights):
        raise ValueError(f"given must have one entry for each of {len(layers._weights)} layers, has {len(given)}")
    window = 0 if layers.attention is None else layers.attention.window_of(num_before)
    for index, (own, weights) in enumerate(zip(given, layers._weights, strict=True)):
        own.check(index, weights, layers.attention, layers.dtype, window)
    with torch.no_grad():
        return layers._layers.run(tokens, clock, num_before, given)
