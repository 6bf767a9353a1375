"""The T1 split: by time, never at random, rows of users with a short past dropped.

Source: ReLLa (arXiv 2308.11131); on MovieLens-1M 970,009 rows: 776,007 train, 97,000 validation, 97,002 test.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.data.log import EventLog, Rows

T1_EARLIER_MIN = 5
"""Events that a user must have before a row's own for the row to count."""


@dataclass(frozen=True, slots=True)
class Split:
    """Three runs of rows, each in (timestamp, user, item) order, every row of one not later than any of the next.

    Args:
        train: First 80% of the rows.
        valid: Next 10%.
        test: The rest.
    """

    train: Rows
    valid: Rows
    test: Rows

    @property
    def test_start_s(self) -> int:
        """Time of the first test row, seconds since the epoch: what a server may know lies strictly before it.

        Raises:
            ValueError: there is no test row.
        """
        if not len(self.test):
            raise ValueError("the split has no test row")
        return int(self.test.timestamp_s[0])


def split_by_time(log: EventLog, num_earlier_min: int = T1_EARLIER_MIN) -> Split:
    """Split a log as T1 does.

    Rows are sorted by (timestamp, user, item); those with fewer than ``num_earlier_min`` earlier events of their user
    (in that order, so events of the same second count) are dropped; of the N left the first ``floor(0.8 N)`` are train,
    the next ``floor(0.1 N)`` validation, the rest test.

    Args:
        log: The events; user index order must be user id order.
        num_earlier_min: At least 0.
    """
    order = log.time_order
    kept = order[log.num_earlier(order) >= num_earlier_min]
    num_train = len(kept) * 8 // 10
    num_valid = len(kept) // 10
    return Split(
        train=log.rows(kept[:num_train]),
        valid=log.rows(kept[num_train : num_train + num_valid]),
        test=log.rows(kept[num_train + num_valid :]),
    )
