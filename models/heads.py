"""Heads of the exits: tokens to logits and the speculative embedding; logits to probabilities and combined value."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import OBJECTIVES, RankerConfig
from models.inputs import COUNTER_FEATURES
from models.layers.layout import CandidateLayout
from models.layers.norm import RMSNorm

CLICK, CONVERSION = range(len(OBJECTIVES))


class FirstPass(nn.Module):
    """The cheap pass: one bilinear form of request tokens and pooled candidate embedding per objective.

    Args:
        config: The ranker's configuration.
    """

    def __init__(self, config: RankerConfig) -> None:
        super().__init__()
        self.shape = (config.num_objectives, config.first_pass_width)
        self.norm = RMSNorm(config.width, bias=config.bias)
        num_request = config.layer_sizes[-1].request.num_tokens
        self.user = nn.Linear(
            num_request * config.width, config.num_objectives * config.first_pass_width, bias=config.bias
        )
        # Folded into the user vectors, where a bias has no place.
        num_inputs = len(config.candidate_features) * config.width + len(COUNTER_FEATURES)
        self.item = nn.Linear(num_inputs, config.first_pass_width, bias=False)

    def encode(self, tokens: Tensor) -> Tensor:
        """Fold the candidate's projection into the user vectors: [R, B, D] -> [B, O, F * D + counters]."""
        flat = self.norm(tokens).transpose(0, 1).flatten(1)
        users: Tensor = self.user(flat).view(-1, *self.shape) @ self.item.weight
        return users

    def rank(self, users: Tensor, pooled: Tensor, counters: Tensor, layout: CandidateLayout) -> Tensor:
        """Score: user vectors of ``encode``, pooled [C, F, D], counters [C, counters] -> logits [C, O]."""
        flat = pooled.flatten(1)
        # Two products, not one of the concatenation: with an odd inner size MKL's bits depend on the number of rows.
        if layout.request_index is None:
            by_input = users[0].t()
            logits: Tensor = flat @ by_input[: flat.shape[1]] + counters @ by_input[flat.shape[1] :]
            return logits
        return torch.einsum("cof,cf->co", layout.rows(users), torch.cat([flat, counters], dim=1))


class ExitHead(nn.Module):
    """The heads of one exit: one hidden layer over candidate tokens, with the request's part as a contribution.

    What they give is a correction of the first pass's logits: an exit learns what the first pass misses.

    Args:
        config: The ranker's configuration.
        depth: Interaction layers before the exit.
    """

    def __init__(self, config: RankerConfig, depth: int) -> None:
        super().__init__()
        sizes, hidden = config.layer_sizes[depth - 1], config.head_widths[depth]
        self.cross = nn.Linear(sizes.request.num_tokens * config.width, hidden, bias=False)
        self.hidden = nn.Linear(sizes.candidate.num_tokens * config.width, hidden, bias=config.bias)
        self.logits = nn.Linear(hidden, config.num_objectives, bias=config.bias)

    def encode(self, tokens: Tensor) -> Tensor:
        """Return the request's part of the hidden layer: [R, B, D] -> [B, hidden]."""
        part: Tensor = self.cross(tokens.transpose(0, 1).flatten(1))
        return part

    def rank(self, tokens: Tensor, given: Tensor, layout: CandidateLayout) -> tuple[Tensor, Tensor]:
        """Return the correction [C, O] and the hidden layer [C, hidden] of candidate tokens [N, C, D]."""
        own = self.hidden(tokens.transpose(0, 1).flatten(1))
        hidden = functional.relu(own + layout.rows(given))
        return self.logits(hidden), hidden


class Heads(nn.Module):
    """The heads of every exit, and the speculative embedding, which the deepest exit gives.

    Args:
        config: The ranker's configuration.
    """

    def __init__(self, config: RankerConfig) -> None:
        super().__init__()
        self.exits = nn.ModuleDict({str(depth): ExitHead(config, depth) for depth in config.exits})
        self.speculative = nn.Linear(config.head_widths[config.num_layers], config.speculative_width, bias=config.bias)

    def exit(self, depth: int) -> ExitHead:
        """Return the heads after ``depth`` interaction layers.

        Raises:
            KeyError: there is no exit.
        """
        return cast(ExitHead, self.exits[str(depth)])

    def embed(self, hidden: Tensor) -> Tensor:
        """Return the speculative embedding [C, E] in (-1, 1) of the deepest exit's hidden layer [C, hidden]."""
        # Detached: what trains the embedding's own map must not steer the scores.
        return torch.tanh(self.speculative(hidden.detach()))


def probabilities(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return click and conversion probability: logits float32 [C, O] -> float32 [C, O].

    The second logit is of a conversion given a click, so a conversion is never likelier than its click.
    """
    # exp of a clipped value: a logit beyond 80 is certain in float32 anyway, and the clip keeps exp finite.
    chance = np.asarray(1.0 / (1.0 + np.exp(-np.clip(logits, -80.0, 80.0))), np.float32)
    chance[:, CONVERSION] *= chance[:, CLICK]
    return chance


def combined_value(scores: npt.NDArray[np.float32], weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the weighted sum over objectives: scores float32 [C, O], weights float32 [O] -> float32 [C]."""
    value = scores[:, 0] * weights[0]
    for objective in range(1, len(weights)):
        value = value + scores[:, objective] * weights[objective]
    return np.asarray(value, np.float32)
