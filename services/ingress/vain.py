"""Tells admission while a request waits in vain: for nothing but replicas that answer nobody.

Such a request does no work and takes no capacity from others. Counted as work, the wait for a silent station's limit
would make the mesh look slow, and admission would refuse what can be answered without that station.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable

from services.ingress.admission import Place
from services.ingress.leg import LOOK_S, Leg
from shared.clock import Clock


async def rest_in_vain(running: Callable[[], Iterable[Leg]], place: Place, clock: Clock) -> None:
    """Let a request's place rest whenever it waits in vain, until cancelled.

    Calls that no replica has yet, such as those that wait for the features, are not what the request waits for.

    Args:
        running: Returns the calls that have not ended.
        place: Of the request.
        clock: Time.
    """
    while True:
        await clock.sleep_s(LOOK_S)
        legs = list(running())
        while _patience_s(legs) <= 0:
            place.rest()
            await asyncio.wait([leg.watcher for leg in legs], return_when=asyncio.FIRST_COMPLETED)
            place.work()
            legs = list(running())


def _patience_s(legs: Iterable[Leg]) -> float:
    known = [each for leg in legs if (each := leg.patience_s) < math.inf]
    return max(known, default=math.inf)
