"""From a ranker in memory to the groups and documents of a weights version, and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from models.calibration import Calibration
from models.config import RankerConfig
from models.embedding import catalog as catalog_group
from models.embedding import vocabulary as vocabulary_group
from models.embedding.catalog import ItemCatalog
from models.embedding.serving_rows import with_serving_rows
from models.embedding.tables import group, table_weight
from models.embedding.vocabulary import Vocabulary
from models.ranker import Ranker
from models.request_tables import item_genre_matrix
from models.source import MemorySource, Tensors, WeightSource
from models.stations import DENSE_GROUP, NETWORK_PREFIX, load_network


def export_source(
    ranker: Ranker,
    vocabularies: dict[str, Vocabulary],
    catalog: ItemCatalog,
    calibration: Calibration,
    version: str = "unpublished",
    traffic: Mapping[str, npt.NDArray[np.integer]] | None = None,
) -> MemorySource:
    """Return a ranker as a weight source; arrays are shared with the ranker where they can be.

    Args:
        ranker: Tables and network.
        vocabularies: One of each table.
        catalog: Attributes of the items.
        calibration: Scale and offset of each depth.
        version: Name of the source.
        traffic: table -> reads of each row, for tables with hot rows.
    """
    dense: Tensors = {
        f"{NETWORK_PREFIX}{name}": value.detach().numpy() for name, value in ranker.network.state_dict().items()
    }
    groups = {DENSE_GROUP: dense | calibration.tensors(), catalog_group.GROUP: catalog.tensors()}
    groups[vocabulary_group.GROUP] = {}
    for table in ranker.config.tables:
        groups[group(table.name)] = ranker.tables.export(table.name)
        groups[vocabulary_group.GROUP] |= vocabularies[table.name].tensors(table.name)
    source = MemorySource(version, groups, {"model": ranker.config.model_dump(mode="json")})
    return with_serving_rows(source, traffic)


def import_ranker(source: WeightSource) -> Ranker:
    """Return a weights version as a whole ranker, for evaluation and further training.

    Raises:
        WeightsError: the weights do not fit their model.
    """
    config = RankerConfig.model_validate(source.json("model"))
    weights = {table.name: table_weight(source, table.name) for table in config.tables}
    items = vocabulary_group.Vocabulary.from_weights(source, "item")
    genres = item_genre_matrix(items, ItemCatalog.from_weights(source), len(weights["item"]), len(weights["genre"]))
    ranker = Ranker(config, {name: len(weight) for name, weight in weights.items()}, genres)
    with torch.no_grad():
        for name, weight in weights.items():
            ranker.tables.weights[name].copy_(torch.tensor(weight))
        ranker.network.load_state_dict(load_network(source, config).state_dict())
    return ranker.eval()
