"""Stock torch: one batched product where groups are equal, torch's grouped product where they are not.

100 products of [500, 64] by [64, 64] in bf16 on one core of an AMD Zen 5: batched 0.90 ms, grouped 2.04, a loop of
packed linears 2.51, a loop of ``F.linear`` 5.79.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_ALIGNMENT_BYTES = 16


def grouped_gemm(x_TK: Tensor, weight_GNK: Tensor, offsets: Tensor) -> Tensor:
    """Return each group's rows times its weight transposed, [T, N]; see the facade."""
    num_groups, num_outputs, num_inputs = weight_GNK.shape
    sizes = offsets.diff().tolist()
    if len(x_TK) == 0:
        return x_TK.new_empty(0, num_outputs)
    if len(set(sizes)) == 1:
        batch = x_TK.reshape(num_groups, sizes[0], num_inputs)
        return torch.bmm(batch, weight_GNK.transpose(1, 2)).view(len(x_TK), num_outputs)
    row_bytes = x_TK.element_size() * num_inputs
    if row_bytes % _ALIGNMENT_BYTES == 0 and x_TK.dtype != torch.float16 and x_TK.is_contiguous():
        # It wants rows aligned to 16 bytes.
        return torch._grouped_mm(x_TK, weight_GNK.transpose(1, 2), offs=offsets[1:].int())
    groups = zip(torch.split(x_TK, sizes), weight_GNK, strict=True)
    return torch.cat([functional.linear(rows, weight) for rows, weight in groups if len(rows)])
