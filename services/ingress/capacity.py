"""What this replica's requests get done a second, measured, and how long one more would take.

Work is counted in requests: one without candidates is 1, and candidates add to it. The rate is work served over *busy*
time, in which at least one request was in flight, so that a quiet hour says nothing about capacity. By Little's law the
work in flight over that rate is the time until it is served, whatever is the bottleneck behind.

A queue *stands* when that time was never short for a while: it is then no burst that drains, and its length is what
admission lets it be (the reasoning of CoDel, RFC 8289).

The rate is the median of the last windows: a stall of a second, such as a station's death, does not make the mesh
slower than it is, nor some lucky windows faster, and a lasting loss is seen when half of the windows are new. (By the
upper quartile, which a handful of answers a window exceeds by chance, a mesh let in a quarter more than it answered in
time.) Sooner, because answers miss their deadlines: each cut of ``share`` lets less of a budget be spent on waiting,
each answer in time gives a little back.

A request that waits in vain (``services.ingress.vain``) rests: it is not in flight for this measure until it goes on.

What a request was cut in before anything could be answered (its client's budget was too small, its client went away)
says nothing of capacity: it counts as the part of an answer that it had time for, beside those that were in flight with
it. Otherwise budgets that nothing can meet would make a mesh look slow to everybody, or, many at once, quick.

After a stall the windows remember it for seconds. The newest answers know sooner, but are few: they are asked only
where so few requests are in flight that being wrong costs nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from services.ingress.config import AdmissionConfig
from shared.clock import Clock

_CUT, _RAISE = 0.85, 0.003
_CUT_PERIOD_S = 0.25
_SHARE_MIN_RATIO = 0.25
_DRAINED = 0.25
_NUM_ANSWERS, _NUM_NEWEST = 32, 5
_INSTANT_S = 1e-6


@dataclass(frozen=True, slots=True)
class Begun:
    """A request in flight.

    Args:
        work: Its work.
        at_s: When it began, seconds.
        of_work: Work in flight with it, its own included.
    """

    work: float
    at_s: float
    of_work: float


@dataclass(frozen=True, slots=True)
class _Answer:
    seconds: float
    seconds_per_work: float


class Capacity:
    """Measures one replica's requests.

    Args:
        config: Windows and shares.
        clock: Time.
    """

    def __init__(self, config: AdmissionConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._rates: deque[float] = deque(maxlen=config.num_windows)
        self._seen_s = clock.monotonic_s()
        self._busy_s = self._done = 0.0
        self._answers: deque[_Answer] = deque(maxlen=_NUM_ANSWERS)
        self._cut_s = self._drained_s = self._seen_s
        self.share = config.budget_share
        self.in_flight_work = 0.0
        self.num_working = 0

    @property
    def rate(self) -> float | None:
        """Work a second; None until a window is full. Where nothing was served: less than one in all windows."""
        if not self._rates:
            return None
        least = 1.0 / (len(self._rates) * self._config.window_s)
        return max(median(self._rates), least)

    def work_of(self, num_candidates: int) -> float:
        """Return the work of a request."""
        return 1.0 + num_candidates / self._config.candidates_per_work

    @property
    def newest_rate(self) -> float | None:
        """The same by the newest answers alone, where those say more; what several at once got, each counts for."""
        rate = self.rate
        if rate is None or not self._answers:
            return rate
        newest = median(answer.seconds_per_work for answer in list(self._answers)[-_NUM_NEWEST:])
        return max(rate, 1.0 / max(newest, _INSTANT_S))

    def wait_s(self, work: float, rate: float | None = None) -> float | None:
        """Return the seconds until one more request of this work would be answered; None: not known.

        Args:
            work: Its work.
            rate: Work a second; None: ``rate``.
        """
        rate = rate or self.rate
        return None if rate is None else (self.in_flight_work + work) / rate

    @property
    def queue_stands(self) -> bool:
        """Whether there was a queue all the time of late."""
        return not self._is_drained and self._clock.monotonic_s() - self._drained_s >= self._config.standing_s

    @property
    def _is_drained(self) -> bool:
        wait_s = self.wait_s(0.0)
        return wait_s is None or wait_s <= _DRAINED * self.share * self._config.standing_ms_max / 1e3

    def begin(self, work: float) -> Begun:
        """Count a request in."""
        self._advance()
        self._step(1, work)
        return Begun(work, self._seen_s, self.in_flight_work)

    def rest(self, begun: Begun) -> float:
        """Count a request out for as long as it waits in vain; returns since when, monotonic seconds."""
        self._advance()
        self._step(-1, -begun.work)
        return self._seen_s

    def go_on(self, begun: Begun) -> float:
        """Count it in again; returns since when, monotonic seconds."""
        self._advance()
        self._step(1, begun.work)
        return self._seen_s

    def end(self, begun: Begun, *, is_served: bool, rested_s: float = 0.0) -> None:
        """Count a request out.

        Args:
            begun: What ``begin`` returned.
            is_served: Whether it has an answer.
            rested_s: How long it has rested, seconds.
        """
        self._advance()
        self._step(-1, -begun.work)
        took_s = self._seen_s - begun.at_s - rested_s
        if is_served:
            self._done += begun.work
            self._answers.append(_Answer(took_s, took_s / begun.of_work))
            self.share = min(self.share + _RAISE, self._config.budget_share)
        elif self._answers and took_s < (quickest_s := min(answer.seconds for answer in self._answers)):
            # Of several at once each would have taken longer: together they do not get more done than answers did. The
            # lower quartile: an answer whose company left when it came looks quicker than any were.
            of_answers = sorted(answer.seconds_per_work for answer in self._answers)
            at_once_s = begun.of_work * of_answers[len(of_answers) // 4]
            self._done += begun.work * took_s / max(quickest_s, at_once_s)

    def missed(self, predicted_share: float) -> None:
        """Take note of an answer that came late or never.

        Args:
            predicted_share: Share of its budget that it was expected to take. A request that was expected back early
                was failed by a fault, not by admission, and one that was expected back too late was let in as the
                only one: neither cuts anything.
        """
        now_s = self._clock.monotonic_s()
        if self.share / 2 <= predicted_share <= 1.0 and now_s - self._cut_s >= _CUT_PERIOD_S:
            self._cut_s = now_s
            self.share = max(self.share * _CUT, self._config.budget_share * _SHARE_MIN_RATIO)

    def _step(self, number: int, work: float) -> None:
        self.num_working += number
        # Sums of floats drift; nothing is left where no request is.
        self.in_flight_work = max(self.in_flight_work + work, 0.0) if self.num_working else 0.0

    def _advance(self) -> None:
        now_s = self._clock.monotonic_s()
        if self.num_working:
            self._busy_s += now_s - self._seen_s
        self._seen_s = now_s
        if self._is_drained:
            self._drained_s = now_s
        if self._busy_s >= self._config.window_s:
            self._rates.append(self._done / self._busy_s)
            self._busy_s = self._done = 0.0
