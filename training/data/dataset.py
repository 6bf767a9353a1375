"""What a data set is to the rest of training: items, users, events, the split and, if known, the truth.

Shape letters: I items, U users, E events, G items' genres in all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.errors import DataUnavailableError
from training.data.log import EventLog
from training.data.split import Split


@dataclass(frozen=True, slots=True)
class Catalog:
    """The items (or ads) that can be ranked, ascending by id.

    Args:
        item_id: int64 [I], strictly ascending, at least 1.
        title: I titles.
        year: int16 [I], year of release, 0 when unknown.
        genre_names: Name of each genre id; id 0 is padding and has the empty name.
        genre_values: int16 [G], genre ids, item ``i`` owns ``genre_values[genre_offsets[i] : genre_offsets[i + 1]]``.
        genre_offsets: int64 [I + 1].
        group_id: int64 [I], the ad group, at least 1.
    """

    item_id: npt.NDArray[np.int64]
    title: tuple[str, ...]
    year: npt.NDArray[np.int16]
    genre_names: tuple[str, ...]
    genre_values: npt.NDArray[np.int16]
    genre_offsets: npt.NDArray[np.int64]
    group_id: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """Number of items I."""
        return len(self.item_id)

    def positions(self, item_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the catalog positions of item ids (any shape, same shape back).

        Raises:
            DataUnavailableError: an id is not in the catalog; names the first.
        """
        if not len(self):
            found, known = np.zeros(item_ids.shape, np.int64), np.zeros(item_ids.shape, np.bool_)
        else:
            found = np.minimum(np.searchsorted(self.item_id, item_ids), len(self) - 1)
            known = self.item_id[found] == item_ids
        if not known.all():
            missing = int(item_ids[~known].flat[0])
            raise DataUnavailableError(
                f"item {missing} is not among the {len(self)} of the catalog", field="item_id", value=missing
            )
        return found

    def genres(self, position: int) -> tuple[str, ...]:
        """Return the genre names of the item at a catalog position."""
        begin, end = self.genre_offsets[position], self.genre_offsets[position + 1]
        return tuple(self.genre_names[genre] for genre in self.genre_values[begin:end])

    def padded_genres(self) -> npt.NDArray[np.int64]:
        """Return the genre ids as a table: int64 [I, most genres of one item], padded with 0."""
        counts = np.diff(self.genre_offsets)
        table = np.zeros((len(self), int(counts.max(initial=0))), np.int64)
        table[np.arange(table.shape[1]) < counts[:, None]] = self.genre_values
        return table


@dataclass(frozen=True, slots=True)
class UserTable:
    """The users, ascending by id; a user's position here is the ``user_index`` of events and rows.

    Args:
        user_id: int64 [U], strictly ascending, at least 1.
        gender: uint8 [U], 0 unknown, 1 female, 2 male.
        age: int16 [U], lower bound of the age bracket in years (1, 18, 25, 35, 45, 50, 56).
        occupation: int16 [U], position in ``occupation_names``.
        occupation_names: Names of the occupations.
        zip_code: U postal codes.
    """

    user_id: npt.NDArray[np.int64]
    gender: npt.NDArray[np.uint8]
    age: npt.NDArray[np.int16]
    occupation: npt.NDArray[np.int16]
    occupation_names: tuple[str, ...]
    zip_code: tuple[str, ...]

    def __len__(self) -> int:
        """Number of users U."""
        return len(self.user_id)

    def profile(self, user_index: int) -> dict[str, str]:
        """Return the request-only attributes of one user as plain text, as a store keeps them."""
        return {
            "gender": ("", "F", "M")[self.gender[user_index]],
            "age": str(self.age[user_index]),
            "occupation": self.occupation_names[self.occupation[user_index]],
            "zip_code": self.zip_code[user_index],
        }


@dataclass(frozen=True, slots=True)
class Truth:
    """The probabilities that the labels were drawn from; only a synthetic log knows them.

    Args:
        click: float32 [E], probability of a click, by event position.
        conversion: float32 [E], probability of a conversion of the impression (click included), at most ``click``.
    """

    click: npt.NDArray[np.float32]
    conversion: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Dataset:
    """All that training, evaluation and replay need; MovieLens and the synthetic log have the same form.

    Args:
        name: ``ml-1m``, ``ml-100k`` or ``synthetic``.
        provenance: What the data are, in one sentence that belongs beside every number measured on them.
        surfaces: Surface names; ``EventLog.surface`` points here.
        catalog: The items.
        users: The users.
        log: The events.
        split: Train, validation and test rows in time order.
        truth: The true probabilities, None on real data.
    """

    name: str
    provenance: str
    surfaces: tuple[str, ...]
    catalog: Catalog
    users: UserTable
    log: EventLog
    split: Split
    truth: Truth | None = None
