"""One interaction layer: a Wukong block under the request/candidate group mask, with cross attention to the history.

Groups are ordered (request, candidate) and information flows downwards only: the request group is computed from itself,
so once a request; the candidate group reads both. Every linear map on the token axis is block lower triangular, and its
request half, like the request half of ``X^T Y`` and of the first linear of the factorization-machine block, is a
*contribution* that the request side computes once and the candidate side adds.

Source: Wukong (arXiv 2403.02545) for the block; ROCS (arXiv 2607.27744) for the group mask and the attention at every
layer. No bias in any map or norm, the "no-bias" rule of Meta's Adaptive Ranking Model blog; with ``bias`` the channel
maps and the norms have one, for comparison. Maps on the token axis never do.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import RankerConfig
from models.layers.attention import attend_candidates
from models.layers.layout import CandidateLayout
from models.layers.norm import RMSNorm
from models.sizes import BlockSizes, LayerSizes


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
        sizes: Sizes.
        width: D.
        bias: Whether channel maps and norms have one.
    """

    def __init__(self, sizes: BlockSizes, width: int, bias: bool) -> None:
        super().__init__()
        self.sizes = sizes
        self.query_tokens = _token_map(sizes.num_queries, sizes.num_inputs)
        self.query = nn.Linear(width, width, bias=bias)
        self.attention_out = nn.Linear(width, width, bias=bias)
        self.mixtures = _token_map(sizes.num_mixtures, sizes.num_seen)
        self.linear = _token_map(sizes.num_linear_tokens, sizes.num_seen)
        self.residual = _token_map(sizes.num_tokens, sizes.num_inputs) if sizes.has_residual_map else None
        self.norm_products = RMSNorm(sizes.num_products, sizes.num_products_counted, bias)
        self.up = nn.Linear(sizes.num_products, sizes.hidden_width, bias=bias)
        self.down = nn.Linear(sizes.hidden_width, sizes.num_mlp_tokens * width, bias=bias)
        self.norm = RMSNorm(width, bias=bias)

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
        mlp = self.down(functional.relu(hidden)).view(len(hidden), self.sizes.num_mlp_tokens, -1).transpose(0, 1)
        residual = inputs if self.residual is None else mix(self.residual, inputs)
        made = [mlp, linear]
        if self.sizes.num_residual_tokens:
            made.append(mlp.new_zeros(self.sizes.num_residual_tokens, *mlp.shape[1:]))
        out: Tensor = self.norm(torch.cat(made) + residual)
        return out


class InteractionLayer(nn.Module):
    """Both groups of one layer.

    Args:
        config: The ranker's configuration.
        sizes: Sizes of this layer.
    """

    def __init__(self, config: RankerConfig, sizes: LayerSizes) -> None:
        super().__init__()
        request, candidate, width = sizes.request, sizes.candidate, config.width
        self.num_heads = config.encoder.num_heads
        self.request = GroupBlock(request, width, config.bias)
        self.candidate = GroupBlock(candidate, width, config.bias)
        self.cross_query_tokens = _token_map(candidate.num_queries, request.num_inputs)
        self.cross_mixtures = _token_map(candidate.num_mixtures, request.num_seen)
        self.cross_linear = _token_map(candidate.num_linear_tokens, request.num_seen)
        # No bias here or in the queries' request half: the candidate's own map adds it.
        self.cross_up = nn.Linear(request.num_products, candidate.hidden_width, bias=False)

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
            queries=functional.linear(mix(self.cross_query_tokens, tokens), self.candidate.query.weight).transpose(
                0, 1
            ),
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
