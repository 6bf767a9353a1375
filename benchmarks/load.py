"""Load generators with outcomes: closed loop (clients that wait) and open loop (arrivals that do not).

A closed-loop latency is the time of an answer when the client waits for it before asking again: it says little about
latency under load, since a slow server slows its own arrivals. Under an open loop requests are due at fixed times
whatever became of the earlier ones, and latency counts from the due time, so waiting behind a slow answer shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from shared.clock import Clock

AnswerT = TypeVar("AnswerT")
Send: TypeAlias = Callable[[int], Awaitable[AnswerT]]


@dataclass(frozen=True, slots=True)
class Sample(Generic[AnswerT]):
    """One request of a load.

    Args:
        index: Its number, from 0.
        due_s: When it was to be sent, seconds since the load began.
        sent_s: When it was sent.
        done_s: When its answer (or failure) was there.
        answer: What ``send`` returned; None when it was never sent because too many were in flight.
    """

    index: int
    due_s: float
    sent_s: float
    done_s: float
    answer: AnswerT | None

    @property
    def latency_ms(self) -> float:
        """Milliseconds from the due time to the answer."""
        return (self.done_s - self.due_s) * 1e3

    @property
    def late_ms(self) -> float:
        """Milliseconds by which the generator itself was late; large values mean the client is the bottleneck."""
        return (self.sent_s - self.due_s) * 1e3


@dataclass(frozen=True, slots=True)
class Load(Generic[AnswerT]):
    """What a load generator saw.

    Args:
        samples: Every request, by number.
        duration_s: From the first due time to the last answer.
    """

    samples: list[Sample[AnswerT]]
    duration_s: float

    @property
    def answers_per_s(self) -> float:
        """Answers a second over the whole load."""
        answered = sum(sample.answer is not None for sample in self.samples)
        return answered / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def num_not_sent(self) -> int:
        """Arrivals that found the client's own in-flight bound reached."""
        return sum(sample.answer is None for sample in self.samples)

    def latencies_ms(self) -> list[float]:
        """Return the latencies of the answered requests, milliseconds."""
        return [sample.latency_ms for sample in self.samples if sample.answer is not None]


async def closed_loop(send: Send[AnswerT], num_clients: int, num_requests: int, clock: Clock) -> Load[AnswerT]:
    """Let ``num_clients`` clients send ``num_requests`` requests in all, each client one at a time.

    Args:
        send: Sends request number i and returns its answer; failures must be answers too, an exception ends the load.
        num_clients: At least 1.
        num_requests: At least 1.
        clock: Measures.
    """
    if num_clients < 1 or num_requests < 1:
        raise ValueError(f"num_clients and num_requests must be at least 1, are {num_clients} and {num_requests}")
    samples: list[Sample[AnswerT]] = []
    began_s = clock.monotonic_s()
    numbers = iter(range(num_requests))

    async def client() -> None:
        for index in numbers:
            sent_s = clock.monotonic_s() - began_s
            answer = await send(index)
            samples.append(Sample(index, sent_s, sent_s, clock.monotonic_s() - began_s, answer))

    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(client())
    return _load(samples)


async def open_loop(
    send: Send[AnswerT], rate_per_s: float, duration_s: float, in_flight_max: int, clock: Clock
) -> Load[AnswerT]:
    """Send requests at a fixed rate for a time, whether or not earlier ones were answered, then wait for the rest.

    Args:
        send: See ``closed_loop``.
        rate_per_s: Arrivals a second, evenly spaced, above 0.
        duration_s: Time over which requests are due; ``rate_per_s * duration_s`` of them, at least 1.
        in_flight_max: Bound on unanswered requests; an arrival above it is not sent, and counted.
        clock: Measures and waits.
    """
    num_requests = int(rate_per_s * duration_s)
    if num_requests < 1 or in_flight_max < 1:
        raise ValueError(
            f"rate * duration and in_flight_max must be at least 1, are {num_requests} and {in_flight_max}"
        )
    samples: list[Sample[AnswerT]] = []
    running: set[asyncio.Task[None]] = set()
    began_s = clock.monotonic_s()

    async def one(index: int, due_s: float) -> None:
        sent_s = clock.monotonic_s() - began_s
        answer = await send(index)
        samples.append(Sample(index, due_s, sent_s, clock.monotonic_s() - began_s, answer))

    async with asyncio.TaskGroup() as group:
        for index in range(num_requests):
            due_s = index / rate_per_s
            await clock.sleep_s(due_s - (clock.monotonic_s() - began_s))
            if len(running) >= in_flight_max:
                now_s = clock.monotonic_s() - began_s
                samples.append(Sample(index, due_s, now_s, now_s, None))
                continue
            task = group.create_task(one(index, due_s))
            running.add(task)
            task.add_done_callback(running.discard)
    return _load(samples)


def _load(samples: list[Sample[AnswerT]]) -> Load[AnswerT]:
    samples.sort(key=lambda sample: sample.index)
    return Load(samples, max(sample.done_s for sample in samples) - min(sample.due_s for sample in samples))
