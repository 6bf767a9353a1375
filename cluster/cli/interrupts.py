"""Ctrl-C and SIGTERM end a verb in order, once: a second one cannot stop the end half-way."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _unheard(number: int, frame: FrameType | None) -> None:
    """Do nothing; with ``SIG_IGN`` Python prints a traceback about a signal that came together with the first."""


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` in the body at the first of these signals, and ignore them from then on.

    The end that follows has time limits of its own. A signal that is ignored already (a background job's Ctrl-C)
    stays so.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, _unheard)
        # Straight to the terminal: the code below may hold the console's lock.
        os.write(sys.stderr.fileno(), b"\nending, please wait\n")
        raise KeyboardInterrupt

    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
