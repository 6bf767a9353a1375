"""The plain truth: float32 products, the request's part gathered to the candidates, one rounding at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backends import Activation


def request_part(x_BR: Tensor, weight_NR: Tensor) -> Tensor:
    """Return the request half, float32 [B, N]."""
    return x_BR.float() @ weight_NR.float().T


def broadcast_gemm(
    x_CK: Tensor, weight_NK: Tensor, part_BN: Tensor, index_C: Tensor | None, activation: Activation
) -> Tensor:
    """Return act(x W^T + part[u(c)]), [C, N]; see ``BroadcastGemm``."""
    out_CN = x_CK.float() @ weight_NK.float().T + gathered(part_BN, index_C)
    return (torch.relu(out_CN) if activation == "relu" else out_CN).to(x_CK.dtype)


def token_request_part(x_BRD: Tensor, weight_MR: Tensor) -> Tensor:
    """Return the request half of the token-axis form, float32 [B, M, D]."""
    return torch.matmul(weight_MR.float(), x_BRD.float())


def broadcast_token_gemm(x_CKD: Tensor, weight_MK: Tensor, part_BMD: Tensor, index_C: Tensor | None) -> Tensor:
    """Return W x_c + part[u(c)], [C, M, D]; see ``BroadcastTokenGemm``."""
    return (torch.matmul(weight_MK.float(), x_CKD.float()) + gathered(part_BMD, index_C)).to(x_CKD.dtype)


def gathered(part: Tensor, index_C: Tensor | None) -> Tensor:
    """Give each candidate its request's row; one request's row as it is, to be broadcast."""
    return part if index_C is None else part.index_select(0, index_C)
