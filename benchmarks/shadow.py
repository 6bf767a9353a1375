"""What the speculative cache must hold and answer, kept again in plain Python from what the answers said.

Written without a look at the service: pairs in a dictionary, aggregates by a loop. ``verify`` fills it with what the
oracle computes for the candidates that an answer promises to precompute, and then knows every later hit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.schema.api import RankResponse
from shared.schema.speculative import HitLevel


@dataclass(frozen=True, slots=True)
class Pair:
    """One stored embedding.

    Args:
        vector: float32 [E].
        as_of_s: Request time that it was made for.
    """

    vector: npt.NDArray[np.float32]
    as_of_s: int


@dataclass(slots=True)
class ShadowCache:
    """The embeddings of one user.

    Args:
        groups: Candidate key -> ad group, from the weights' catalog; missing or 0: no group.
        width: E.
    """

    groups: Mapping[int, int]
    width: int
    _pairs: dict[int, Pair] = field(default_factory=dict)

    def fill(self, keys: Sequence[int], vectors: npt.NDArray[np.float32], as_of_s: int) -> None:
        """Store embeddings of candidates: float32 [K, E]; a later one of the same candidate replaces the earlier."""
        for key, vector in zip(keys, vectors, strict=True):
            self._pairs[key] = Pair(vector, as_of_s)

    def lookup(self, keys: Sequence[int], as_of_s: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int8]]:
        """Return vector and level of each of C candidates: float32 [C, E], int8 [C]."""
        live = {key: pair for key, pair in self._pairs.items() if pair.as_of_s <= as_of_s}
        members: dict[int, list[npt.NDArray[np.float32]]] = {}
        for key, pair in live.items():
            if group := self.groups.get(key, 0):
                members.setdefault(group, []).append(pair.vector)
        vectors = np.zeros((len(keys), self.width), np.float32)
        levels = np.zeros(len(keys), np.int8)
        for position, key in enumerate(keys):
            group = self.groups.get(key, 0)
            if key in live:
                vectors[position], levels[position] = live[key].vector, HitLevel.EXACT
            elif group in members:
                vectors[position] = np.mean(np.stack(members[group]).astype(np.float64), axis=0)
                levels[position] = HitLevel.USER_AGGREGATE
        return vectors, levels


def promised_ids(response: RankResponse, candidates_max: int) -> list[int | str]:
    """Return the candidates whose embeddings are computed after this answer, best first.

    They are the first ``candidates_max`` of those that the full pass scored without an exact hit; none when a part of
    the answer was replaced.
    """
    if response.degraded:
        return []
    wanted = [each.id for each in response.candidates if each.scored_by == "full" and each.speculative != "exact"]
    return wanted[:candidates_max]
