"""Configuration of the ranker: which tables and features there are, how wide and deep it is, which tiers serve it.

Imports no torch: preprocess and the ingress read it too.
"""

from __future__ import annotations

import itertools
from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from models.sizes import BlockSizes, LayerSizes, NetworkSizes
from shared.config import Config

Placement: TypeAlias = Literal["row_wise", "table_wise", "column_wise", "replicated"]
RowType: TypeAlias = Literal["fp32", "fp16", "int8", "int4"]
"""How the shards keep rows, see ``models.embedding.quantized``."""
TableBackend: TypeAlias = Literal["fbgemm", "reference"]
"""How a shard looks up its rows, see ``models.embedding.shard_tables``."""
CATALOG_FEATURES = ("item_id", "genres", "year")
"""Features of a candidate that the catalog knows; of any other, a model knows what the request carries."""

WEIGHTS_FORMAT = 6
"""Counts up when code no longer reads what older code published; weights of another format are trained anew."""

OBJECTIVES: tuple[str, str] = ("click", "conversion")
"""Objectives in the order of every [.., O] axis; a conversion is a click that converted."""

HISTORY_TABLE = "item"
"""Table that events of the history share with the candidates."""


class TableConfig(Config):
    """One embedding table.

    Args:
        name: Table name.
        placement: ``row_wise``: row ``r`` lives on shard ``r % S``; ``table_wise``: the whole table on one shard;
            ``column_wise``: all rows on every shard, some of the columns each; ``replicated``: everything on every one.
        shard: Shard of a table-wise table, modulo S; None: such tables go round the shards in order.
        hot_rows: Rows of a row-wise table that every shard holds, those with the most traffic.
        row_type: How the shards keep the rows of a published model.
        num_rows: Rows of a table without a vocabulary, row 0 included: ids are hashed to the others; None: as many as
            the vocabulary has.
    """

    name: str
    placement: Placement = "table_wise"
    shard: int | None = Field(None, ge=0)
    hot_rows: int = Field(0, ge=0)
    row_type: RowType = "fp32"
    num_rows: int | None = Field(None, ge=2, lt=2**31)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shard is not None and self.placement != "table_wise":
            raise ValueError(f"shard is for table_wise tables, {self.name} is {self.placement}")
        if self.hot_rows and self.placement != "row_wise":
            raise ValueError(f"hot_rows are for row_wise tables, {self.name} is {self.placement}")
        return self


