"""From a ranker in memory to the groups and documents of a weights version."""

from __future__ import annotations

from models.calibration import Calibration
from models.embedding import catalog as catalog_group
from models.embedding import vocabulary as vocabulary_group
from models.embedding.catalog import ItemCatalog
from models.embedding.tables import group
from models.embedding.vocabulary import Vocabulary
from models.ranker import Ranker
from models.source import MemorySource, Tensors
from models.stations import DENSE_GROUP, NETWORK_PREFIX


def export_source(
    ranker: Ranker,
    vocabularies: dict[str, Vocabulary],
    catalog: ItemCatalog,
    calibration: Calibration,
    version: str = "unpublished",
) -> MemorySource:
    """Return a ranker as a weight source; arrays are shared with the ranker where they can be.

    Args:
        ranker: Tables and network.
        vocabularies: One of each table.
        catalog: Attributes of the items.
        calibration: Scale and offset of each pass.
        version: Name of the source.
    """
    dense: Tensors = {
        f"{NETWORK_PREFIX}{name}": value.detach().numpy() for name, value in ranker.network.state_dict().items()
    }
    groups = {DENSE_GROUP: dense | calibration.tensors(), catalog_group.GROUP: catalog.tensors()}
    groups[vocabulary_group.GROUP] = {}
    for table in ranker.config.tables:
        groups[group(table.name)] = ranker.tables.export(table.name)
        groups[vocabulary_group.GROUP] |= vocabularies[table.name].tensors(table.name)
    return MemorySource(version, groups, {"model": ranker.config.model_dump(mode="json")})
