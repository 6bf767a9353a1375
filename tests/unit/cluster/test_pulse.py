"""A part that does not answer is silent for ever longer, whether asking fails or hangs."""

from __future__ import annotations

import threading

import pytest

from cluster.pulse import Pulse
from shared.clock import SystemClock


class HandClock(SystemClock):
    """Shows the time that it was set to."""

    now = 100.0

    def monotonic_s(self) -> float:
        return self.now


class Part:
    """Answers, fails or hangs."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.fails = False
        self.hang = threading.Event()
        self.hang.set()

    def __call__(self) -> None:
        self.asked.release()
        self.hang.wait()
        if self.fails:
            raise RuntimeError("no answer")


def asked_twice(part: Part) -> None:
    for _ in range(2):
        assert part.asked.acquire(timeout=5)


def test_an_answer_ends_the_silence_and_a_failure_does_not() -> None:
    part, clock = Part(), HandClock()
    pulse = Pulse(part, clock, period_s=0.001)
    pulse.start()
    try:
        clock.now = 110.0
        asked_twice(part)
        asked_twice(part)
        assert pulse.silence_s == 0
        part.fails = True
        asked_twice(part)
        clock.now = 150.0
        asked_twice(part)
        assert pulse.silence_s == pytest.approx(40)
    finally:
        pulse.stop()


def test_a_question_that_hangs_is_silence() -> None:
    part, clock = Part(), HandClock()
    part.hang.clear()
    pulse = Pulse(part, clock, period_s=0.001)
    pulse.start()
    assert part.asked.acquire(timeout=5)
    clock.now = 130.0
    assert pulse.silence_s == 30
    pulse.stop()
    part.hang.set()