class FeatureConfig(Config):
    """One categorical feature of a candidate.

    Args:
        name: Feature name: one of ``CATALOG_FEATURES``, or one that candidates carry in the request.
        table: Table of its ids; several ids are pooled by their mean.
        ids_max: Most ids of one candidate; of more that a request carries the heaviest stay.
        number_bounds: Ascending; the feature is a number, and what it is between which bounds is its row. None: ids.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    table: str
    ids_max: int = Field(1, ge=1, le=64)
    number_bounds: tuple[float, ...] | None = Field(None, min_length=1, max_length=4_095)

    @model_validator(mode="after")
    def _check(self) -> Self:
        bounds = self.number_bounds
        if bounds is not None and (self.name in CATALOG_FEATURES or any(a >= b for a, b in itertools.pairwise(bounds))):
            raise ValueError(f"number_bounds of {self.name} must ascend, and belong to no feature of the catalog")
        return self


class RequestFeatureConfig(Config):
    """One categorical feature of a request, with one id.

    Args:
        name: ``user_id``, ``surface``, or a key of the user's profile.
        table: Table of its id.
        prefix_length: Only so many leading characters of the value count; None: the whole value.
    """

    name: str
    table: str
    prefix_length: int | None = Field(None, ge=1)


class TierConfig(Config):
    """One ranking tier: an exit of the network.

    Args:
        head_max: Candidates that get the tier's full pass, the best of the first pass; 0: the first pass alone.
        num_layers: Interaction layers that the full pass runs before it takes the heads of that exit; None: all.
    """

    head_max: int = Field(ge=0)
    num_layers: int | None = Field(None, ge=1, le=32)


class EncoderParts(Config):
    """What one layer of the history encoder computes beside keys and values.

    Args:
        feed_forward: Personal feed-forward network.
        self_attention: Block attention of events to earlier events.
        summary: A summary of its own; else that of the layer before.
    """

    feed_forward: bool
    self_attention: bool
    summary: bool


class EncoderConfig(Config):
    """The history encoder, see docs/encoder.md.

    Args:
        num_events: Most events that become tokens, the newest; the others count in the dense features alone.
        window_step: The oldest of these events moves on in steps of so many, so that the state of a long history can
            be extended as often before it must be made anew; between num_events - window_step + 1 and num_events count.
        block: Events of a block of self-attention.
        window_blocks: Blocks that an event sees, its own among them.
        self_attention: Whether events attend to earlier events; else layers have feed-forward network and summary.
        comp_skip: Whether layers take turns where there is self-attention: feed-forward network and summary in the even
            ones, self-attention in the odd ones; else every layer has all three.
        num_summaries: Tokens that summarise the history for the interaction layers.
        num_seeds: Learned queries that the summary pools the history with.
        num_summary_maps: Pairs of maps, on the seeds and on the channels, that make summaries of what the seeds found.
        num_heads: Attention heads, of the history and of the queries to it alike.
        feed_forward_width: Hidden units of the personal feed-forward network.
        num_context_tokens: Tokens that the request's features are compressed to, of which that network is made.
        genre_events: Whether an event carries the pooled genres of its item beside the item itself.
    """

    num_events: int = Field(50, ge=1, le=65_536)
    window_step: int = Field(16, ge=1)
    block: int = Field(32, ge=1)
    window_blocks: int = Field(2, ge=1)
    self_attention: bool = True
    comp_skip: bool = True
    num_summaries: int = Field(2, ge=1)
    num_seeds: int = Field(4, ge=1)
    num_summary_maps: int = Field(2, ge=1)
    num_heads: int = Field(2, ge=1)
    feed_forward_width: int = Field(64, ge=1)
    num_context_tokens: int = Field(4, ge=1)
    genre_events: bool = True

    @property
    def num_tokens(self) -> int:
        """T: keys of a full history, the learned one that stands for an empty history among them."""
        return self.num_events + 1

    def parts(self, layer: int) -> EncoderParts:
        """Return what a layer computes."""
        if not self.self_attention:
            return EncoderParts(feed_forward=True, self_attention=False, summary=True)
        is_even = layer % 2 == 0 or not self.comp_skip
        return EncoderParts(feed_forward=is_even, self_attention=layer % 2 == 1 or not self.comp_skip, summary=is_even)


class GroupConfig(Config):
    """Size of one token group (request or candidate) in an interaction layer.

    Args:
        num_queries: Queries that attend to the history in each layer.
        num_mixtures: Columns k of the factorization machine.
        num_mlp_tokens: Tokens that the factorization-machine block gives.
        num_linear_tokens: Tokens that the linear compression block gives.
        hidden_width: Hidden width of the factorization-machine block.
    """

    num_queries: int = Field(2, ge=1)
    num_mixtures: int = Field(8, ge=1)
    num_mlp_tokens: int = Field(4, ge=1)
    num_linear_tokens: int = Field(4, ge=1)
    hidden_width: int = Field(64, ge=1)

    @property
    def num_tokens(self) -> int:
        """Tokens that a layer gives."""
        return self.num_mlp_tokens + self.num_linear_tokens

    def widened(self, ratio: float) -> GroupConfig:
        """Return the group with every size multiplied by ``ratio``, rounded, at least 1."""
        return GroupConfig(**{name: _scaled(size, ratio) for name, size in self})


class RankerConfig(Config):
    """The whole ranker.

    Args:
        width: D, width of tables and tokens.
        history_length: Newest events of a user that are read.
        surprise_half_days: Age in days at which an event counts half in the surprises (docs/encoder.md); None: all that
            are read count alike.
        num_layers: Interaction layers, each with one layer of the history encoder.
        tables: Embedding tables.
        candidate_features: Features of a candidate, the order of axis F.
        request_features: Request-only categorical features.
        num_dense_tokens: Tokens made of the request's dense features.
        dense_hidden_width: Hidden width of the network that makes them.
        encoder: History encoder.
        request_ratio: Widens the request side of every module (request tokens, queries, mixtures, hidden widths, the
            encoder's feed-forward network), whose cost is shared by all candidates of a request; 1: as the groups say.
            The "RRR" of ROCS (arXiv 2607.27744).
        bias: Whether linears have a bias and norms an offset; a model for comparison, Wukong Turbo has none.
        request_group: Request-only token group, before ``request_ratio``.
        candidate_group: Candidate token group.
        head_width: Hidden width of each exit's heads.
        first_pass_width: Rank of the bilinear first pass.
        speculative_width: E.
        objective_weights: Weight of each objective in the combined value.
        tiers: Ranking tiers by name.
        sizes: Sizes of every layer of a simplified model, in place of the groups'; None: as the groups say.
    """

    width: int = Field(32, ge=4)
    history_length: int = Field(200, ge=1, le=65_536)
    surprise_half_days: float | None = Field(None, gt=0)
    num_layers: int = Field(2, ge=1, le=32)
    tables: tuple[TableConfig, ...] = (
        TableConfig(name="item", placement="row_wise"),
        TableConfig(name="user"),
        TableConfig(name="gender"),
        TableConfig(name="age"),
        TableConfig(name="occupation"),
        TableConfig(name="zip"),
        TableConfig(name="genre"),
        TableConfig(name="year"),
        TableConfig(name="surface"),
    )
    candidate_features: tuple[FeatureConfig, ...] = (
        FeatureConfig(name="item_id", table="item"),
        FeatureConfig(name="genres", table="genre", ids_max=16),
        FeatureConfig(name="year", table="year"),
    )
    request_features: tuple[RequestFeatureConfig, ...] = (
        RequestFeatureConfig(name="user_id", table="user"),
        RequestFeatureConfig(name="gender", table="gender"),
        RequestFeatureConfig(name="age", table="age"),
        RequestFeatureConfig(name="occupation", table="occupation"),
        RequestFeatureConfig(name="zip_code", table="zip", prefix_length=3),
        RequestFeatureConfig(name="surface", table="surface"),
    )
    num_dense_tokens: int = Field(2, ge=1)
    dense_hidden_width: int = Field(32, ge=1)
    encoder: EncoderConfig = EncoderConfig()
    request_ratio: float = Field(1.0, gt=0, le=64)
    bias: bool = False
    request_group: GroupConfig = GroupConfig()
    candidate_group: GroupConfig = GroupConfig(num_mlp_tokens=2, num_linear_tokens=2)
    head_width: int = Field(64, ge=1)
    first_pass_width: int = Field(32, ge=1)
    speculative_width: int = Field(16, ge=1)
    objective_weights: dict[str, float] = Field(default_factory=lambda: dict.fromkeys(OBJECTIVES, 1.0))
    # Measured on MovieLens-1M, mean of three seeds (click NE as published, FLOPs a candidate): light .7665, 400;
    # standard .7653, 65,000; full .7654, 107,000. The first pass is by far the best tier by cost: it stays the lowest.
    tiers: dict[str, TierConfig] = Field(
        default_factory=lambda: {
            "light": TierConfig(head_max=0),
            "standard": TierConfig(head_max=500, num_layers=1),
            "full": TierConfig(head_max=500),
        }
    )
    sizes: NetworkSizes | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [table.name for table in self.tables]
        if len(set(names)) != len(names):
            raise ValueError(f"tables must have distinct names, are {names}")
        used = {HISTORY_TABLE, "genre", *(feature.table for feature in self.candidate_features)}
        used |= {feature.table for feature in self.request_features}
        if unknown := sorted(used - set(names)):
            raise ValueError(f"features use tables {unknown}, which tables does not list")
        self._check_carried()
        if self.encoder.num_events > self.history_length:
            raise ValueError(
                f"encoder.num_events must be at most history_length {self.history_length}, is {self.encoder.num_events}"
            )
        if self.width % (2 * self.encoder.num_heads):
            raise ValueError(
                f"width must be a multiple of twice encoder.num_heads {self.encoder.num_heads}, is {self.width}"
            )
        if set(self.objective_weights) != set(OBJECTIVES):
            raise ValueError(f"objective_weights must name {OBJECTIVES}, names {sorted(self.objective_weights)}")
        for name, tier in self.tiers.items():
            if tier.num_layers is not None and tier.num_layers > self.num_layers:
                raise ValueError(
                    f"tiers.{name}.num_layers must be at most num_layers {self.num_layers}, is {tier.num_layers}"
                )
        if self.sizes is not None and len(self.sizes.layers) != self.num_layers:
            raise ValueError(f"sizes.layers must be num_layers {self.num_layers}, are {len(self.sizes.layers)}")
        if self.sizes is not None and len(self.sizes.head_widths) != len(self.exits):
            raise ValueError(f"sizes.head_widths must be one an exit {self.exits}, are {self.sizes.head_widths}")
        return self

    def _check_carried(self) -> None:
        names = [feature.name for feature in self.candidate_features]
        if len(set(names)) != len(names):
            raise ValueError(f"candidate_features must have distinct names, are {names}")
        for feature in self.candidate_features:
            num_rows = self.table(feature.table).num_rows
            if feature.name in CATALOG_FEATURES and num_rows is not None:
                raise ValueError(f"{feature.name} needs a vocabulary, table {feature.table} has num_rows")
            if feature.number_bounds is not None and num_rows != len(feature.number_bounds) + 2:
                raise ValueError(
                    f"table {feature.table} must have num_rows {len(feature.number_bounds) + 2} for the bounds of "
                    f"{feature.name}, has {num_rows}"
                )

    @property
    def num_objectives(self) -> int:
        """O."""
        return len(OBJECTIVES)

    @property
    def exits(self) -> tuple[int, ...]:
        """Depths at which the network has heads, ascending; all layers are always one of them."""
        inner = (tier.num_layers for tier in self.tiers.values() if tier.head_max and tier.num_layers)
        return tuple(sorted({*inner, self.num_layers}))

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths at which there are scores, ascending: 0, the first pass, and the exits."""
        return (0, *self.exits)

    def depth(self, tier: str) -> int:
        """Return how many interaction layers score a tier's head; 0: the first pass alone.

        Raises:
            KeyError: there is no tier of that name.
        """
        found = self.tiers[tier]
        return (found.num_layers or self.num_layers) if found.head_max else 0

    @property
    def request_side(self) -> GroupConfig:
        """Request-only token group after ``request_ratio``."""
        return self.request_group.widened(self.request_ratio)

    @property
    def layer_sizes(self) -> tuple[LayerSizes, ...]:
        """Sizes of every layer."""
        if self.sizes is not None:
            return self.sizes.layers
        request, candidate = self.request_side, self.candidate_group
        summaries = self.encoder.num_summaries
        feed_forward = _scaled(self.encoder.feed_forward_width, self.request_ratio)
        layers = []
        for index in range(self.num_layers):
            num_request = request.num_tokens if index else self.num_request_inputs
            num_candidate = candidate.num_tokens if index else self.num_candidate_inputs
            layers.append(
                LayerSizes(
                    request=_block(request, num_request, num_request + request.num_queries + summaries),
                    candidate=_block(candidate, num_candidate, num_candidate + candidate.num_queries),
                    feed_forward_width=feed_forward,
                )
            )
        return tuple(layers)

    @property
    def head_widths(self) -> dict[int, int]:
        """Hidden width of the heads of each exit."""
        widths = (self.head_width,) * len(self.exits) if self.sizes is None else self.sizes.head_widths
        return dict(zip(self.exits, widths, strict=True))

    @property
    def num_request_inputs(self) -> int:
        """Request tokens that enter the first layer: the features, the dense tokens and the taste."""
        return len(self.request_features) + self.num_dense_tokens + 1

    @property
    def num_candidate_inputs(self) -> int:
        """Candidate tokens that enter the first layer: the features, the counters and the speculative token."""
        return len(self.candidate_features) + 2

    @property
    def carried_features(self) -> tuple[FeatureConfig, ...]:
        """Features that candidates must carry in the request: the catalog does not know them."""
        return tuple(feature for feature in self.candidate_features if feature.name not in CATALOG_FEATURES)

    @property
    def candidate_tables(self) -> tuple[str, ...]:
        """Tables that candidates read, which the shards serve; the others stay with the sequence station."""
        return tuple(dict.fromkeys(feature.table for feature in self.candidate_features))

    def table(self, name: str) -> TableConfig:
        """Return one table's configuration.

        Raises:
            KeyError: there is no table of that name.
        """
        return next(table for table in self.tables if table.name == name)


def _scaled(size: int, ratio: float) -> int:
    return max(round(size * ratio), 1)


def _block(group: GroupConfig, num_inputs: int, num_seen: int) -> BlockSizes:
    return BlockSizes(
        num_inputs=num_inputs,
        num_seen=num_seen,
        num_queries=group.num_queries,
        num_mixtures=group.num_mixtures,
        num_mlp_tokens=group.num_mlp_tokens,
        num_linear_tokens=group.num_linear_tokens,
        hidden_width=group.hidden_width,
        num_products_counted=num_seen * group.num_mixtures,
        has_residual_map=num_inputs != group.num_tokens,
    )
