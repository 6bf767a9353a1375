"""The router's part of a weights version that follows its deltas; numpy only."""

from __future__ import annotations

from models.config import RankerConfig
from models.routing import GROUP, GainModel
from models.updates.live import LiveConfig, LiveState
from models.updates.series import LiveSeries
from models.updates.source import LiveSource, live_weights
from shared.errors import WeightsError
from shared.weights import WeightReader
from shared.weights.delta_log import DeltaLog


def gain_series(reader: WeightReader, log: DeltaLog, config: LiveConfig) -> LiveSeries[GainModel] | None:
    """Return the gain model of a version and its deltas; None where the version has none.

    Args:
        reader: The version.
        log: Its deltas.
        config: Limits of the updates.

    Raises:
        WeightsError: the gain model is of another form.
    """
    if GROUP not in reader.groups():
        return None
    depths = RankerConfig.model_validate(reader.json("model")).depths

    def build(state: LiveState, before: LiveState | None) -> GainModel:
        if before is not None and not state.differs(before, GROUP):
            model: GainModel = before.built
            return model
        found = GainModel.from_weights(LiveSource(reader, state), depths)
        if found is None:
            raise WeightsError(f"weights {state.stamp} have no gain model", version=state.stamp, file=GROUP)
        return found

    weights = live_weights(reader, [GROUP], config, build=build)
    return LiveSeries(weights, log, lambda state: state.built)
