"""Horizontal fusion: linear layers side by side as one product, or as one launch. See README.md.

Shape letters: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backends import Backend, check_choice, check_tensor, require_triton
from kernels.horizontal_linear import cpu, reference
from kernels.packed_linear import PackedLinear

__all__ = ["LinearBatch", "MergedLinear"]

_BACKENDS = ("reference", "torch", "triton")


class MergedLinear:
    """Linear layers that share their input, as one product over their concatenated weights.

    Args:
        weights: At least one, [N_i, K] each, of one dtype and device.
        backend: ``reference``, ``torch`` or ``triton``.

    Raises:
        ValueError: shapes, dtypes or names break a rule.
        BackendUnavailableError: the backend cannot run here.
    """

    def __init__(self, weights: Sequence[Tensor], *, backend: Backend) -> None:
        _check_weights(weights, backend)
        for position, weight in enumerate(weights):
            check_tensor(f"weights[{position}]", weight, (None, weights[0].shape[1]), (weights[0].dtype,))
        self.backend = backend
        self.sizes = [len(weight) for weight in weights]
        self.weight_NK = torch.cat([weight.detach() for weight in weights])
        self._packed = PackedLinear(self.weight_NK) if backend == "torch" else None

    def __call__(self, x_MK: Tensor) -> tuple[Tensor, ...]:
        """Run all layers: [M, K] -> views [M, N_i] of one result, in the order of the weights.

        Raises:
            ValueError: shape or dtype is wrong.
        """
        check_tensor("x_MK", x_MK, (None, self.weight_NK.shape[1]), (self.weight_NK.dtype,), self.weight_NK.device)
        if self._packed is not None:
            merged = self._packed(x_MK)
        elif self.backend == "reference":
            merged = reference.linear(x_MK, self.weight_NK)
        else:
            from kernels.broadcast_gemm import triton_kernel

            merged = triton_kernel.linear(x_MK, self.weight_NK)
        return torch.split_with_sizes(merged, self.sizes, 1)


class LinearBatch:
    """Linear layers with inputs of their own and any shapes, in as few calls as the backend allows.

    Args:
        weights: At least one, [N_i, K_i] each, of one dtype and device.
        backend: ``reference``; ``torch``: layers of one shape whose inputs have equally many rows are one batched
            product; ``triton``: all in one launch.

    Raises:
        ValueError: shapes, dtypes or names break a rule.
        BackendUnavailableError: the backend cannot run here.
    """

    def __init__(self, weights: Sequence[Tensor], *, backend: Backend) -> None:
        _check_weights(weights, backend)
        self.backend = backend
        self.weights = [weight.detach().contiguous() for weight in weights]
        self._cpu = cpu.LinearBatch(self.weights) if backend == "torch" else None

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run every layer on its input: [M_i, K_i] each -> [M_i, N_i] each.

        Raises:
            ValueError: number, shapes or dtypes are wrong.
        """
        if len(inputs) != len(self.weights):
            raise ValueError(f"inputs must be {len(self.weights)}, one a weight, are {len(inputs)}")
        for position, (x, weight) in enumerate(zip(inputs, self.weights, strict=True)):
            check_tensor(f"inputs[{position}]", x, (None, weight.shape[1]), (weight.dtype,), weight.device)
        if self._cpu is not None:
            return self._cpu(inputs)
        if self.backend == "reference":
            return tuple(reference.linear(x, weight) for x, weight in zip(inputs, self.weights, strict=True))
        from kernels.horizontal_linear import triton_kernel

        return triton_kernel.linear_batch(inputs, self.weights)


def _check_weights(weights: Sequence[Tensor], backend: str) -> None:
    check_choice("backend", backend, _BACKENDS)
    if not weights:
        raise ValueError("weights must be at least one, are 0")
    for position, weight in enumerate(weights):
        check_tensor(f"weights[{position}]", weight, (None, None))
        check_tensor(f"weights[{position}]", weight, (None, None), (weights[0].dtype,), weights[0].device)
    if backend == "triton":
        require_triton(weights[0])
