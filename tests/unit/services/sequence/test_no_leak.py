"""No user state depends on anything at or after the request's time, in whatever order the log got its events.

Nothing else in a rank request reads the user log, so neither does any score.
"""

from __future__ import annotations

import asyncio
import random

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shared.schema.api import Event
from shared.schema.user import UserState
from tests.unit.services.sequence.test_sequence import LENGTH, Rig

NOW_S = 500

EVENTS = st.lists(
    st.tuples(st.integers(450, 550), st.integers(1, 40), st.integers(1, 10)), max_size=40, unique_by=lambda one: one[0]
)


async def states(events: list[tuple[int, int, int]], times: list[int]) -> list[UserState]:
    """Append events to a log and encode the user at each time, then at each again with a warm replica."""
    rig = Rig()
    made = [
        Event(event_id=f"e{time}", user_id=3, item_id=item, weight=halves / 2, timestamp_s=time)
        for time, item, halves in events
    ]
    for half in (made[::2], made[1::2]):
        await rig.service.append(half)
    found = [await rig.service.encode(rig.task(as_of_s=time)) for time in (*times, *times)]
    await rig.service.aclose()
    return found


@settings(max_examples=10, deadline=None, phases=[Phase.reuse, Phase.generate])
@given(events=EVENTS, other=EVENTS, order=st.randoms(use_true_random=False))
def test_another_future_changes_no_state(
    events: list[tuple[int, int, int]], other: list[tuple[int, int, int]], order: random.Random
) -> None:
    past = [event for event in events if event[0] < NOW_S]
    changed = past + [event for event in other if event[0] >= NOW_S]
    order.shuffle(changed)
    # A later request first: what a replica keeps of it must not reach the earlier one.
    times = [NOW_S + 1_000, NOW_S, NOW_S - 20]
    one, two = asyncio.run(states(events, times)), asyncio.run(states(changed, times))
    for number in (1, 2, 4, 5):
        as_of_s = times[number % 3]
        num_earlier = sum(time < as_of_s for time, _, _ in events)
        assert one[number].history_length == two[number].history_length == min(num_earlier, LENGTH)
        assert one[number].last_event_s < as_of_s
        assert one[number].tensors.keys() == two[number].tensors.keys()
        for name, tensor in one[number].tensors.items():
            assert tensor.tobytes() == two[number].tensors[name].tobytes(), name
