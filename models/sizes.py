"""Sizes of every layer of a network, one by one: what a simplified model carries, because its layers differ."""

from __future__ import annotations

from pydantic import Field

from shared.config import Config


class BlockSizes(Config):
    """Sizes of one token group in one interaction layer.

    Args:
        num_inputs: Tokens that enter.
        num_seen: Tokens that the block mixes: those, and what the group has seen of the history.
        num_queries: Queries to the history.
        num_mixtures: Columns k of the factorization machine.
        num_mlp_tokens: Output tokens with a part of the factorization-machine block.
        num_linear_tokens: Output tokens with a part of the linear compression.
        num_residual_tokens: Output tokens that only the residual makes; simplification leaves some.
        hidden_width: Hidden width of the factorization-machine block.
        num_products_counted: What the norm of the products divides their sum of squares by: their number before
            simplification, so that products which are gone still count as zeros.
        has_residual_map: Whether the residual is a matrix on the token axis; else inputs are added as they are.
    """

    num_inputs: int = Field(ge=1)
    num_seen: int = Field(ge=1)
    num_queries: int = Field(ge=1)
    num_mixtures: int = Field(ge=1)
    num_mlp_tokens: int = Field(ge=1)
    num_linear_tokens: int = Field(ge=1)
    num_residual_tokens: int = Field(0, ge=0)
    hidden_width: int = Field(ge=1)
    num_products_counted: int = Field(ge=1)
    has_residual_map: bool

    @property
    def num_tokens(self) -> int:
        """Tokens that the block gives."""
        return self.num_mlp_tokens + self.num_linear_tokens + self.num_residual_tokens

    @property
    def num_products(self) -> int:
        """Products that enter the block's hidden layer."""
        return self.num_seen * self.num_mixtures


class LayerSizes(Config):
    """Sizes of one interaction layer and the encoder layer beside it.

    Args:
        request: Request-only group.
        candidate: Candidate group.
        feed_forward_width: Hidden width of the encoder's position-wise network.
    """

    request: BlockSizes
    candidate: BlockSizes
    feed_forward_width: int = Field(ge=1)


class NetworkSizes(Config):
    """Sizes of a network whose layers differ.

    Args:
        layers: One a layer.
        head_widths: Hidden width of each exit's heads, the shallowest exit first.
    """

    layers: tuple[LayerSizes, ...]
    head_widths: tuple[int, ...]
