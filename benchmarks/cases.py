"""Real requests of the test split, with what the mesh must know to answer them.

A case is one request at its real time: the items that the user truly rated in that second among sampled others, and
the history that a server may see then (strictly earlier seconds), read from the data set and not from any store.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from shared.errors import DataUnavailableError
from shared.hashing import EntityId
from shared.schema.api import RankRequest
from shared.schema.user import UserHistory
from training.data.batches import request_starts
from training.data.dataset import Dataset
from training.data.history import HistoryReader

HistoryKind: TypeAlias = Literal["empty", "short", "long"]
HISTORY_KINDS: tuple[HistoryKind, ...] = ("empty", "short", "long")

SHORT_MAX = 20
"""Most events of a history that counts as short."""

UNKNOWN_EVERY = 8
"""Every so many cases two of the candidates are ids that no data set has."""

UNKNOWN_ID = 9_000_000_000_000
"""First of the integer ids that no data set uses."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request and its inputs.

    Args:
        name: For messages, e.g. ``17-200-short``.
        kind: How much the user did before.
        user_index: Position in the data set's user table, None for a user it does not have.
        user: Raw user id of the request.
        candidates: C distinct raw ids, the true ones first.
        num_true: How many of them the user rated in this very second.
        surface: Surface of the request.
        as_of_s: Real time of the request.
        history: What a server sees then, at most L events.
    """

    name: str
    kind: HistoryKind
    user_index: int | None
    user: EntityId
    candidates: list[EntityId]
    num_true: int
    surface: str
    as_of_s: int
    history: UserHistory

    def request(
        self, request_id: str | None, *, speculative: bool, tier: str, deadline_ms: int, limit: int | None
    ) -> RankRequest:
        """Return the case as the body of a rank request."""
        return RankRequest(
            user_id=self.user,
            candidates=list(self.candidates),
            surface=self.surface,
            limit=limit,
            timestamp_s=self.as_of_s,
            deadline_ms=deadline_ms,
            tier=tier,
            speculative=speculative,
            request_id=request_id,
        )


class CaseSource:
    """Draws cases from the test split of a data set.

    Args:
        dataset: The data.
        history_length: L of the model.
        seed: Of all draws; the same seed draws the same cases.
    """

    def __init__(self, dataset: Dataset, history_length: int, seed: int) -> None:
        self._dataset = dataset
        self._reader = HistoryReader(dataset.log, history_length, "strict")
        self._seed = seed
        test = dataset.split.test
        starts = request_starts(test)
        self._ends = np.append(starts[1:], len(test))
        self._starts = starts
        num_earlier = dataset.log.num_earlier(dataset.log.second_start[test.event_position[starts]])
        order = np.random.default_rng(seed).permutation(len(starts))
        self._pools: dict[HistoryKind, npt.NDArray[np.int64]] = {
            "empty": order,
            "short": order[(num_earlier[order] >= 1) & (num_earlier[order] <= SHORT_MAX)],
            "long": order[num_earlier[order] >= history_length],
        }

    def case(self, number: int, kind: HistoryKind, num_candidates: int) -> Case:
        """Return case ``number`` of a kind; beyond the end of the split's requests they repeat with other candidates.

        Args:
            number: At least 0.
            kind: ``empty`` puts a user whom the data set does not have before the same candidates.
            num_candidates: C, at most the catalog's size.

        Raises:
            DataUnavailableError: the split has no request of this kind, or the catalog is smaller than C.
        """
        pool = self._pools[kind]
        catalog = self._dataset.catalog
        if not len(pool) or num_candidates > len(catalog):
            raise DataUnavailableError(
                f"{self._dataset.name} cannot give a {kind} request of {num_candidates} candidates: "
                f"{len(pool)} such requests, {len(catalog)} items",
                field="candidates",
                limit=len(catalog),
                value=num_candidates,
            )
        which = int(pool[number % len(pool)])
        test = self._dataset.split.test
        rows = test.select(slice(int(self._starts[which]), int(self._ends[which])))
        user_index, as_of_s = int(rows.user_index[0]), int(rows.timestamp_s[0])
        true = list(dict.fromkeys(int(item) for item in rows.item_id))[: max(num_candidates // 2, 1)]
        known = kind != "empty"
        return Case(
            name=f"{number}-{num_candidates}-{kind}",
            kind=kind,
            user_index=user_index if known else None,
            user=int(self._dataset.users.user_id[user_index]) if known else _stranger(number),
            candidates=self._candidates(number, num_candidates, true),
            num_true=len(true),
            surface=self._dataset.surfaces[int(rows.surface[0])],
            as_of_s=as_of_s,
            history=self.history(user_index, as_of_s) if known else UserHistory.empty(),
        )

    def cases(self, kind: HistoryKind, num_candidates: int, first: int = 0) -> Iterator[Case]:
        """Yield cases of one kind for ever, from number ``first`` on."""
        number = first
        while True:
            yield self.case(number, kind, num_candidates)
            number += 1

    def history(self, user_index: int, as_of_s: int) -> UserHistory:
        """Return what a server sees of a user strictly before a time, at most L events, profile included."""
        batch = self._reader.read_at(np.array([user_index]), as_of_s)
        length = int(batch.lengths[0])
        return UserHistory(
            item_keys=batch.item_ids[0, :length].copy(),
            weights=batch.ratings[0, :length].copy(),
            timestamps_s=batch.timestamps_s[0, :length].copy(),
            num_total=int(batch.num_total[0]),
            profile=self._dataset.users.profile(user_index),
        )

    def _candidates(self, number: int, num_candidates: int, true: list[int]) -> list[EntityId]:
        rng = np.random.default_rng([self._seed, number, num_candidates])
        unknown: list[EntityId] = []
        if number % UNKNOWN_EVERY == UNKNOWN_EVERY - 1 and num_candidates >= len(true) + 2:
            unknown = [UNKNOWN_ID + number, f"new-ad-{number}"]
        others = [int(item) for item in self._dataset.catalog.item_id[rng.permutation(len(self._dataset.catalog))]]
        taken = set(true)
        num_others = num_candidates - len(true) - len(unknown)
        return [*true, *unknown, *[item for item in others if item not in taken][:num_others]]


def _stranger(number: int) -> EntityId:
    return UNKNOWN_ID + number if number % 2 else f"stranger-{number}"
