"""The oracle's history encoder and the few operators that it is written in: whole, masked matrices, nothing shared.

Each pair of request and candidate carries its own copy of the history; positions and times are Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from models.config import RankerConfig

_NORM_EPSILON = 1e-6


class PlainNetwork:
    """Operators by the names of their weights.

    Args:
        config: The ranker's configuration.
        dense: Name -> tensor of the dense network.
    """

    def __init__(self, config: RankerConfig, dense: Mapping[str, Tensor]) -> None:
        self.config = config
        self.dense = dense

    def encode(
        self, layer: int, tokens: Tensor, features: Tensor, times: list[int], gaps: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the events [N, L, D] after a layer, and its keys and values [N, 1 + L, D], turned to now."""
        name, encoder, length = f"encoder.layers.{layer}", self.config.encoder, len(times)
        if f"network.{name}.feed_forward.keys" in self.dense:
            tokens = tokens + self.feed_forward(
                f"{name}.feed_forward", self.norm(f"{name}.norm_feed_forward", tokens), features
            )
        if f"network.{name}.query_key_value.weight" in self.dense:
            heads = self.linear(f"{name}.query_key_value", self.norm(f"{name}.norm_attention", tokens))
            query, key, value = heads.chunk(3, 2)
            pauses = [0, *(max(after - before, 0) for before, after in pairwise(times))]
            clock = list(accumulate(math.log1p(pause / 60) for pause in pauses))[:length]
            query, key = (self.turn(x, list(range(length)), clock) for x in (query, key))
            block = torch.arange(length) // encoder.block
            age = block[:, None] - block
            seen = (age >= 0) & (age < encoder.window_blocks) & torch.ones(length, length).tril().bool()
            tokens = tokens + self.linear(f"{name}.attention_out", self.attend(query, key, value, seen))
        key, value = self.linear(f"{name}.key_value", self.norm(f"{name}.norm_out", tokens)).chunk(2, 2)
        key = self.turn(key, [index + 1 - length for index in range(length)], [-math.log1p(gap) for gap in gaps])
        sinks = self.dense[f"network.{name}.sink"][:, None, None].expand(2, len(tokens), 1, self.config.width)
        return tokens, torch.cat([sinks[0], key], dim=1), torch.cat([sinks[1], value], dim=1)

    def feed_forward(self, name: str, x: Tensor, features: Tensor) -> Tensor:
        """Run the personal network: hidden units whose weights are learned ones plus what the features make."""
        own = {each: self.dense[f"network.{name}.{each}"] for each in ("keys", "values", "compress")}
        context = own["compress"] @ features
        context = self.norm(f"{name}.norm_context", context * torch.sigmoid(self.linear(f"{name}.gate", context)))
        made = self.linear(f"{name}.key_value", context).chunk(2, 2)
        keys = own["keys"] + self.dense[f"network.{name}.key_mix"] @ made[0]
        values = own["values"] + self.dense[f"network.{name}.value_mix"] @ made[1]
        return torch.relu(x @ keys.transpose(1, 2)) @ values

    def summarize(self, layer: int, summaries: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the summaries [N, summaries, D] after a layer."""
        name = f"encoder.layers.{layer}.summary"
        if f"network.{name}.seeds" not in self.dense:
            return summaries
        found = self.attend(self.dense[f"network.{name}.seeds"].repeat(len(key), 1, 1), key, value)
        channels = torch.split(self.linear(f"{name}.channels", found), self.config.width, dim=2)
        for weights, mapped in zip(self.dense[f"network.{name}.tokens"], channels, strict=True):
            summaries = summaries + weights @ mapped
        return summaries

    def turn(self, x: Tensor, positions: list[int], times: list[float]) -> Tensor:
        """Turn neighbouring channels of [N, L, D]: half of a head's pairs by position, the others by log time."""
        num_pairs = self.config.width // self.config.encoder.num_heads // 2
        num_time = num_pairs // 2
        num_position = num_pairs - num_time
        angles = [
            [
                *(position * 10_000 ** -(pair / num_position) for pair in range(num_position)),
                *(time * 2.0 * 16 ** -(pair / max(num_time - 1, 1)) for pair in range(num_time)),
            ]
            for position, time in zip(positions, times, strict=True)
        ]
        angle = torch.tensor(angles, dtype=torch.float64).view(len(times), num_pairs)
        cosine, sine = (x.float().repeat(1, self.config.encoder.num_heads) for x in (angle.cos(), angle.sin()))
        even, odd = x[:, :, 0::2], x[:, :, 1::2]
        return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=3).flatten(2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
        """Attend in every head: queries [N, Q, D], keys and values [N, T, D], seen bool [Q, T] or None -> [N, Q, D]."""
        width = self.config.width // self.config.encoder.num_heads
        heads = []
        for head in range(self.config.encoder.num_heads):
            part = slice(head * width, (head + 1) * width)
            logits = query[:, :, part] @ key[:, :, part].transpose(1, 2) / math.sqrt(width)
            if seen is not None:
                logits = torch.where(seen, logits, -math.inf)
            heads.append(torch.softmax(logits, dim=2) @ value[:, :, part])
        return torch.cat(heads, dim=2)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply a linear map: [.., in] -> [.., out]."""
        out = x @ self.dense[f"network.{name}.weight"].T
        bias = self.dense.get(f"network.{name}.bias")
        return out if bias is None else out + bias

    def norm(self, name: str, x: Tensor, num_counted: int | None = None) -> Tensor:
        """Normalise; a norm that counts more entries than there are has their share in its gain."""
        width = x.shape[-1]
        count = num_counted or width
        gain = self.dense[f"network.{name}.weight"] / math.sqrt(count / width)
        out = x / torch.sqrt((x * x).sum(-1, keepdim=True) / count + _NORM_EPSILON) * gain
        bias = self.dense.get(f"network.{name}.bias")
        return out if bias is None else out + bias
