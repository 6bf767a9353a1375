"""A bounded map from ids to rows without collisions, for id spaces that drift: old ids go, new ones take their rows.

Every row but row 0 belongs to one id; ids that have none read row 0, the out-of-vocabulary row, which is never evicted.
Reads are recorded; ``renew`` coalesces what was recorded, keeps the ids with the best scores and hands the rows of the
others to new ids. Rows that changed hands must be initialised again: a new id would start from a stranger's vector.

Scores: ``lfu``: reads. ``lru``: step of the last read. ``distance_lfu``: ``reads / (now - last + 1) ** decay``. Ties
go to the id that has a row, then to the smaller id, so two processes that saw the same reads hold the same map.

TorchRec's sorted collision module works the same way (its default row is the last one, ours the first, as in all our
tables). Its map lives in buffers of a module for training, ours is the ``Vocabulary`` that serving reads anyway; its
other form, a hash table, does not run on CPUs as constructed by default. Look-ups are a binary search each: about
10 million ids a second with 1,000 rows, 1 million with 1,000,000, on one busy core.

Source: TorchRec, ``torchrec/modules/mc_modules.py`` (MCHManagedCollisionModule and its eviction policies).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from models.embedding.vocabulary import OOV_ROW, Vocabulary

Policy: TypeAlias = Literal["lfu", "lru", "distance_lfu"]
Ids: TypeAlias = npt.NDArray[np.int64]


class ManagedRows:
    """Ids and the rows they hold.

    Args:
        num_rows: Rows of the table, row 0 included.
        policy: What makes an id worth its row.
        decay: Exponent of the age in ``distance_lfu``, at least 0.
        pending_max: Most reads kept one by one; beyond, they are folded into counts early, which changes nothing.

    Raises:
        ValueError: a size is out of range.
    """

    def __init__(
        self, num_rows: int, policy: Policy = "distance_lfu", decay: float = 1.0, pending_max: int = 1 << 20
    ) -> None:
        if num_rows < 2 or pending_max < 1 or decay < 0:
            raise ValueError(
                f"num_rows must be at least 2, pending_max at least 1 and decay at least 0, "
                f"are {num_rows}, {pending_max} and {decay}"
            )
        self.num_rows = num_rows
        self.num_oov = 0
        """Reads of ids without a row."""
        self._policy = policy
        self._decay = decay
        self._pending_max = pending_max
        self._held = Vocabulary(np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._keys: Ids = np.zeros(0, np.int64)  # ascending: all ids that hold a row or were read since
        self._counts: Ids = np.zeros(0, np.int64)
        self._last: Ids = np.zeros(0, np.int64)
        self._recorded: list[tuple[Ids, int]] = []
        self._num_recorded = 0

    def __len__(self) -> int:
        """Number of ids that hold a row."""
        return len(self._held)

    def rows(self, keys: Ids) -> Ids:
        """Return the rows of ids without recording a read: int64 of any shape -> int64 of that shape, 0 if none."""
        return self._held.rows(keys)

    def read(self, keys: Ids, step: int) -> Ids:
        """Return the rows of ids and record the reads.

        Args:
            keys: int64 [N].
            step: When; never before an earlier read's.

        Returns:
            int64 [N], ``OOV_ROW`` for ids without a row.
        """
        rows = self._held.rows(keys)
        self.num_oov += int((rows == OOV_ROW).sum())
        if len(keys):
            self._recorded.append((keys.copy(), step))
            self._num_recorded += len(keys)
        if self._num_recorded > self._pending_max:
            self._coalesce()
        return rows

    def renew(self, step: int) -> Ids:
        """Give rows to the ids with the best scores.

        Ids that keep their place keep their row, so what they learned stays.

        Args:
            step: Now; ages count from here.

        Returns:
            int64, rows that belong to another id than before, ascending: initialise them.
        """
        self._coalesce()
        rows = self._held.rows(self._keys)
        order = np.lexsort((self._keys, rows == OOV_ROW, -self._scores(step)))
        chosen = np.sort(order[: self.num_rows - 1])
        keys, held = self._keys[chosen], rows[chosen]
        taken = np.zeros(self.num_rows, np.bool_)
        taken[held] = True
        taken[OOV_ROW] = True
        new = held == OOV_ROW
        given = np.flatnonzero(~taken)[: int(new.sum())]
        held[new] = given
        self._held = Vocabulary(keys, held)
        self._keys, self._counts, self._last = keys, self._counts[chosen], self._last[chosen]
        return given

    def vocabulary(self) -> Vocabulary:
        """Return the map as the vocabulary that serving reads."""
        return self._held

    def _scores(self, step: int) -> npt.NDArray[np.float64]:
        if self._policy == "lfu":
            return self._counts.astype(np.float64)
        if self._policy == "lru":
            return self._last.astype(np.float64)
        return self._counts / np.maximum(step - self._last + 1, 1).astype(np.float64) ** self._decay

    def _coalesce(self) -> None:
        """Fold the recorded reads into counts and last steps by id."""
        if not self._recorded:
            return
        read = np.concatenate([keys for keys, _ in self._recorded])
        steps = np.concatenate([np.full(len(keys), step, np.int64) for keys, step in self._recorded])
        keys = np.concatenate([self._keys, read])
        counts = np.concatenate([self._counts, np.ones(len(read), np.int64)])
        last = np.concatenate([self._last, steps])
        self._keys, where = np.unique(keys, return_inverse=True)
        self._counts = np.zeros(len(self._keys), np.int64)
        self._last = np.full(len(self._keys), np.iinfo(np.int64).min, np.int64)
        np.add.at(self._counts, where, counts)
        np.maximum.at(self._last, where, last)
        self._recorded, self._num_recorded = [], 0


def initialise(weight: npt.NDArray[np.float32], rows: Ids, bound: float, seed: int) -> None:
    """Give rows fresh values in place, uniform in +-``bound``.

    The values of a row depend on the seed and the row alone, not on which other rows are initialised with it.

    Args:
        weight: float32 [R, D].
        rows: int64, within ``[0, R)``.
        bound: Largest absolute value.
        seed: E.g. the number of the renewal, so that a row that changes hands twice starts differently.

    Raises:
        IndexError: a row is outside the table.
    """
    for row in rows.tolist():
        if not 0 <= row < len(weight):
            raise IndexError(f"row must be in [0, {len(weight)}), is {row}")
        random = np.random.default_rng((seed, row))
        weight[row] = random.uniform(-bound, bound, size=(weight.shape[1],))
