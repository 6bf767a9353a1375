"""Stock torch on a CPU: all rows of one request are the rows of two products a head."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gdpa.reference import activate
from kernels.request_keys import attend_by_request


def gdpa(
    q_CQHK: Tensor, k_MHK: Tensor, v_MHK: Tensor, ends: Tensor, index_C: Tensor | None, activation: str, tau: float
) -> Tensor:
    """Return the attended values, [C, Q, H, K]; see the facade."""

    def attend(q_HRK: Tensor, k_HKM: Tensor, v_HMK: Tensor) -> Tensor:
        scores = torch.baddbmm(q_HRK.new_zeros(1), q_HRK, k_HKM, beta=0, alpha=1.0 / tau)
        return torch.bmm(activate(scores, activation), v_HMK)

    return attend_by_request(q_CQHK, k_MHK, v_MHK, ends, index_C, attend)
