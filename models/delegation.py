"""Small-parameter delegation: which parameters are replicated, which are sharded.

A small parameter costs a collective its latency, not its bytes: it is cheaper to hold it everywhere than to gather it.
Training and serving use the same rule: what is replicated is all-reduced in one bucket, and lies whole on every device.

Source: the "small parameter delegation", from FSDP to DDP, of Meta's Adaptive Ranking Model blog, which gives no
threshold; this one is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from models.config import RankerConfig
from models.embedding.tables import table_weight
from models.source import WeightSource
from models.stations import DENSE_GROUP

THRESHOLD = 64 * 1024
"""Elements from which a parameter is sharded: 256 KiB in float32."""


@dataclass(frozen=True, slots=True)
class Delegation:
    """A partition of parameters by size.

    Args:
        threshold: Elements from which a parameter is sharded.
        replicated: Names of the smaller ones.
        sharded: Names of the others.
        num_replicated: Elements of the smaller ones together.
        num_sharded: Elements of the others together.
    """

    threshold: int
    replicated: tuple[str, ...]
    sharded: tuple[str, ...]
    num_replicated: int
    num_sharded: int


def delegate(sizes: Mapping[str, int], threshold: int = THRESHOLD) -> Delegation:
    """Partition parameters.

    Args:
        sizes: Name -> elements.
        threshold: Elements from which a parameter is sharded; 0: all are, 2**62: none.

    Raises:
        ValueError: the threshold is negative.
    """
    if threshold < 0:
        raise ValueError(f"threshold must be at least 0, is {threshold}")
    replicated = tuple(name for name, size in sizes.items() if size < threshold)
    sharded = tuple(name for name, size in sizes.items() if size >= threshold)
    return Delegation(
        threshold, replicated, sharded, sum(sizes[name] for name in replicated), sum(sizes[name] for name in sharded)
    )


def delegate_weights(source: WeightSource, threshold: int = THRESHOLD) -> Delegation:
    """Partition a weights version: dense tensors under their own names, tables as ``tables/<name>``."""
    sizes = {name: int(array.size) for name, array in source.tensors(DENSE_GROUP).items()}
    config = RankerConfig.model_validate(source.json("model"))
    sizes |= {f"tables/{table.name}": int(table_weight(source, table.name).size) for table in config.tables}
    return delegate(sizes, threshold)
