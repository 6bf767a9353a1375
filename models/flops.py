"""FLOPs of the network as formulas of its configuration, by part.

Conventions: a multiply-add is 2; matrix products alone count, attention as its two products (queries by keys, weights
by values) over the pairs that are seen; norms, activations, softmax, additions and look-ups do not. So the numbers are
those of ``torch.utils.flop_counter.FlopCounterMode`` with attention in its plain form, but for hidden pairs. Candidates
of several requests in one batch count as they are, without the empty places of a training batch's attention grid.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.config import RankerConfig
from models.inputs import COUNTER_FEATURES, DENSE_FEATURES
from models.sizes import BlockSizes, LayerSizes

Parts = dict[str, int]
"""part -> FLOPs."""


@dataclass(frozen=True, slots=True)
class RankingFlops:
    """FLOPs of ranking, executed in three ways with the same result.

    Args:
        shared: The request side once a request, the candidate side once a candidate: what the serving path does.
        expanded: The history is encoded once a request, but request tokens are copied to every candidate and every
            interaction layer runs on both groups a candidate.
        per_pair: Everything once a candidate.
    """

    shared: int
    expanded: int
    per_pair: int


def request_flops(config: RankerConfig, num_tokens: int, num_requests: int = 1) -> Parts:
    """Count ``RankingNetwork.encode``.

    Args:
        config: The ranker's configuration.
        num_tokens: T, keys of a padded history: its events and the one that stands for none.
        num_requests: B.

    Returns:
        ``dense`` (tokens of dense features), ``encoder`` (history), ``interaction`` (the request group, and what it
        contributes to the candidates), ``first_pass``, ``heads``.
    """
    width, hidden = config.width, config.dense_hidden_width
    layers = config.layer_sizes
    last = layers[-1].request.num_tokens * width
    first_inputs = len(config.candidate_features) * width + len(COUNTER_FEATURES)
    first_users = config.num_objectives * config.first_pass_width
    parts = {
        "dense": hidden * (len(DENSE_FEATURES) + config.num_dense_tokens * width),
        "encoder": sum(_encoder(config, index, num_tokens) for index in range(config.num_layers)),
        "interaction": sum(_request_block(config, sizes, num_tokens) for sizes in layers),
        "first_pass": last * first_users + first_users * first_inputs,
        "heads": sum(
            layers[depth - 1].request.num_tokens * width * hidden for depth, hidden in config.head_widths.items()
        ),
    }
    return {name: 2 * num_requests * count for name, count in parts.items()}


def candidate_flops(
    config: RankerConfig, depth: int, num_tokens: int, num_candidates: int = 1, speculative: bool = False
) -> Parts:
    """Count the candidate side of one depth: ``first_pass`` for 0, else what ``full_pass`` does beyond it.

    Args:
        config: The ranker's configuration.
        depth: Interaction layers, an exit of the model; 0: the first pass.
        num_tokens: T, keys of the history.
        num_candidates: C.
        speculative: Whether there are speculative embeddings.

    Returns:
        ``first_pass``; or ``inputs`` (counters and speculative embedding), ``attention`` (to the history),
        ``interaction``, ``heads``.

    Raises:
        ValueError: there is no exit of that depth.
    """
    if depth not in config.depths:
        raise ValueError(f"depth must be one of {config.depths}, is {depth}")
    width = config.width
    if depth == 0:
        num_inputs = len(config.candidate_features) * width + len(COUNTER_FEATURES)
        return {"first_pass": 2 * num_candidates * config.num_objectives * num_inputs}
    blocks = [sizes.candidate for sizes in config.layer_sizes[:depth]]
    inputs = config.dense_hidden_width * (len(COUNTER_FEATURES) + width)
    head = config.head_widths[depth]
    parts = {
        "inputs": inputs + (config.speculative_width * width if speculative else 0),
        "attention": sum(_attention(block.num_queries, num_tokens, width) for block in blocks),
        "interaction": sum(_block(block, width) for block in blocks),
        "heads": head * (blocks[-1].num_tokens * width + config.num_objectives),
    }
    return {name: 2 * num_candidates * count for name, count in parts.items()}


def ranking_flops(
    config: RankerConfig, depth: int, num_tokens: int, num_candidates: int, num_requests: int = 1
) -> RankingFlops:
    """Count the whole ranking of B requests with C candidates in all: first pass, and the full pass of one depth.

    Args:
        config: The ranker's configuration.
        depth: Exit of the full pass, which all candidates get; 0: the first pass alone.
        num_tokens: T.
        num_candidates: C, over all requests.
        num_requests: B.
    """
    request = request_flops(config, num_tokens)
    candidate = sum(candidate_flops(config, 0, num_tokens).values())
    if depth:
        candidate += sum(candidate_flops(config, depth, num_tokens).values())
    whole, once = sum(request.values()), request["encoder"]
    return RankingFlops(
        shared=num_requests * whole + num_candidates * candidate,
        expanded=num_requests * once + num_candidates * (whole - once + candidate),
        per_pair=num_candidates * (whole + candidate),
    )


def _encoder(config: RankerConfig, index: int, num_tokens: int) -> int:
    """Count one encoder layer in multiply-adds: feed-forward network, self-attention, keys and values, summary."""
    width, encoder, parts = config.width, config.encoder, config.encoder.parts(index)
    num_events, hidden = num_tokens - 1, config.layer_sizes[index].feed_forward_width
    count = num_events * 2 * width * width
    if parts.feed_forward:
        num_context, num_features = encoder.num_context_tokens, len(config.request_features)
        made = num_context * width * (num_features + width + 2 * width) + 2 * hidden * num_context * width
        count += made + 2 * num_events * hidden * width
    if parts.self_attention:
        count += num_events * 4 * width * width + 2 * width * _pairs(num_events, encoder.block, encoder.window_blocks)
    if parts.summary:
        seeds, maps = encoder.num_seeds, encoder.num_summary_maps
        count += _attention(seeds, num_tokens, width) + seeds * maps * width * (width + encoder.num_summaries)
    return count


def _pairs(num_events: int, block: int, window_blocks: int) -> int:
    """Count pairs of an event and one that it sees: its own block up to itself, and the whole blocks before it."""
    total = 0
    for begin in range(0, num_events, block):
        size = min(block, num_events - begin)
        total += size * min(begin, (window_blocks - 1) * block) + size * (size + 1) // 2
    return total


def _request_block(config: RankerConfig, sizes: LayerSizes, num_tokens: int) -> int:
    """Count the request group of one layer and its contributions to the candidates, in multiply-adds."""
    width, own, other = config.width, sizes.request, sizes.candidate
    to_queries = other.num_queries * (own.num_inputs * width + width * width)
    to_tokens = (other.num_mixtures + other.num_linear_tokens) * own.num_seen * width
    to_hidden = own.num_products * other.hidden_width
    attention = _attention(own.num_queries, num_tokens, width)
    return attention + _block(own, width) + to_queries + to_tokens + to_hidden


def _block(sizes: BlockSizes, width: int) -> int:
    """Count one group's own maps in multiply-adds, without its attention to the history."""
    queries = sizes.num_queries * (sizes.num_inputs * width + 2 * width * width)
    mixtures = sizes.num_mixtures * sizes.num_seen * width
    products = sizes.num_products * width
    mlp = sizes.hidden_width * (sizes.num_products + sizes.num_mlp_tokens * width)
    linear = sizes.num_linear_tokens * sizes.num_seen * width
    residual = sizes.num_tokens * sizes.num_inputs * width if sizes.has_residual_map else 0
    return queries + mixtures + products + mlp + linear + residual


def _attention(num_queries: int, num_tokens: int, width: int) -> int:
    return 2 * num_queries * num_tokens * width
