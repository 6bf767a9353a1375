"""Speculative embeddings in a Redis-protocol store: one hash a (namespace, model, weights version, user).

A field is a candidate's key, its value one fixed-size record. The whole hash is bounded and small (512 pairs of width
16: 50 KB), so a look-up reads all of it in one round trip and finds exact pairs and the aggregate over an ad group in
the same bytes. An embedding of another weights version is in another hash: it cannot be read by mistake. One of another
state of the same version, with more or fewer deltas, takes the same place and says which: it is not read either.

A user who is forgotten leaves a mark for as long as an embedding may live, beside the hashes of all versions. Nothing
that was written before it, or so shortly after that it may have begun before, is read: of no version, also of one that
this replica does not hold now and a roll-back brings again.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
from redis.exceptions import RedisError

from services.speculative.config import SpeculativeConfig
from shared.clock import Clock
from shared.errors import StoreUnavailableError
from shared.hashing import EntityId, store_token
from shared.schema.speculative import PrecomputedBatch
from shared.weights.deltas import parse_stamp

Records = npt.NDArray[np.void]


class HashClient(Protocol):
    """What is used of ``redis.asyncio.Redis`` (bytes in, bytes out)."""

    def hvals(self, name: str) -> Awaitable[list[bytes]]:
        """Return the values of a hash."""
        ...

    def hdel(self, name: str, *keys: bytes) -> Awaitable[int]:
        """Delete fields of a hash."""
        ...

    def pipeline(self, transaction: bool = True) -> Any:
        """Return a pipeline."""
        ...


def record_type(width: int, vector_dtype: str) -> np.dtype[np.void]:
    """Return the layout of one stored embedding, little-endian, without padding."""
    vector = {"float16": "<f2", "float32": "<f4"}[vector_dtype]
    numbers = [(name, "<i8") for name in ("key", "group", "as_of_s", "written_s", "sequence")]
    fields = [*numbers, ("vector", vector, (width,))]
    return cast(np.dtype[np.void], np.dtype(cast(Any, fields)))


class EmbeddingStore:
    """Reads and writes the embeddings of one user at a time.

    Args:
        client: A ``redis.asyncio`` client that does not decode responses.
        config: Names, bounds and layout.
        version: Stamp of the weights; its version is part of every key, the number of its last delta of every record.
        clock: Wall clock for the time to live.
    """

    def __init__(self, client: HashClient, config: SpeculativeConfig, version: str, clock: Clock) -> None:
        self._client = client
        self._config = config
        self._version, self._sequence = parse_stamp(version)
        self._clock = clock
        self._type = record_type(config.width, config.vector_dtype)

    @property
    def width(self) -> int:
        """E of the weights version."""
        return self._config.width

    def key(self, user: EntityId) -> str:
        """Return the store key of a user's hash; the braces keep it on one node of a cluster."""
        config = self._config
        return f"{config.namespace}:spec:{config.model_namespace}:{self._version}:{{{store_token(user)}}}"

    def mark_key(self, user: EntityId) -> str:
        """Return the store key of the mark of a user who was forgotten, on the same node of a cluster."""
        config = self._config
        return f"{config.namespace}:spec:{config.model_namespace}:{{{store_token(user)}}}:forgotten"

    async def read(self, user: EntityId, as_of_s: int) -> Records:
        """Return a user's live embeddings that were made for ``as_of_s`` or earlier, by ascending candidate key.

        Raises:
            StoreUnavailableError: the store cannot be reached.
        """
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.hvals(self.key(user))
                pipe.hvals(self.mark_key(user))
                values, mark = await pipe.execute()
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error
        records = self._parse(values)
        oldest_s = int(self._clock.now_s()) - self._config.ttl_s
        live = (records["as_of_s"] <= as_of_s) & (records["written_s"] > max(oldest_s, self._taken_after_s(mark)))
        live &= records["sequence"] == self._sequence
        live &= np.isfinite(records["vector"]).all(axis=1)
        records = records[live]
        return records[np.argsort(records["key"], kind="stable")]

    async def write(self, user: EntityId, batch: PrecomputedBatch) -> int:
        """Store the embeddings of a batch; writing the same batch again changes nothing.

        Returns:
            Embeddings stored: none of a user who has just been forgotten.

        Raises:
            StoreUnavailableError: the store cannot be reached.
        """
        with np.errstate(over="ignore"):  # too large for the stored type: infinite, and left out below
            finite = np.isfinite(batch.vectors.astype(self._type["vector"].base)).all(axis=1)
        records = np.zeros(int(finite.sum()), self._type)
        records["key"] = batch.candidate_keys[finite]
        records["group"] = batch.group_keys[finite]
        records["as_of_s"] = batch.as_of_s
        records["written_s"] = int(self._clock.now_s())
        records["sequence"] = self._sequence
        records["vector"] = batch.vectors[finite]
        records = records[-self._config.pairs_per_user_max :]
        if len(records) == 0:
            return 0
        mapping = {_field(key): record.tobytes() for key, record in zip(records["key"].tolist(), records, strict=True)}
        key = self.key(user)
        try:
            if self._clock.now_s() <= self._taken_after_s(await self._client.hvals(self.mark_key(user))):
                return 0
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.hset(key, mapping=mapping)
                pipe.expire(key, self._config.ttl_s)
                pipe.hlen(key)
                num_held = int((await pipe.execute())[2])
            if num_held > self._config.pairs_per_user_max:
                await self._trim(key)
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error
        return len(records)

    async def forget(self, user: EntityId) -> bool:
        """Delete a user's embeddings of this version, and mark those of all versions as not to be read.

        Returns:
            Whether there were any of this version.

        Raises:
            StoreUnavailableError: the store cannot be reached.
        """
        mark = self.mark_key(user)
        try:
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.unlink(self.key(user))
                pipe.hset(mark, mapping={b"at_s": b"%d" % math.ceil(self._clock.now_s())})
                pipe.expire(mark, self._config.ttl_s + self._config.forget_margin_s)
                return bool((await pipe.execute())[0])
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error

    def _taken_after_s(self, mark: list[bytes]) -> int:
        """Return the second after which what is written of a user counts; -1 where there is no mark."""
        return int(mark[0]) + self._config.forget_margin_s if mark else -1

    async def _trim(self, key: str) -> None:
        """Delete what is over the bound, oldest request time first; two trims at once delete the same fields."""
        records = self._parse(await self._client.hvals(key))
        num_over = len(records) - self._config.pairs_per_user_max
        if num_over > 0:
            order = np.lexsort((records["key"], records["written_s"], records["as_of_s"]))
            await self._client.hdel(key, *(_field(number) for number in records["key"][order[:num_over]].tolist()))

    def _parse(self, values: list[bytes]) -> Records:
        """Return the records of the right size; a value of another size is another layout's and is not read."""
        size = self._type.itemsize
        return np.frombuffer(b"".join(value for value in values if len(value) == size), self._type)


def _field(key: int) -> bytes:
    return b"%d" % key


def _unavailable(error: Exception) -> StoreUnavailableError:
    return StoreUnavailableError(f"speculative store: {type(error).__name__}: {error}", stage="speculative")
