"""A log that is damaged, or of another release, is refused with its user's name, and holds up nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from shared.clock import ManualClock
from shared.errors import DamagedLogError, StoreUnavailableError
from shared.schema.api import Event
from shared.userlog import AppendResult, BufferConfig, BufferedUserLog, HistoryQuery, RedisUserLog, UserLog
from shared.userlog.client import StoreClient, is_about_the_log
from tests.helpers.faulty import Fault, FaultyService

MakeEvent = Callable[..., Event]

LATER = 2**40


async def damage(client: Any, namespace: str, how: str) -> None:
    """Damage the log of user 1, which has events."""
    key = f"{namespace}:{{i1}}:log2"
    if how == "block":
        await client.lset(key, -1, b"xx")
    elif how == "version":
        await client.lset(key, 0, b"\x09" + 16 * b"\x00")
    elif how == "empty meta data":
        await client.lset(key, 0, b"")
    else:
        await client.delete(key)
        await client.set(key, b"text")


HOW = pytest.mark.parametrize("how", ["block", "version", "empty meta data", "no list"])


@HOW
async def test_others_are_written_and_the_user_is_named(
    client: StoreClient, redis_log: RedisUserLog, namespace: str, event: MakeEvent, how: str
) -> None:
    await redis_log.append([event("a", 1)])
    await damage(client, namespace, how)
    with pytest.raises(DamagedLogError, match="append to user log: the log of i1 cannot be used") as caught:
        await redis_log.append([event("b", 2), event("c", 3), event("b", 2, user=2), event("b", 2, user="x")])
    assert caught.value.context == {"users": "i1", "value": 1, "num_events": 2}
    others = await redis_log.read_many([HistoryQuery(2, LATER), HistoryQuery("x", LATER)], 9)
    assert [len(history) for history in others] == [1, 1]
    with pytest.raises(DamagedLogError, match="read user log: the log of i1 cannot be used"):
        await redis_log.read(1, LATER, 9)
    assert await redis_log.delete(1)  # the way out
    assert await redis_log.append([event("b", 2)]) == AppendResult(appended=1)


@HOW
async def test_it_is_not_waited_for(
    client: StoreClient, redis_log: RedisUserLog, namespace: str, event: MakeEvent, how: str
) -> None:
    """Else it would hold up all users' events for ever, and fill the buffer."""
    await redis_log.append([event("a", 1)])
    await damage(client, namespace, how)
    lost: list[DamagedLogError] = []
    clock = ManualClock()
    door = FaultyService(redis_log, clock)
    log = BufferedUserLog(cast(UserLog, door), BufferConfig(retry_interval_ms=10), clock, lost.append)
    with pytest.raises(DamagedLogError):
        await log.append([event("b", 2)])
    assert log.num_buffered == 0
    assert await log.append([event("b", 2, user=2)]) == AppendResult(appended=1)

    door.plan("append", Fault(StoreUnavailableError("an outage")))
    assert await log.append([event("c", 3), event("c", 3, user=2)]) == AppendResult(buffered=2)
    await log.flush()
    assert log.num_buffered == 0
    assert [error.context["num_events"] for error in lost] == [1]
    assert len(await log.read(2, LATER, 9)) == 2
    await log.aclose()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ResponseError("user_script:69: user log is damaged: a block of 2 bytes script: on @user_script:69."), True),
        (ResponseError("Error running script (call to f_0): @user_script:9: user_script:9: user log is damaged"), True),
        (ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"), True),
        (ResponseError("MISCONF Errors writing to the AOF file: script: 0a, on @user_script:226."), False),
        (ResponseError("Error running script (call to f_0): @user_script:9: -MISCONF Errors writing"), False),
        (ResponseError("user_script:9: Script killed by user with SCRIPT KILL"), False),
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'. script: on @user_script:2."), False),
        (RedisError("user_script:69: no answer of a server"), False),
    ],
)
def test_what_is_about_one_log_and_what_about_the_store(error: RedisError, expected: bool) -> None:
    assert is_about_the_log(error) is expected
