"""One interaction layer: a Wukong block under the request/candidate group mask, with cross attention to the history.

Groups are ordered (request, candidate) and information flows downwards only: the request group is computed from itself,
so once a request; the candidate group reads both. Every linear map on the token axis is block lower triangular, and its
request half, like the request half of ``X^T Y`` and of the first linear of the factorization-machine block, is a
*contribution* that the request side computes once and the candidate side adds.

Source: Wukong (arXiv 2403.02545) for the block; ROCS (arXiv 2607.27744) for the group mask and the attention at every
layer. No bias in any map or norm, the "no-bias" rule of Meta's Adaptive Ranking Model blog.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import GroupConfig, RankerConfig
from models.layers.attention import attend_candidates
from models.layers.layout import CandidateLayout
from models.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Contributions:
    """What one layer's request side gives to the candidates of B requests.

    Args:
        keys: [B, T, D], of the encoded history.
        values: [B, T, D].
        queries: [B, queries, D], request half of the candidates' queries.
        mixtures: [B, k, D], request half of ``X^T Y``.
        linear: [B, linear tokens, D], request half of the linear compression.
        hidden: [B, hidden], request half of the factorization-machine block's hidden layer.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    mixtures: Tensor
    linear: Tensor
    hidden: Tensor

    def named(self, layer: int) -> dict[str, Tensor]:
        """Return the tensors under their names in the user state."""
        return {f"layer{layer}.{field.name}": getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, state: dict[str, Tensor], layer: int) -> Contributions:
        """Read one layer's part of a user state."""
        return cls(**{field.name: state[f"layer{layer}.{field.name}"] for field in fields(cls)})


class GroupBlock(nn.Module):
    """The maps of one token group from its own tokens.

    Args:
        num_inputs: Tokens that enter.
        num_seen: Tokens that the block mixes: those, and what the group has seen of the history.
        group: Sizes.
        width: D.
    """

    def __init__(self, num_inputs: int, num_seen: int, group: GroupConfig, width: int) -> None:
        super().__init__()
        self.group = group
        self.query_tokens = _token_map(group.num_queries, num_inputs)
        self.query = nn.Linear(width, width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mixtures = _token_map(group.num_mixtures, num_seen)
        self.linear = _token_map(group.num_linear_tokens, num_seen)
        self.residual = None if num_inputs == group.num_tokens else _token_map(group.num_tokens, num_inputs)
        num_products = num_seen * group.num_mixtures
        self.norm_products = RMSNorm(num_products)
        self.up = nn.Linear(num_products, group.hidden_width, bias=False)
        self.down = nn.Linear(group.hidden_width, group.num_mlp_tokens * width, bias=False)
        self.norm = RMSNorm(width)

    def products(self, tokens: Tensor, mixtures: Tensor) -> Tensor:
        """Return the normalised, flattened X (X^T Y): [m, N, D] and [k, N, D] -> [N, m * k]."""
        inner = torch.bmm(tokens.transpose(0, 1), mixtures.permute(1, 2, 0))
        flat: Tensor = self.norm_products(inner.flatten(1))
        return flat

    def close(self, inputs: Tensor, hidden: Tensor, linear: Tensor) -> Tensor:
        """Make the layer's output tokens.

        Args:
            inputs: [n, N, D], tokens that entered.
            hidden: [N, hidden], before the activation.
            linear: [linear tokens, N, D].

        Returns:
            [tokens, N, D].
        """
        mlp = self.down(functional.relu(hidden)).view(len(hidden), self.group.num_mlp_tokens, -1).transpose(0, 1)
        residual = inputs if self.residual is None else mix(self.residual, inputs)
        out: Tensor = self.norm(torch.cat([mlp, linear]) + residual)
        return out


class InteractionLayer(nn.Module):
    """Both groups of one layer.

    Args:
        config: The ranker's configuration.
        num_request_inputs: Request tokens that enter.
        num_candidate_inputs: Candidate tokens that enter.
    """

    def __init__(self, config: RankerConfig, num_request_inputs: int, num_candidate_inputs: int) -> None:
        super().__init__()
        request, candidate, width = config.request_group, config.candidate_group, config.width
        self.num_heads = config.encoder.num_heads
        num_seen = num_request_inputs + request.num_queries + config.encoder.num_summaries
        self.request = GroupBlock(num_request_inputs, num_seen, request, width)
        self.candidate = GroupBlock(
            num_candidate_inputs, num_candidate_inputs + candidate.num_queries, candidate, width
        )
        self.cross_query_tokens = _token_map(candidate.num_queries, num_request_inputs)
        self.cross_mixtures = _token_map(candidate.num_mixtures, num_seen)
        self.cross_linear = _token_map(candidate.num_linear_tokens, num_seen)
        self.cross_up = nn.Linear(num_seen * request.num_mixtures, candidate.hidden_width, bias=False)

    def request_queries(self, tokens: Tensor) -> Tensor:
        """Return what the request group asks of the history: tokens [R, B, D] -> [B, queries, D]."""
        queries: Tensor = self.request.query(mix(self.request.query_tokens, tokens))
        return queries.transpose(0, 1)

    def encode(
        self, tokens: Tensor, answers: Tensor, summaries: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Contributions]:
        """Run the request side.

        Args:
            tokens: [R, B, D].
            answers: [B, queries, D], what the history said to ``request_queries``.
            summaries: [B, summaries, D], of the encoded history.
            keys: [B, T, D].
            values: [B, T, D].

        Returns:
            Request tokens of the next layer, and what the candidates need of this one.
        """
        block = self.request
        seen = torch.cat([block.attention_out(answers), summaries], dim=1)
        both = torch.cat([tokens, seen.transpose(0, 1)])
        products = block.products(both, mix(block.mixtures, both))
        contributions = Contributions(
            keys=keys,
            values=values,
            queries=self.candidate.query(mix(self.cross_query_tokens, tokens)).transpose(0, 1),
            mixtures=mix(self.cross_mixtures, both).transpose(0, 1),
            linear=mix(self.cross_linear, both).transpose(0, 1),
            hidden=self.cross_up(products),
        )
        return block.close(tokens, block.up(products), mix(block.linear, both)), contributions

    def rank(self, tokens: Tensor, given: Contributions, mask: Tensor | None, layout: CandidateLayout) -> Tensor:
        """Run the candidate side: [N, C, D] -> candidate tokens of the next layer."""
        block = self.candidate
        queries = block.query(mix(block.query_tokens, tokens)) + layout.tokens(given.queries)
        seen = attend_candidates(queries, given.keys, given.values, mask, self.num_heads, layout)
        both = torch.cat([tokens, block.attention_out(seen)])
        mixtures = mix(block.mixtures, both) + layout.tokens(given.mixtures)
        hidden = block.up(block.products(both, mixtures)) + layout.rows(given.hidden)
        return block.close(tokens, hidden, mix(block.linear, both) + layout.tokens(given.linear))


def mix(weights: Tensor, tokens: Tensor) -> Tensor:
    """Map the token axis: [m, n] and [n, N, D] -> [m, N, D], one matrix product."""
    _, num_rows, width = tokens.shape
    return (weights @ tokens.reshape(len(tokens), num_rows * width)).view(-1, num_rows, width)


def _token_map(num_out: int, num_in: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(num_out, num_in) * num_in**-0.5)
