"""Signals end a verb once."""

from __future__ import annotations

import signal

import pytest

from cluster.cli.interrupts import interrupted_once


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_interrupts_and_the_next_cannot_interrupt_the_end(number: signal.Signals) -> None:
    # A shell starts background jobs with SIGINT ignored, and so may whoever runs these tests.
    original = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(number)
    ended = []

    def body() -> None:
        with interrupted_once():
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)
                ended.append(True)

    try:
        with pytest.raises(KeyboardInterrupt):
            body()
        assert ended == [True]
        assert signal.getsignal(number) is before
    finally:
        signal.signal(signal.SIGINT, original)


def test_two_signals_at_one_moment_are_one_interrupt() -> None:
    """Both wait until they are let through; the second one is not the subject of a traceback."""
    original = signal.signal(signal.SIGINT, signal.default_int_handler)
    both = {signal.SIGINT, signal.SIGTERM}

    def body() -> None:
        with interrupted_once():
            signal.pthread_sigmask(signal.SIG_BLOCK, both)
            try:
                for number in both:
                    signal.raise_signal(number)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, both)

    try:
        with pytest.raises(KeyboardInterrupt):
            body()
    finally:
        signal.signal(signal.SIGINT, original)


def test_a_background_job_goes_on_ignoring_ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupted_once():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
