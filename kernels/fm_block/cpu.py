"""Stock torch: two batched products; token-major tokens make the first one a single product over all candidates."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def fm_block(
    x_CnD: Tensor, y_nk: Tensor, part_BkD: Tensor | None, index_C: Tensor | None, gain: Tensor | None, epsilon: float
) -> Tensor:
    """Return X (X^T Y + part^T), normalised if there is a gain, [C, n, k]; see the facade."""
    num_candidates, num_tokens, width = x_CnD.shape
    num_mixtures = y_nk.shape[1]
    x_nCD = x_CnD.transpose(0, 1)
    if x_nCD.is_contiguous():
        flat = y_nk.T @ x_nCD.reshape(num_tokens, num_candidates * width)
        s_CkD = flat.view(num_mixtures, num_candidates, width).transpose(0, 1)
    else:
        s_CkD = torch.matmul(y_nk.T, x_CnD)
    if part_BkD is not None:
        s_CkD = (s_CkD + (part_BkD if index_C is None else part_BkD.index_select(0, index_C))).to(x_CnD.dtype)
    z_Cnk = torch.bmm(x_CnD, s_CkD.transpose(1, 2))
    if gain is None:
        return z_Cnk
    return functional.rms_norm(z_Cnk.flatten(1), gain.shape, gain, epsilon).view(z_Cnk.shape)
