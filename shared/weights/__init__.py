"""One set of weights, from publish to replica: versions in a store, each a folder that its manifest seals.

``WeightStore`` lists and opens versions, ``WeightWriter`` makes one, ``WeightReader`` hands out verified tensors,
``ParallelLoader`` brings one to local disk.
"""

from shared.weights.loader import LoadConfig, LoadProgress, ParallelLoader, load_version
from shared.weights.manifest import Derivation, Manifest
from shared.weights.reader import WeightReader
from shared.weights.store import WeightStore
from shared.weights.writer import WeightWriter

__all__ = [
    "Derivation",
    "LoadConfig",
    "LoadProgress",
    "Manifest",
    "ParallelLoader",
    "WeightReader",
    "WeightStore",
    "WeightWriter",
    "load_version",
]
