"""What the model's benchmarks run: a network with random weights, one request with a full history, and candidates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from kernels.packed_linear import PackedLinear
from models.config import RankerConfig
from models.inputs import COUNTER_FEATURES
from models.layers.layout import CandidateLayout
from models.network import RankingNetwork, State
from models.random_request import RequestSide, random_requests
from shared.config import load_config

LARGE = Path("configs/model/large.yaml")
CEILING_SIZE = 1_024
"""K and N of the product that counts as what the machine can do; M is 1,000."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The network with its inputs.

    Args:
        config: The ranker's configuration.
        network: float32, random weights.
        request: One request with a full history.
        pooled: [C, F, D] of the most candidates that a benchmark asks for.
        counters: [C, counters].
    """

    config: RankerConfig
    network: RankingNetwork
    request: RequestSide
    pooled: Tensor
    counters: Tensor

    @classmethod
    def of(cls, num_candidates: int, seed: int, path: Path = LARGE) -> Self:
        """Make a network of a configuration file, one request, and candidates."""
        config = load_config(RankerConfig, path, {})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = RankingNetwork(config).requires_grad_(False).eval()
            request = random_requests(config)
            pooled = torch.randn(num_candidates, len(config.candidate_features), config.width)
            counters = torch.randn(num_candidates, len(COUNTER_FEATURES))
        return cls(config, network, request, pooled, counters)

    def lowered(self, dtype: torch.dtype) -> RankingNetwork:
        """Return a copy of the network in another dtype."""
        copy = RankingNetwork(self.config)
        copy.load_state_dict(self.network.state_dict())
        return copy.requires_grad_(False).eval().to(dtype)

    def encode(self, network: RankingNetwork, dtype: torch.dtype = torch.float32) -> State:
        """Encode the request with a network of this dtype."""
        features, events, ages, dense, taste = self.request
        return network.encode(features.to(dtype), events.to(dtype), ages, dense.to(dtype), taste.to(dtype))

    def candidates(self, number: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, CandidateLayout]:
        """Return pooled embeddings, counters and layout of the first candidates, all of the one request."""
        layout = CandidateLayout.single(number)
        return self.pooled[:number].to(dtype), self.counters[:number].to(dtype), layout

    @property
    def num_tokens(self) -> int:
        """T: tokens of the encoded history."""
        return self.config.encoder.num_tokens


class Ceiling:
    """A packed square product: the rate that counts as all that the machine can do in a dtype.

    Args:
        dtype: Of inputs and weight.
        rows: M.
    """

    def __init__(self, dtype: torch.dtype, rows: int = 1_000) -> None:
        self._x = torch.randn(rows, CEILING_SIZE).to(dtype)
        self._linear = PackedLinear(torch.randn(CEILING_SIZE, CEILING_SIZE).to(dtype))
        self.flops = 2 * rows * CEILING_SIZE * CEILING_SIZE

    def __call__(self) -> Tensor:
        """Run one product."""
        return self._linear(self._x)
