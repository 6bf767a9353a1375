"""Ranker: tables and network together, from table rows to logits; what training and evaluation run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from models.config import CATALOG_FEATURES, FeatureConfig, RankerConfig
from models.embedding.tables import ReferenceTables
from models.inputs import RequestInputs
from models.network import RankingNetwork, State
from models.sequence_encoder import Ages, Events


@dataclass(frozen=True, slots=True)
class RequestTensors:
    """``RequestInputs`` as tensors; see there for the fields."""

    feature_rows: Tensor
    item_rows: Tensor
    weight_buckets: Tensor
    pause_buckets: Tensor
    clock: Tensor
    log_gaps: Tensor
    mask: Tensor
    dense: Tensor
    taste_rows: Tensor
    taste_weights: Tensor

    @classmethod
    def of(cls, inputs: RequestInputs) -> Self:
        """Wrap numpy inputs without a copy."""
        return cls(**{field.name: torch.from_numpy(getattr(inputs, field.name)) for field in fields(inputs)})


@dataclass(frozen=True, slots=True)
class CandidateTensors:
    """Candidates of a batch as rows.

    Args:
        item_rows: int64 [C], rows of table ``item``.
        genre_weights: [C, genre rows], 1 over the number of genres at each genre of the item.
        year_rows: int64 [C], rows of table ``year``.
        counters: [C, counter features].
    """

    item_rows: Tensor
    genre_weights: Tensor
    year_rows: Tensor
    counters: Tensor


def genre_matrix(
    genre_rows: npt.NDArray[np.int64], genre_offsets: npt.NDArray[np.int64], num_genre_rows: int
) -> npt.NDArray[np.float32]:
    """Return mean pooling of jagged genre rows as a matrix: float32 [N, num_genre_rows], 0 for items without."""
    counts = np.diff(genre_offsets)
    matrix = np.zeros((len(counts), num_genre_rows), np.float32)
    owners = np.repeat(np.arange(len(counts)), counts)
    np.add.at(matrix, (owners, genre_rows), 1.0 / np.maximum(counts, 1)[owners])
    return matrix


class Ranker(nn.Module):
    """The trainable whole.

    Args:
        config: Sizes.
        num_rows: table -> rows, row 0 included.
        item_genres: float32 [item rows, genre rows], ``genre_matrix`` by item row; row 0 and items without are 0.
    """

    item_genres: Tensor

    def __init__(self, config: RankerConfig, num_rows: dict[str, int], item_genres: npt.NDArray[np.float32]) -> None:
        super().__init__()
        self.config = config
        self.tables = ReferenceTables(config, num_rows)
        self.network = RankingNetwork(config)
        self.register_buffer("item_genres", torch.from_numpy(item_genres), persistent=False)

    def with_network(self, network: RankingNetwork) -> Ranker:
        """Return a ranker of the same tables, shared with this one, around another network."""
        num_rows = {name: len(weight) for name, weight in self.tables.weights.items()}
        with torch.device("meta"):
            made = Ranker(network.config, num_rows, self.item_genres.numpy())
        made.tables, made.network, made.item_genres = self.tables, network, self.item_genres
        return made.train(self.training)

    def request_features(self, requests: RequestTensors) -> Tensor:
        """Return the embeddings of the request-only features: [B, request features, D]."""
        return torch.stack(
            [
                self.tables.lookup(feature.table, requests.feature_rows[:, index])
                for index, feature in enumerate(self.config.request_features)
            ],
            dim=1,
        )

    def encode(self, requests: RequestTensors, features: Tensor | None = None) -> State:
        """Compute the user state of B requests; with these ``request_features``, None: those of the tables."""
        features = self.request_features(requests) if features is None else features
        table = self.event_table()
        items = nn.functional.embedding(requests.item_rows, table)
        events = Events(items, requests.weight_buckets, requests.pause_buckets, requests.clock)
        rows, weights = requests.taste_rows, requests.taste_weights
        num_requests, width = rows.shape
        starts = torch.arange(num_requests, device=rows.device) * width
        taste = nn.functional.embedding_bag(
            rows.flatten(), table, starts, per_sample_weights=weights.flatten(), mode="sum"
        )
        ages = Ages(requests.log_gaps, requests.mask)
        return self.network.encode(features, events, ages, requests.dense, taste)

    def event_table(self) -> Tensor:
        """Return what an event's item embeds to: [item rows, D]."""
        return event_table(self.config, self.tables.weights["item"], self.item_genres, self.tables.weights["genre"])

    def pool(self, candidates: CandidateTensors) -> Tensor:
        """Return the pooled embeddings [C, F, D] of candidates."""
        return torch.stack([self._pooled(feature, candidates) for feature in self.config.candidate_features], dim=1)

    def _pooled(self, feature: FeatureConfig, candidates: CandidateTensors) -> Tensor:
        if feature.number_bounds is not None:  # no data set carries it, nor the next: missing, as in serving
            return self.tables.lookup(feature.table, torch.zeros_like(candidates.item_rows))
        if feature.name not in CATALOG_FEATURES:
            return torch.zeros(len(candidates.item_rows), self.config.width, device=candidates.item_rows.device)
        if feature.name == "genres":
            genres: Tensor = candidates.genre_weights @ self.tables.weights[feature.table]
            return genres
        rows = candidates.item_rows if feature.name == "item_id" else candidates.year_rows
        return self.tables.lookup(feature.table, rows)


def event_table(config: RankerConfig, items: Tensor, item_genres: Tensor, genres: Tensor) -> Tensor:
    """Return the embedding of an item as an event: items [I, D], item_genres [I, G], genres [G, D] -> [I, D]."""
    return items + item_genres @ genres if config.encoder.genre_events else items
