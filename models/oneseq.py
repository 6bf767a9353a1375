"""OneSeq: events of sources that know different things, each brought to one width, as one sequence in time order.

A user's log holds the events of all sources in time order already, each with the number of its source; histories that
are kept apart are merged by ``merge_histories``. ``select_events`` leaves out what the configuration leaves out, and
``OneSeq`` embeds the rest: the features that a source has go through a network of that source, and a vector says which
source it was. What reads the sequence then needs one attention, not one a source.

Shape letters: B requests, L events, D width, S sources.

Source: one sequence out of aggregated heterogeneous events is an idea of Meta (GEM, October 2026); the selection, the
networks and the order of ties are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from models.inputs import NUM_GAP_BUCKETS, NUM_WEIGHT_BUCKETS
from shared.config import Config
from shared.schema.user import UserHistory

INIT_STD = 0.05

EventFeature: TypeAlias = Literal["item", "weight", "gap"]
"""Item embedding, bucket of the weight, bucket of the time before the request."""


class EventSourceConfig(Config):
    """One source of events.

    Args:
        name: Its name in the user log.
        features: What its events say; a weight that means nothing (an impression without a reaction) is left out.
        max_events: Newest events of the source that enter the sequence; None: all, 0: the source is left out.
    """

    name: str
    features: tuple[EventFeature, ...] = ("item", "weight", "gap")
    max_events: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.features or len(set(self.features)) != len(self.features):
            raise ValueError(f"features of {self.name} must be distinct and at least one, are {self.features}")
        return self


class OneSeqConfig(Config):
    """Which sources make the sequence.

    Args:
        sources: In the order of the log's source numbers.
        length: Newest events of the merged sequence, L.
        hidden_width: Hidden width of each source's network.
    """

    sources: tuple[EventSourceConfig, ...] = Field(min_length=1, max_length=256)
    length: int = Field(100, ge=1, le=65_536)
    hidden_width: int = Field(64, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise ValueError(f"sources must have distinct names, are {names}")
        return self


def merge_histories(histories: Sequence[UserHistory]) -> UserHistory:
    """Merge histories of one user that are kept apart, one a source, into one in time order.

    The source of an event is the place of its history. Of events of one second, those of an earlier history stand
    first, and those of one history keep their order: the merge is stable.

    Args:
        histories: S histories, each oldest first; what they say of themselves as sources is ignored.

    Raises:
        ValueError: there is no history.
    """
    if not histories:
        raise ValueError("there must be at least one history to merge")
    times = np.concatenate([history.timestamps_s for history in histories])
    order = np.argsort(times, kind="stable")
    lengths = [len(history) for history in histories]
    return UserHistory(
        item_keys=np.concatenate([history.item_keys for history in histories])[order],
        weights=np.concatenate([history.weights for history in histories])[order],
        timestamps_s=times[order],
        num_total=sum(history.num_total for history in histories),
        profile={name: value for history in histories for name, value in history.profile.items()},
        sources=np.repeat(np.arange(len(histories), dtype=np.uint8), lengths)[order],
    )


def select_events(sources: npt.NDArray[np.uint8], config: OneSeqConfig) -> npt.NDArray[np.int64]:
    """Return the places, ascending, of the events that enter the sequence.

    Args:
        sources: uint8 [n], source number of each event, oldest first; numbers that the configuration does not have are
            left out.
        config: The sources and the length.
    """
    kept = np.zeros(len(sources), np.bool_)
    for number, source in enumerate(config.sources):
        places = np.flatnonzero(sources == number)
        kept[places if source.max_events is None else places[max(len(places) - source.max_events, 0) :]] = True
    return np.flatnonzero(kept)[-config.length :]


class OneSeq(nn.Module):
    """Embeds the events of one sequence.

    Args:
        config: The sources.
        width: D.
    """

    def __init__(self, config: OneSeqConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.weights = nn.Parameter(torch.randn(NUM_WEIGHT_BUCKETS, width) * INIT_STD)
        self.gaps = nn.Parameter(torch.randn(NUM_GAP_BUCKETS, width) * INIT_STD)
        self.sources = nn.Parameter(torch.randn(len(config.sources), width) * INIT_STD)
        self.networks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(len(source.features) * width, config.hidden_width, bias=False),
                nn.ReLU(),
                nn.Linear(config.hidden_width, width, bias=False),
            )
            for source in config.sources
        )

    def forward(
        self, items: Tensor, weight_buckets: Tensor, gap_buckets: Tensor, sources: Tensor, mask: Tensor
    ) -> Tensor:
        """Embed B padded sequences.

        Args:
            items: [B, L, D], the items' embeddings.
            weight_buckets: int64 [B, L].
            gap_buckets: int64 [B, L].
            sources: int64 [B, L], numbers of the sources.
            mask: bool [B, L], true where there is an event.

        Returns:
            Tokens [B, L, D], 0 where there is no event or its source is not configured.
        """
        shape = items.shape
        rows, weight_rows, gap_rows = items.reshape(-1, shape[-1]), weight_buckets.flatten(), gap_buckets.flatten()
        numbers, tokens = torch.where(mask, sources, -1).flatten(), items.new_zeros(shape).view(-1, shape[-1])
        for number, source in enumerate(self.config.sources):
            places = (numbers == number).nonzero().squeeze(1)
            parts: dict[EventFeature, Callable[[Tensor], Tensor]] = {
                "item": lambda at: rows.index_select(0, at),
                "weight": lambda at: functional.embedding(weight_rows.index_select(0, at), self.weights),
                "gap": lambda at: functional.embedding(gap_rows.index_select(0, at), self.gaps),
            }
            seen = torch.cat([parts[feature](places) for feature in source.features], dim=1)
            network = cast(nn.Sequential, self.networks[number])
            tokens = tokens.index_copy(0, places, network(seen) + self.sources[number])
        return tokens.view(shape)
