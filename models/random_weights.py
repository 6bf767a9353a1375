"""A ranker with random weights over made-up items and users: for tests, and for services without a trained model."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from models.calibration import Calibration
from models.config import EncoderConfig, GroupConfig, RankerConfig
from models.embedding.catalog import ItemCatalog
from models.embedding.vocabulary import Vocabulary
from models.export import export_source
from models.golden import GoldenRequest, add_golden
from models.inputs import COUNTER_FEATURES
from models.ranker import Ranker
from models.request_tables import item_genre_matrix
from models.source import MemorySource
from shared.hashing import EntityId, id_keys
from shared.schema.user import UserHistory

GENRES = ("Action", "Comedy", "Drama", "Horror", "Romance")
TINY = RankerConfig(
    width=8,
    history_length=14,
    num_layers=2,
    num_dense_tokens=1,
    dense_hidden_width=4,
    encoder=EncoderConfig(
        num_events=6,
        window_step=2,
        block=2,
        window_blocks=2,
        num_summaries=1,
        num_seeds=3,
        feed_forward_width=8,
        num_context_tokens=2,
    ),
    request_group=GroupConfig(num_queries=1, num_mixtures=2, num_mlp_tokens=2, num_linear_tokens=2, hidden_width=8),
    candidate_group=GroupConfig(num_queries=1, num_mixtures=2, num_mlp_tokens=2, num_linear_tokens=2, hidden_width=8),
    head_width=8,
    first_pass_width=4,
    speculative_width=4,
)
"""A whole ranker in some thousands of weights."""


def random_weights(
    config: RankerConfig = TINY,
    num_items: int = 40,
    num_users: int = 20,
    seed: int = 0,
    version: str = "random",
    *,
    golden: bool = True,
) -> MemorySource:
    """Return a weight source with random weights.

    Items have the ids 1 to ``num_items``, with 0 to 3 genres of ``GENRES`` and a year from 1990 on; users 1 to
    ``num_users``; surfaces are ``ml-1m`` and ``web``.

    Args:
        config: Sizes.
        num_items: Items of vocabulary and catalog.
        num_users: Users of the vocabulary.
        seed: Every array is a function of it.
        version: Name of the source.
        golden: Whether to add a golden request, which the oracle answers pair by pair: seconds to minutes for a large
            model. Services refuse weights without one.
    """
    random = np.random.default_rng(seed)
    items = np.arange(1, num_items + 1, dtype=np.int64)
    years = 1990 + items % 7
    known = _vocabularies(items, years, num_users)
    vocabularies = {table.name: known.get(table.name) or Vocabulary.of(items[:0]) for table in config.tables}
    genre_keys = id_keys(GENRES)
    chosen = [np.sort(random.choice(len(GENRES), size=int(item) % 4, replace=False)) for item in items]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(genres) for genres in chosen], dtype=np.int64)])
    flat = np.concatenate(chosen).astype(np.int64)
    groups = np.array([genre_keys[genres[0]] if len(genres) else 0 for genres in chosen], np.int64)
    counters = random.normal(size=(num_items, len(COUNTER_FEATURES))).astype(np.float32)
    genre_rows, year_rows = vocabularies["genre"].rows(genre_keys[flat]), vocabularies["year"].rows(years)
    catalog = ItemCatalog(items, genre_rows, offsets, year_rows, groups, counters)
    num_rows = {table.name: table.num_rows or vocabularies[table.name].num_rows for table in config.tables}
    item_genres = item_genre_matrix(vocabularies["item"], catalog, num_rows["item"], num_rows["genre"])
    ranker = _random_ranker(config, num_rows, item_genres, seed)
    calibration = _random_calibration(config, random)
    traffic = {name: random.zipf(1.3, rows) for name, rows in num_rows.items() if config.table(name).hot_rows}
    source = export_source(ranker, vocabularies, catalog, calibration, version, traffic)
    if not golden:
        return source
    length = min(config.history_length, num_items)
    history = UserHistory(
        item_keys=random.permutation(items)[:length],
        weights=(random.integers(1, 11, length) / 2).astype(np.float32),
        timestamps_s=np.cumsum(random.integers(0, 10_000, length)),
        num_total=length + 3,
        profile={"gender": "F", "age": "25", "zip_code": "94110"},
    )
    candidates: list[EntityId] = [*items[: min(num_items, 20)].tolist(), "no-such-item"]
    add_golden(source, GoldenRequest(1, candidates, "web", 10_000 * length + 50, history))
    return source


def _random_ranker(
    config: RankerConfig, num_rows: dict[str, int], item_genres: npt.NDArray[np.float32], seed: int
) -> Ranker:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ranker = Ranker(config, num_rows, item_genres)
        for parameter in ranker.parameters():
            # Far from their initial values, so that no term is lost in the rounding of another; in wide layers less so,
            # or the scores would all be 0 or 1.
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
            parameter.data += min(0.3, fan_in**-0.5) * torch.randn(parameter.shape)
    return ranker


def _random_calibration(config: RankerConfig, random: np.random.Generator) -> Calibration:
    count = config.num_objectives
    return Calibration(
        {
            depth: np.stack([random.uniform(0.8, 1.2, count), random.normal(0.0, 0.2, count)]).astype(np.float32)
            for depth in config.depths
        }
    )


def _vocabularies(items: npt.NDArray[np.int64], years: npt.NDArray[np.int64], num_users: int) -> dict[str, Vocabulary]:
    return {
        "item": Vocabulary.of(items),
        "user": Vocabulary.of(np.arange(1, num_users + 1, dtype=np.int64)),
        "gender": Vocabulary.of(id_keys(["F", "M"])),
        "age": Vocabulary.of(id_keys(["1", "18", "25", "35"])),
        "occupation": Vocabulary.of(id_keys(["artist", "lawyer", "writer"])),
        "zip": Vocabulary.of(id_keys(["100", "941"])),
        "genre": Vocabulary.of(id_keys(GENRES)),
        "year": Vocabulary.of(years),
        "surface": Vocabulary.of(id_keys(["ml-1m", "web"])),
    }
