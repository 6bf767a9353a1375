"""Networks whose answers are known in advance: a value is a sum of numbers that name what went into it.

Every part is a whole number drawn from (version, part, ids), so that an answer made with another user's state, another
version's row or somebody else's embedding has another value than the one that is computed here from the outside.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt

from models.config import OBJECTIVES
from models.history import EncodedHistory
from models.stations import EncodedRequest
from shared.schema.embeddings import EmbeddingRows
from shared.schema.features import FeatureBatch, PreprocessTask
from shared.schema.ranking import RankedList, RankTask
from shared.schema.speculative import PrecomputedBatch, SpeculativeEmbeddings, SpeculativeTask
from shared.schema.stamp import Stamp
from shared.schema.user import UserHistory, UserState
from shared.weights.deltas import parse_stamp, version_stamp
from shared.wire import BatchLimits, decode_batch

WIDTH = 2
HISTORY_LENGTH = 20
COLD = -1
"""Number of the user whom nobody knows."""

_STATES_MAX = 1_000
_LIMITS = BatchLimits(1_000, 8, 64)


def part(version: str, name: str, *ids: int) -> int:
    """Return the number of one part, below 4,096: a float32 holds the sum of any few of them exactly."""
    return zlib.crc32(f"{version}/{name}/{ids}".encode()) & 4_095


def value_of(version: str, user: int, length: int, key: int, shards: Sequence[int]) -> int:
    """Return what a candidate is worth, from the outside.

    Args:
        version: Weights.
        user: Whose state went into it, ``COLD`` for none.
        length: Events that the state was made of.
        key: The candidate.
        shards: Whose rows went into it.
    """
    return part(version, "user", user, length, key) + sum(part(version, "row", shard, key) for shard in shards)


def number_of(stamp: str) -> int:
    """Return the number that stands for a state of the weights in tensors."""
    base, sequence = parse_stamp(stamp)
    return int(base.removeprefix("v")) * _STATES_MAX + sequence


def stamp_of(number: int) -> str:
    """Return the state that a number stands for."""
    base, sequence = divmod(number, _STATES_MAX)
    return version_stamp(f"v{base}", sequence)


class KnownExtractor:
    """Preprocess.

    Args:
        replica: Name.
    """

    def __init__(self, replica: str) -> None:
        self._replica = replica

    def extract(self, task: PreprocessTask) -> FeatureBatch:
        """Return the candidates without any feature."""
        keys = decode_batch(task.block, _LIMITS).keys
        stamp = Stamp(task.request_id, task.version, "preprocess", self._replica, 0.1)
        return FeatureBatch(stamp, keys, np.zeros_like(keys), {}, {}, np.zeros((len(keys), 0), np.float32), {})


class KnownRows:
    """The rows of one shard.

    Args:
        version: Weights.
        shard: Which.
    """

    num_bytes: dict[str, int]

    def __init__(self, version: str, shard: int) -> None:
        self._version = version
        self._shard = shard
        self.num_bytes = {}

    def lookup(self, features: FeatureBatch) -> dict[str, npt.NDArray[np.float32]]:
        """Return one number a candidate."""
        numbers = [part(self._version, "row", self._shard, key) for key in features.candidate_keys.tolist()]
        return {"item": np.array(numbers, np.float32)[:, None]}


@dataclass(frozen=True, slots=True)
class KnownHistory:
    """What a replica keeps of a user between requests: whose it is, of which weights, and of what it was made.

    Args:
        version: Number of the state of the weights.
        user: The user.
        length: Events.
    """

    version: int
    user: int
    length: int

    num_bytes: ClassVar[int] = 1_000


class KnownEncoder:
    """The request-only path.

    Args:
        version: Weights.
    """

    history_length = HISTORY_LENGTH
    execution = "simulated"

    def __init__(self, version: str) -> None:
        self._version = number_of(version)

    def encode_from(
        self, known: KnownHistory | None, history: UserHistory, user: int, surface: str, as_of_s: int
    ) -> EncodedRequest:
        """Return numbers of user, version and history, of what is kept where it is of this length.

        A wrong one would show.
        """
        length = len(history)
        made = known if known is not None and known.length == length else KnownHistory(self._version, user, length)
        numbers = {"user": made.user, "version": made.version, "length": made.length}
        tensors = {name: np.array([number], np.float32) for name, number in numbers.items()}
        return EncodedRequest(tensors, cast(EncodedHistory, made), 0 if made is known else length, 0)


class KnownRanker:
    """The candidate path.

    Args:
        version: Weights.
        tier: Which.
        replica: Name.
    """

    def __init__(self, version: str, tier: str, replica: str) -> None:
        self._version = version
        self._tier = tier
        self._replica = replica

    def rank(
        self,
        task: RankTask,
        features: FeatureBatch,
        state: UserState | None,
        spec: SpeculativeEmbeddings | None,
        rows: Sequence[EmbeddingRows | None],
    ) -> RankedList:
        """Order the candidates by their sums, ties by key."""
        keys = features.candidate_keys
        user, version, length = COLD, self._version, 0
        if state is not None:
            user, version = int(state.tensors["user"][0]), stamp_of(int(state.tensors["version"][0]))
            length = int(state.tensors["length"][0])
        values = np.array([part(version, "user", user, length, key) for key in keys.tolist()], np.float32)
        for each in rows:
            if each is not None:
                values += each.rows["item"][:, 0]
        levels = np.zeros(len(keys), np.int8) if spec is None else spec.levels
        if spec is not None:
            values += spec.vectors[:, 0]
        order = np.lexsort((keys, -values))[: task.limit].astype(np.int32)
        upstream = tuple(each.stamp for each in (features, state, spec, *rows) if each is not None)
        return RankedList(
            stamp=Stamp(task.request_id, task.version, f"ranking:{self._tier}", self._replica, 0.1),
            order=order,
            scores=np.stack([values[order] / 2**20] * len(OBJECTIVES), axis=1),
            values=values[order],
            full_pass=np.full(len(order), self._tier == "full"),
            levels=levels[order],
            missing_shards=tuple(shard for shard, each in enumerate(rows) if each is None),
            cold_start=state is None,
            history_degraded="" if state is None else state.degraded,
            history_length=0 if state is None else state.history_length,
            upstream=upstream,
            first_pass_ms=0.1,
            full_pass_ms=0.1,
            num_oov={},
        )


class KnownFoundation:
    """The foundation network.

    Args:
        replica: Name.
    """

    def __init__(self, replica: str) -> None:
        self._replica = replica

    def precompute(
        self, task: SpeculativeTask, positions: npt.NDArray[np.int32], features: FeatureBatch, state: UserState | None
    ) -> PrecomputedBatch:
        """Return the speculative embeddings of some candidates, made of the state that came with them."""
        user = COLD if state is None else int(state.tensors["user"][0])
        keys = features.candidate_keys[positions]
        vectors = np.zeros((len(keys), WIDTH), np.float32)
        vectors[:, 0] = [part(task.version, "spec", user, key) for key in keys.tolist()]
        stamp = Stamp(task.request_id, task.version, "foundation", self._replica, 0.1)
        return PrecomputedBatch(stamp, keys, features.group_keys[positions], vectors, task.as_of_s)
