"""Preprocess's part of a weights version that follows its deltas; numpy only."""

from __future__ import annotations

from models.embedding import catalog, vocabulary
from models.features import FeatureExtractor
from models.updates.live import LiveConfig, LiveState
from models.updates.series import GOLDEN, LiveSeries
from models.updates.source import LiveSource, live_weights
from services.preprocess.golden import check_golden
from shared.weights import WeightReader
from shared.weights.delta_log import DeltaLog


def extractor_series(reader: WeightReader, log: DeltaLog, config: LiveConfig) -> LiveSeries[FeatureExtractor]:
    """Return vocabulary and catalog of a version, once they have given the golden features.

    Args:
        reader: The version.
        log: Its deltas.
        config: Limits of the updates.

    Raises:
        WeightsError: the weights do not load, or a feature differs.
    """

    def build(state: LiveState, before: LiveState | None) -> FeatureExtractor:
        source = LiveSource(reader, state)
        extractor: FeatureExtractor
        if before is None or state.differs(before, vocabulary.GROUP, catalog.GROUP):
            extractor = FeatureExtractor.from_weights(source)
        else:
            extractor = before.built
        if before is None or state.differs(before, GOLDEN):
            check_golden(extractor, source)
        return extractor

    groups = [vocabulary.GROUP, catalog.GROUP, GOLDEN]
    weights = live_weights(reader, groups, config, build=build, documents=[GOLDEN])
    return LiveSeries(weights, log, lambda state: state.built)
