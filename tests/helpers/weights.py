"""Random weights for tests, made once a process: the golden request of a version takes a tenth of a second."""

from __future__ import annotations

import copy
import functools

from models import random_weights as made
from models.config import RankerConfig
from models.random_weights import TINY
from models.source import MemorySource


def random_weights(
    config: RankerConfig = TINY,
    num_items: int = 40,
    num_users: int = 20,
    seed: int = 0,
    version: str = "random",
    *,
    golden: bool = True,
) -> MemorySource:
    """Return what ``models.random_weights`` does, a copy that the test may change."""
    source = _once(config.model_dump_json(), num_items, num_users, seed, version, golden)
    return copy.deepcopy(source)


@functools.cache
def _once(config: str, num_items: int, num_users: int, seed: int, version: str, golden: bool) -> MemorySource:
    return made.random_weights(
        RankerConfig.model_validate_json(config), num_items, num_users, seed, version, golden=golden
    )
