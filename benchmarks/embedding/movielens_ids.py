"""MovieLens-1M as the paper on unified embeddings uses it: six id features, ratings made binary, a random split.

Ratings 1 and 2 are negative, 4 and 5 positive, 3 are dropped; 80% of the rows train, 10% choose the epoch, 10% test.
A random split leaks the future: these figures compare table schemes with one another and with the paper, nothing else.

Shape letters: N rows, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from training.data import load_dataset

FEATURES = ("user", "movie", "gender", "age", "occupation", "zip")


@dataclass(frozen=True, slots=True)
class IdSamples:
    """Rows of six ids and a label.

    Args:
        ids: int64 [N, F], each feature's ids numbered from 0.
        labels: float32 [N], 0 or 1.
        num_ids: Distinct ids of each feature.
        train: int64, positions of the rows to train on.
        valid: int64, rows that choose the epoch.
        test: int64, rows that are measured.
        provenance: What the data are.
    """

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32]
    num_ids: tuple[int, ...]
    train: npt.NDArray[np.int64]
    valid: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]
    provenance: str


def load_samples(data_dir: Path, seed: int, rows_max: int | None = None) -> IdSamples:
    """Load the rows.

    Args:
        data_dir: Folder of the data.
        seed: Of the split.
        rows_max: Keep only so many rows, drawn at random; None: all.

    Raises:
        DataUnavailableError: MovieLens cannot be had.
    """
    data = load_dataset("ml-1m", data_dir)
    log, users = data.log, data.users
    kept = np.flatnonzero(log.rating != 3)
    order = np.random.default_rng(seed).permutation(len(kept))[:rows_max]
    kept = kept[order]
    owner = log.user_index[kept]
    zips = np.array(users.zip_code)
    columns = (owner, log.item_id[kept], users.gender[owner], users.age[owner], users.occupation[owner], zips[owner])
    numbered = [np.unique(column, return_inverse=True) for column in columns]
    bounds = [int(len(kept) * share) for share in (0.8, 0.9)]
    train, valid, test = np.split(np.arange(len(kept), dtype=np.int64), bounds)  # the rows are shuffled already
    return IdSamples(
        ids=np.stack([inverse for _, inverse in numbered], axis=1).astype(np.int64),
        labels=(log.rating[kept] > 3).astype(np.float32),
        num_ids=tuple(len(distinct) for distinct, _ in numbered),
        train=train,
        valid=valid,
        test=test,
        provenance=data.provenance,
    )
