"""Names and sample requests that a mesh publishes beside its weights, in the form the verbs need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from shared.config import Config
from shared.hashing import EntityId, canonical_id, id_key


class Item(Config):
    """What a person sees of an item."""

    title: str
    year: int = 0
    genres: tuple[str, ...] = ()


class PastEvent(Config):
    """One event of a shown history; ``weight`` is the rating, 0.5 to 5."""

    item_id: int
    weight: float
    timestamp_s: int


class Sample(Config):
    """One held-out real request: the user's true next items hidden among others (see ``training.samples``)."""

    user_id: int
    timestamp_s: int
    surface: str = "ml-1m"
    profile: dict[str, str] = Field(default_factory=dict)
    num_earlier: int = 0
    history: tuple[PastEvent, ...] = ()
    candidates: tuple[int, ...] = Field(min_length=1)
    true_next: tuple[int, ...] = ()
    next_weights: tuple[float, ...] = ()

    def ratings(self) -> dict[int, float]:
        """Return the true next items with the rating that the user then gave."""
        return dict(zip(self.true_next, self.next_weights or [0.0] * len(self.true_next), strict=True))


class Catalogue(Config):
    """Items by id and sample requests of one weights version.

    Args:
        items: Item id as text -> item; empty when the weights name none.
        samples: Held-out requests.
        as_of_s: Start of the held-out period, seconds since the epoch; 0 when unknown.
        provenance: What the data are.
        dataset: Name of the data set.
    """

    items: dict[str, Item] = Field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    as_of_s: int = 0
    provenance: str = ""
    dataset: str = ""

    @classmethod
    def from_documents(cls, *documents: Mapping[str, Any]) -> Catalogue:
        """Merge the ``samples`` and ``display`` documents of the weights, or the one body of ``GET /v1/samples``."""
        merged: dict[str, Any] = {}
        for document in documents:
            merged |= {key: value for key, value in document.items() if key in cls.model_fields}
        return cls.model_validate(merged)

    @property
    def surface(self) -> str | None:
        """Surface of the sample requests, None without any."""
        return self.samples[0].surface if self.samples else None

    def item(self, item_id: EntityId) -> Item:
        """Return an item, or one that says that it is unknown."""
        return self.items.get(str(item_id)) or Item(title=f"item {item_id}")

    def sample_of(self, user_id: EntityId) -> Sample | None:
        """Return the sample request of a user, if there is one."""
        wanted = canonical_id(user_id)
        return next((sample for sample in self.samples if sample.user_id == wanted), None)

    def draw(self, user_id: EntityId, num_candidates: int, first: Sequence[int] = ()) -> list[int]:
        """Return distinct item ids: those of ``first``, then others drawn for this user, always the same ones.

        Args:
            user_id: Whose request it is.
            num_candidates: How many ids, fewer when the catalogue is smaller.
            first: Ids that come first, distinct.
        """
        chosen = list(first[:num_candidates])
        taken = set(chosen)
        others = np.array(sorted(item for item in map(int, self.items) if item not in taken), np.int64)
        num_missing = min(num_candidates - len(chosen), len(others))
        random = np.random.default_rng(abs(id_key(user_id)))
        return chosen + random.choice(others, num_missing, replace=False).tolist() if num_missing else chosen
