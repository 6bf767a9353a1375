"""TrainedModel: a ranker with all that it needs to be measured, published and served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from models.calibration import Calibration
from models.embedding.vocabulary import Vocabulary
from models.export import export_source, import_ranker
from models.ranker import Ranker
from models.routing import GROUP, GainModel
from models.source import MemorySource, WeightSource
from training.data import Dataset
from training.indexing import DatasetIndex


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A trained ranker over one data set.

    Args:
        ranker: Tables and network.
        index: Table rows of the data set.
        calibration: Scale and offset of each depth.
        gain: What each depth is worth to a request; None where there were too few held-out rows to say.
    """

    ranker: Ranker
    index: DatasetIndex
    calibration: Calibration
    gain: GainModel | None = None

    @classmethod
    def from_weights(cls, source: WeightSource, dataset: Dataset) -> Self:
        """Read a published version, to be used on a data set.

        Raises:
            WeightsError: the weights do not fit their model.
        """
        ranker = import_ranker(source)
        vocabularies = {table.name: Vocabulary.from_weights(source, table.name) for table in ranker.config.tables}
        calibration = Calibration.from_weights(source, ranker.config.depths)
        gain = GainModel.from_weights(source, ranker.config.depths)
        return cls(ranker, DatasetIndex.build(ranker.config, dataset, vocabularies), calibration, gain)

    def source(self) -> MemorySource:
        """Return the groups and documents that serve this model."""
        source = export_source(
            self.ranker, self.index.vocabularies, self.index.catalog, self.calibration, traffic=self.index.reads
        )
        if self.gain is not None:
            source.groups[GROUP] = self.gain.tensors()
        return source
