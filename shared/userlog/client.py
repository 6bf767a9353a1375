"""One bounded client of the Redis-protocol store, shared by the user log and the speculative store."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import Field
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from shared.config import Config
from shared.errors import ConfigError, StoreUnavailableError
from shared.log import redact_text

ResultT = TypeVar("ResultT")
StoreClient: TypeAlias = Redis | RedisCluster


class StoreConfig(Config):
    """Where the store is and how much of it one process may use.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``; user, password and database of every server of a cluster or of
            Sentinel come from it too.
        topology: ``single`` server, ``cluster``, or ``sentinel``.
        sentinels: ``host:port`` of each Sentinel.
        sentinel_service: Name by which Sentinel knows the primary.
        connections_max: Connections of this process (for a cluster: to each node).
        pool_wait_ms: How long a command waits for a free connection.
        connect_timeout_ms: How long opening a connection may take.
        io_timeout_ms: How long one write or read may take.
        retries: How often a command is sent again after the connection broke; every command of ours may be.
    """

    url: str = "redis://127.0.0.1:6379/0"
    topology: Literal["single", "cluster", "sentinel"] = "single"
    sentinels: tuple[Annotated[str, Field(pattern=r"^[^:\s]+:\d{1,5}$")], ...] = ()
    sentinel_service: str = "mymaster"
    connections_max: int = Field(32, ge=1, le=10_000)
    pool_wait_ms: int = Field(500, ge=1)
    connect_timeout_ms: int = Field(500, ge=1)
    io_timeout_ms: int = Field(1_000, ge=1)
    retries: int = Field(1, ge=0, le=10)


def connect(config: StoreConfig) -> StoreClient:
    """Return a client; it connects on first use, and ``await client.aclose()`` ends it.

    Raises:
        ConfigError: the URL cannot be used, or Sentinel is chosen and none is named.
    """
    options: dict[str, Any] = {
        "socket_connect_timeout": config.connect_timeout_ms / 1e3,
        "socket_timeout": config.io_timeout_ms / 1e3,
        "protocol": 2,  # both answers of the scripts are the same in 2 and 3, and 3 has a longer handshake
    }
    # Only a broken connection is tried again: after a timeout the store is slow, a second try would double the wait.
    retry = Retry(NoBackoff(), config.retries, supported_errors=(RedisConnectionError,))
    try:
        if config.topology == "cluster":
            return RedisCluster.from_url(config.url, max_connections=config.connections_max, retry=retry, **options)
        pool = BlockingConnectionPool.from_url(
            config.url,
            max_connections=config.connections_max,
            timeout=config.pool_wait_ms / 1e3,
            retry=retry,
            **options,
        )
        if config.topology == "single":
            return Redis.from_pool(pool)
        return _behind_sentinel(config, pool.connection_kwargs)
    except (ValueError, RedisError) as error:
        raise ConfigError(
            f"store url {redact_text(config.url)} cannot be used: {redact_text(str(error))}",
            field="url",
            value=redact_text(config.url),
        ) from error


def _behind_sentinel(config: StoreConfig, options: dict[str, Any]) -> Redis:
    if not config.sentinels:
        raise ConfigError("sentinels must name at least one host:port", field="sentinels", value="")
    addresses = [(host, int(port)) for host, port in (address.rsplit(":", 1) for address in config.sentinels)]
    # Else the client's own defaults apply: several tries with pauses that add up to seconds.
    limits = {name: options[name] for name in ("socket_connect_timeout", "socket_timeout", "retry")}
    secure = {"ssl": True} if config.url.startswith("rediss://") else {}
    sentinel = Sentinel(addresses, sentinel_kwargs={**limits, **secure})  # type: ignore[no-untyped-call]
    options = {**secure, **{name: value for name, value in options.items() if name not in ("host", "port")}}
    client: Redis = sentinel.master_for(
        config.sentinel_service, redis_class=_SentinelRedis, max_connections=config.connections_max, **options
    )
    return client


class _SentinelRedis(Redis):
    """Also closes the connections to the Sentinels, which the client of the primary leaves open."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        for one in self.connection_pool.sentinel_manager.sentinels:  # type: ignore[attr-defined]
            await one.aclose()


_OWN_ERROR = re.compile(r"WRONGTYPE |(?<!@)user_script:\d+: (?!Script killed)")
"""How a server begins what a script of ours says itself, or what it says of a key that is no list: not what it refuses
everybody (no memory, read only, loading), which names the line of the script at its end, or after an ``@``."""


def is_about_the_log(error: RedisError) -> bool:
    """Return whether a refusal is about what lies in one user's log, and so would come again, for nobody else."""
    return type(error) is ResponseError and _OWN_ERROR.search(str(error)) is not None


async def guard(work: Awaitable[ResultT], timeout_ms: float, action: str) -> ResultT:
    """Await a command of the store for at most ``timeout_ms``, pool wait and connecting included.

    A cancelled command is safe: the client closes its connection, so its late answer cannot reach the next caller.

    Raises:
        StoreUnavailableError: the time ran out, the store cannot be reached, or it refuses.
    """
    try:
        async with asyncio.timeout(timeout_ms / 1e3):
            return await work
    except TimeoutError as error:
        message = f"{action}: the store did not answer within {timeout_ms:.0f} ms"
        raise StoreUnavailableError(message, timeout_ms=timeout_ms) from error
    except (RedisError, RedisClusterException, OSError) as error:  # the cluster's error is none of RedisError
        raise StoreUnavailableError(f"{action}: {type(error).__name__}: {redact_text(str(error))}") from error
