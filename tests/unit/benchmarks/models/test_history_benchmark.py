"""Both sides of the benchmark compute the same request."""

from __future__ import annotations

import torch

from benchmarks.models.history import NUM_NEW, Kept
from models.config import EncoderConfig, RankerConfig
from models.execution import FusedNetwork
from models.execution_config import Execution
from models.network import RankingNetwork
from models.random_request import random_requests

CONFIG = RankerConfig(
    width=16, history_length=64, num_layers=3, encoder=EncoderConfig(num_events=64, block=4, feed_forward_width=16)
)


@torch.inference_mode()
def test_an_extended_state_is_that_of_all_events() -> None:
    torch.manual_seed(0)
    network = FusedNetwork(RankingNetwork(CONFIG).requires_grad_(False).eval(), Execution("torch", "float32", ""))
    for length in (24, 30):
        kept = Kept(network, random_requests(CONFIG, length=length + NUM_NEW), length)
        for found, expected in zip(kept.appended(), kept.anew(), strict=True):
            for one, other in zip(found, expected, strict=True):
                assert one.shape[1] == length + NUM_NEW
                torch.testing.assert_close(one, other)
        assert kept.request(kept.anew)["first"].shape[0] == 1
