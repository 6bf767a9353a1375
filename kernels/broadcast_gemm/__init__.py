"""Broadcast GEMM: act(W_c x_c + (W_r x_r)[u(c)]), the request's part once, never expanded. See README.md.

Shape letters: B requests, C candidates, N outputs, K candidate inputs, R request inputs, M output tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backends import (
    Activation,
    Backend,
    check_choice,
    check_index,
    check_tensor,
    native_library,
    require_triton,
)
from kernels.broadcast_gemm import cpu, reference
from kernels.packed_linear import PackedLinear

__all__ = ["BroadcastGemm", "BroadcastTokenGemm"]


class BroadcastGemm:
    """A linear layer over [request inputs; candidate inputs], split by linearity.

    ``request_part`` runs once a request and may be kept; the call runs a candidate's half and adds the part of the
    candidate's own request to the float32 accumulator, before the activation and the only rounding. A candidate's row
    has the same bits in any batch.

    Args:
        weight_NK: The candidate half of the layer's weight.
        request_weight_NR: The request half, same dtype and device.
        activation: ``none`` or ``relu``.
        backend: ``reference``, ``torch``, ``native`` (CPU, bf16) or ``triton``.

    Raises:
        ValueError: shapes, dtypes or names break a rule.
        BackendUnavailableError: the backend cannot run here.

    Source: In-kernel broadcast, https://pytorch.org/blog (IKBO): decomposition, and the sum in the GEMM's epilogue.
    """

    def __init__(
        self, weight_NK: Tensor, request_weight_NR: Tensor, *, activation: Activation = "none", backend: Backend
    ) -> None:
        check_choice("backend", backend, ("reference", "torch", "native", "triton"))
        check_choice("activation", activation, ("none", "relu"))
        check_tensor("weight_NK", weight_NK, (None, None))
        check_tensor(
            "request_weight_NR", request_weight_NR, (len(weight_NK), None), (weight_NK.dtype,), weight_NK.device
        )
        self.weight_NK, self.request_weight_NR = weight_NK.detach().contiguous(), request_weight_NR.detach()
        self.activation: Activation = activation
        self.backend = backend
        if backend == "torch":
            self._packed = PackedLinear(self.weight_NK)
        elif backend == "triton":
            require_triton(weight_NK)
        elif backend == "native":
            check_tensor("weight_NK", weight_NK, (None, None), (torch.bfloat16,))
            # The request half too: half the bytes of a float32 copy, which few rows are bound by; sums are float32.
            self._native = native_library(weight_NK).BroadcastLinear(self.weight_NK, self.request_weight_NR)
        # float32 once, at build: B rows against it are bound by reading it, and the part is not rounded in between.
        self._request_map = PackedLinear(self.request_weight_NR.float()) if backend == "torch" else None

    def request_part(self, x_BR: Tensor) -> Tensor:
        """Run the request half.

        Args:
            x_BR: Dtype of the weight.

        Returns:
            float32 [B, N].

        Raises:
            ValueError: shape or dtype is wrong.
        """
        check_tensor(
            "x_BR", x_BR, (None, self.request_weight_NR.shape[1]), (self.weight_NK.dtype,), self.weight_NK.device
        )
        if self._request_map is not None:
            return self._request_map(x_BR.float())
        if self.backend == "native":
            part: Tensor = self._native.request_part(x_BR.contiguous())
            return part
        if self.backend == "reference":
            return reference.request_part(x_BR, self.request_weight_NR)
        from kernels.broadcast_gemm import triton_kernel

        return triton_kernel.request_part(x_BR, self.request_weight_NR)

    def __call__(self, x_CK: Tensor, part_BN: Tensor, candidate_to_request_C: Tensor | None = None) -> Tensor:
        """Run the candidate half and add each candidate's request part.

        Args:
            x_CK: Dtype of the weight, last axis contiguous.
            part_BN: float32, from ``request_part``.
            candidate_to_request_C: int32 or int64 in ``[0, B)``, any order; None for one request.

        Returns:
            [C, N], dtype of the weight.

        Raises:
            ValueError: shapes or dtypes are wrong, or an index is out of range (checked on CPUs).
        """
        num_outputs, num_inputs = self.weight_NK.shape
        check_tensor("x_CK", x_CK, (None, num_inputs), (self.weight_NK.dtype,), self.weight_NK.device)
        check_tensor("part_BN", part_BN, (None, num_outputs), (torch.float32,), x_CK.device)
        check_index("candidate_to_request_C", candidate_to_request_C, len(x_CK), len(part_BN), x_CK.device)
        if self.backend == "reference":
            return reference.broadcast_gemm(x_CK, self.weight_NK, part_BN, candidate_to_request_C, self.activation)
        if self.backend == "torch":
            return cpu.broadcast_gemm(x_CK, self._packed, part_BN, candidate_to_request_C, self.activation)
        if self.backend == "native":
            index = None if candidate_to_request_C is None else candidate_to_request_C.int().contiguous()
            out: Tensor = self._native(x_CK.contiguous(), part_BN.contiguous(), index, self.activation == "relu")
            return out
        from kernels.broadcast_gemm import triton_kernel

        return triton_kernel.broadcast_gemm(x_CK, self.weight_NK, part_BN, candidate_to_request_C, self.activation)

    def both(self, x_CK: Tensor, x_BR: Tensor, candidate_to_request_C: Tensor | None = None) -> Tensor:
        """Run both halves: what ``self(x_CK, self.request_part(x_BR), ..)`` returns, to the bit.

        ``native`` runs them in one call: threads that are done with the request half begin with the candidates.

        Args:
            x_CK: Dtype of the weight, last axis contiguous.
            x_BR: Dtype of the weight.
            candidate_to_request_C: As in the call.

        Returns:
            [C, N], dtype of the weight.

        Raises:
            ValueError: as the two.
        """
        if self.backend != "native":
            return self(x_CK, self.request_part(x_BR), candidate_to_request_C)
        # The binding checks the rest: beside 1.5 ms of work, checking twice would show. But it sees int32 alone.
        index = candidate_to_request_C
        if index is not None and index.dtype != torch.int32:
            check_tensor("x_CK", x_CK, (None, None), (torch.bfloat16,))
            check_tensor("x_BR", x_BR, (None, None), (torch.bfloat16,))
            check_index("candidate_to_request_C", index, len(x_CK), len(x_BR), x_CK.device)
            index = index.int()
        index = None if index is None else index.contiguous()
        out: Tensor = self._native.both(x_CK.contiguous(), x_BR.contiguous(), index, self.activation == "relu")
        return out


class BroadcastTokenGemm:
    """The same split for a map on the token axis (linear compression): out[c] = W_c E_c + (W_r E_r)[u(c)].

    Args:
        weight_MK: Candidate tokens to output tokens.
        request_weight_MR: Request tokens to output tokens, same dtype and device.
        backend: ``reference``, ``torch`` or ``triton``.

    Raises:
        ValueError: shapes, dtypes or names break a rule.
        BackendUnavailableError: the backend cannot run here.
    """

    def __init__(self, weight_MK: Tensor, request_weight_MR: Tensor, *, backend: Backend) -> None:
        check_choice("backend", backend, ("reference", "torch", "triton"))
        check_tensor("weight_MK", weight_MK, (None, None))
        check_tensor(
            "request_weight_MR", request_weight_MR, (len(weight_MK), None), (weight_MK.dtype,), weight_MK.device
        )
        if backend == "triton":
            require_triton(weight_MK)
        self.weight_MK, self.request_weight_MR = weight_MK.detach().contiguous(), request_weight_MR.detach()
        self.backend = backend

    def request_part(self, x_BRD: Tensor) -> Tensor:
        """Run the request half: [B, R, D] -> float32 [B, M, D].

        Raises:
            ValueError: shape or dtype is wrong.
        """
        check_tensor(
            "x_BRD",
            x_BRD,
            (None, self.request_weight_MR.shape[1], None),
            (self.weight_MK.dtype,),
            self.weight_MK.device,
        )
        return reference.token_request_part(x_BRD, self.request_weight_MR)

    def __call__(self, x_CKD: Tensor, part_BMD: Tensor, candidate_to_request_C: Tensor | None = None) -> Tensor:
        """Run the candidate half and add each candidate's request part.

        Args:
            x_CKD: Candidate-major, or a transposed view of token-major memory; the result of ``torch`` and
                ``triton`` has the same layout.
            part_BMD: float32, from ``request_part``.
            candidate_to_request_C: int32 or int64 in ``[0, B)``, any order; None for one request.

        Returns:
            [C, M, D], dtype of the weight.

        Raises:
            ValueError: shapes or dtypes are wrong, or an index is out of range (checked on CPUs).
        """
        num_outputs, num_inputs = self.weight_MK.shape
        check_tensor("x_CKD", x_CKD, (None, num_inputs, None), (self.weight_MK.dtype,), self.weight_MK.device)
        check_tensor("part_BMD", part_BMD, (None, num_outputs, x_CKD.shape[2]), (torch.float32,), x_CKD.device)
        check_index("candidate_to_request_C", candidate_to_request_C, len(x_CKD), len(part_BMD), x_CKD.device)
        if self.backend == "reference":
            return reference.broadcast_token_gemm(x_CKD, self.weight_MK, part_BMD, candidate_to_request_C)
        if self.backend == "torch":
            return cpu.broadcast_token_gemm(x_CKD, self.weight_MK, part_BMD, candidate_to_request_C)
        from kernels.broadcast_gemm import triton_kernel

        return triton_kernel.broadcast_token_gemm(x_CKD, self.weight_MK, part_BMD, candidate_to_request_C)
