"""Block attention of the encoder against full attention and a mask, whole and continued, alone and in a batch."""

from __future__ import annotations

import pytest
import torch

from kernels.block_attention import block_attention
from kernels.tolerance import largest_error, tolerance
from models.layers.attention import attend_blocks


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("block", "window"), [(1, 1), (4, 1), (4, 2), (5, 3), (64, 2)])
@pytest.mark.parametrize("length", [0, 1, 4, 5, 23])
def test_equals_masked_full_attention_whole_and_continued(batch: int, block: int, window: int, length: int) -> None:
    torch.manual_seed(length)
    q, k, v = (torch.randn(batch, length, 2, 8) for _ in range(3))
    ends = torch.arange(batch + 1) * length
    flat = block_attention(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        ends,
        block=block,
        window_blocks=window,
        backend="reference",
    )
    expected = flat.view(q.shape)
    limit = tolerance(torch.float32, 8 + length)
    assert largest_error(attend_blocks(q, k, v, block, window), expected) <= limit
    for cut in range(length):
        first = max(cut // block - window + 1, 0) * block
        later = attend_blocks(q[:, cut:], k[:, first:], v[:, first:], block, window, cut - first)
        assert largest_error(later, expected[:, cut:]) <= limit
