"""Weights that change while they serve: each reader sees one state of a version and its deltas, whole, never a mix."""

from models.updates.arena import RowArena
from models.updates.live import LiveConfig, LiveState, LiveWeights, UpdateStatus
from models.updates.source import LiveSource, held_rows, live_weights

__all__ = [
    "LiveConfig",
    "LiveSource",
    "LiveState",
    "LiveWeights",
    "RowArena",
    "UpdateStatus",
    "held_rows",
    "live_weights",
]
