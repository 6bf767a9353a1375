"""Which requests ``verify`` sends: every mix of size, history, wire form, tier, limit, alone and at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.cases import HISTORY_KINDS, HistoryKind
from benchmarks.client import WIRES, Wire

SIZES = (20, 200, 1000)
AT_ONCE = 16
LIGHT_EVERY = 5
UNLIMITED_EVERY = 3


@dataclass(frozen=True, slots=True)
class Trial:
    """One request to send.

    Args:
        number: Case number, from 0.
        size: Candidates C.
        kind: How long the history is.
        wire: Form of request and answer.
        at_once: Whether it goes with others at the same time or alone.
        tier: ``auto`` or a forced tier.
        limit: Candidates to return, None: the deployment's default.
    """

    number: int
    size: int
    kind: HistoryKind
    wire: Wire
    at_once: bool
    tier: str
    limit: int | None

    @property
    def cell(self) -> str:
        """What the trial stands for, for messages and tables."""
        return f"{self.size} {self.kind} {self.wire} {'at once' if self.at_once else 'alone'} {self.tier}"


def trial_plan(num_trials: int, sizes: Sequence[int] = SIZES) -> list[Trial]:
    """Return trials that go through all sizes, histories and wire forms evenly, first half alone, second half at once.

    The tier and the limit vary with periods that share no factor with the rest, so that all combinations come up.

    Args:
        num_trials: At least 1.
        sizes: Numbers of candidates.

    Raises:
        ValueError: ``num_trials`` is under 1.
    """
    if num_trials < 1:
        raise ValueError(f"num_trials must be at least 1, is {num_trials}")
    cells = list(product(WIRES, HISTORY_KINDS, sizes))
    num_alone = (num_trials + 1) // 2
    plan = []
    for number in range(num_trials):
        within = number if number < num_alone else number - num_alone
        wire, kind, size = cells[within % len(cells)]
        turn = within + within // len(cells)
        plan.append(
            Trial(
                number=number,
                size=size,
                kind=kind,
                wire=wire,
                at_once=number >= num_alone,
                tier="light" if turn % LIGHT_EVERY == LIGHT_EVERY - 1 else "auto",
                limit=size if turn % UNLIMITED_EVERY == 0 else None,
            )
        )
    return plan
