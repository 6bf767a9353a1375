"""Learning that never ends: rows of users move with every minute of events, between trainings of whole versions.

A batch of a minute holds a few rows of one or two users. To take a step of the whole network on it is to take a noisy
step: measured on validation rows, it made the next rows worse. What does help is a user's own row of table ``user``,
which nobody else reads. To find its gradient at every minute would be a pass forward and backward for three rows, so
the logit is taken as linear in the row around the published value ``e``::

    logit(e + d) = logit(e) + J d,    J = d logit / d e

J needs no label, so it is computed in large batches; a minute's learning is then a few operations on vectors, row-wise
Adagrad on the log likelihood of clicks. Stations serve the row ``e + d`` with the network as it is, not the line.

Users without a row share row 0, which does not learn: it would follow whoever came last.

Shape letters: N rows, D width, U rows of the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from models.config import RankerConfig
from models.embedding.tables import group
from models.embedding.vocabulary import OOV_ROW
from models.heads import CLICK
from models.layers.layout import CandidateLayout
from models.ranker import CandidateTensors, RequestTensors
from models.source import MemorySource, Tensors
from shared.config import Config
from shared.weights.deltas import tensor_key
from training.data import HistoryReader, RequestBatch, Rows, request_batches
from training.model import TrainedModel

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

USER_FEATURE = "user_id"
_BATCH_ROWS = 2048
_SCORE_ROWS = 4096


class OnlineConfig(Config):
    """Row-wise Adagrad over a stream.

    Args:
        rate: Learning rate.
        accumulator: What a row's mean square gradient starts with: larger, and the first events move it less.
    """

    rate: float = Field(0.03, gt=0)
    accumulator: float = Field(0.01, gt=0)


@dataclass(frozen=True, slots=True)
class Tangents:
    """How the published model answers N rows, and how that turns with their user's row of the table.

    Args:
        user_rows: int64 [N].
        logits: float32 [N], of a click at the deepest exit, not calibrated.
        jacobians: float32 [N, D].
    """

    user_rows: Ints
    logits: Floats
    jacobians: Floats

    def select(self, chosen: slice) -> Tangents:
        """Return some of the rows."""
        return Tangents(self.user_rows[chosen], self.logits[chosen], self.jacobians[chosen])


def tangents(model: TrainedModel, reader: HistoryReader, rows: Rows) -> Tangents:
    """Run the model and its derivative on rows, each a request of its own; labels are not read."""
    ranker = model.ranker
    names = [feature.name for feature in ranker.config.request_features]
    column = names.index(USER_FEATURE)
    found: list[tuple[Ints, Floats, Floats]] = []
    for begin in range(0, len(rows), _BATCH_ROWS):
        part = rows.select(slice(begin, begin + _BATCH_ROWS))
        alone = np.arange(len(part))
        batch = RequestBatch(part.user_index, part.timestamp_s, part.surface, reader.read(part), part, alone)
        requests = RequestTensors.of(model.index.requests(batch))
        with torch.no_grad():
            features = ranker.request_features(requests)
        features.requires_grad_(True)
        candidates = model.index.candidates(part, streaming=False)
        layout = CandidateLayout.of(torch.from_numpy(alone), len(part))
        logits = _logits(model, requests, features, candidates, layout)[:, CLICK]
        (gradient,) = torch.autograd.grad(logits.sum(), [features])
        user_rows = requests.feature_rows[:, column].numpy()
        found.append((user_rows, logits.detach().numpy(), gradient[:, column].numpy()))
    width = ranker.config.width
    nothing = (np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros((0, width), np.float32))
    user_rows, answers, jacobians = (np.concatenate(parts) for parts in zip(nothing, *found, strict=True))
    return Tangents(user_rows, answers, jacobians)


def _logits(
    model: TrainedModel,
    requests: RequestTensors,
    features: Tensor,
    candidates: CandidateTensors,
    layout: CandidateLayout,
) -> Tensor:
    """Return the deepest exit's logits of C candidates, with these request features: [C, O]."""
    ranker = model.ranker
    state = ranker.encode(requests, features)
    return ranker.network.full_pass(state, ranker.pool(candidates), candidates.counters, None, None, layout)


class UserRowLearner:
    """Learns the rows of users from events in time order.

    Args:
        weight: float32 [U, D], the published rows.
        config: Rates.
    """

    def __init__(self, weight: Floats, config: OnlineConfig) -> None:
        self._published = weight
        self._rate = config.rate
        self._moved = np.zeros_like(weight)
        self._squares = np.full(len(weight), config.accumulator, np.float32)
        self._touched: set[int] = set()

    def rows(self, user_rows: Ints) -> Floats:
        """Return rows as they are now: int64 [N] -> float32 [N, D]."""
        return self._published[user_rows] + self._moved[user_rows]

    def learn(self, seen: Tangents, clicks: npt.NDArray[np.bool_]) -> Floats:
        """Learn from events that are over, all at once.

        Args:
            seen: N rows.
            clicks: bool [N].

        Returns:
            float32 [N], the logit of each row before learning from it, by the line.
        """
        logits = seen.logits + np.einsum("nd,nd->n", seen.jacobians, self._moved[seen.user_rows])
        off = clicks - 1.0 / (1.0 + np.exp(-np.clip(logits, -80.0, 80.0)))
        off[seen.user_rows == OOV_ROW] = 0.0
        users, which = np.unique(seen.user_rows, return_inverse=True)
        gradient = np.zeros((len(users), seen.jacobians.shape[1]), np.float32)
        np.add.at(gradient, which, off[:, None].astype(np.float32) * seen.jacobians)
        self._squares[users] += np.square(gradient).mean(axis=1)
        self._moved[users] += self._rate * gradient / np.sqrt(self._squares[users])[:, None]
        self._touched.update(users[users != OOV_ROW].tolist())
        return np.asarray(logits, np.float32)

    def take(self) -> Ints:
        """Return the rows that moved since the last call, ascending: int64."""
        touched = np.array(sorted(self._touched), np.int64)
        self._touched.clear()
        return touched

    def table(self) -> Floats:
        """Return the whole table as it is now: float32 [U, D], a copy."""
        return self._published + self._moved


def user_table(model: TrainedModel) -> Floats:
    """Return the published rows of users: float32 [U, D], shared with the model."""
    weight: Floats = model.ranker.tables.weights[_user_table_name(model.ranker.config)].detach().numpy()
    return weight


def next_state(base: MemorySource, config: RankerConfig, table: Floats) -> dict[str, Tensors]:
    """Return the groups of a version with other rows of users, for ``DeltaPublisher.publish``.

    Args:
        base: The published version.
        config: Its model.
        table: float32 [U, D].
    """
    return base.groups | {group(_user_table_name(config)): {"weight": table}}


def touched_rows(config: RankerConfig, rows: Ints) -> dict[str, Ints]:
    """Return what ``DeltaPublisher.publish`` takes as ``touched`` when only these rows of users moved."""
    return {tensor_key(group(_user_table_name(config)), "weight"): rows}


def _user_table_name(config: RankerConfig) -> str:
    return next(feature.table for feature in config.request_features if feature.name == USER_FEATURE)


@torch.no_grad()
def score(model: TrainedModel, reader: HistoryReader, rows: Rows, user_vectors: Floats, counters: Floats) -> Floats:
    """Score rows with the network as it is, each with the row of its user and the counters that served at its time.

    Args:
        model: The published model.
        reader: Joins the histories.
        rows: N rows in (timestamp, user) order.
        user_vectors: float32 [N, D], the same for all rows of a request.
        counters: float32 [N, counters].

    Returns:
        float32 [N, O], logits of the deepest exit.
    """
    ranker = model.ranker
    column = [feature.name for feature in ranker.config.request_features].index(USER_FEATURE)
    parts: list[Floats] = [np.zeros((0, ranker.config.num_objectives), np.float32)]
    done = 0
    for batch in request_batches(rows, reader, _SCORE_ROWS):
        chosen = slice(done, done + batch.num_candidates)
        firsts = np.flatnonzero(np.diff(batch.request_index, prepend=-1))
        requests = RequestTensors.of(model.index.requests(batch))
        features = ranker.request_features(requests)
        features[:, column] = torch.from_numpy(user_vectors[chosen][firsts])
        candidates = replace(
            model.index.candidates(batch.candidates, streaming=False), counters=torch.from_numpy(counters[chosen])
        )
        layout = CandidateLayout.of(torch.from_numpy(batch.request_index), batch.num_requests)
        parts.append(_logits(model, requests, features, candidates, layout).numpy())
        done += batch.num_candidates
    return np.concatenate(parts)


def cached_tangents(model: TrainedModel, reader: HistoryReader, rows: Rows, path: Path) -> Tangents:
    """Return ``tangents``, from a file where they are in it, else computed and written there.

    Args:
        model: The published model.
        reader: Joins the histories.
        rows: The rows.
        path: File whose name says which model and which rows.
    """
    if path.is_file():
        with np.load(path) as found:
            return Tangents(found["user_rows"], found["logits"], found["jacobians"])
    made = tangents(model, reader, rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    np.savez(beside, user_rows=made.user_rows, logits=made.logits, jacobians=made.jacobians)
    beside.replace(path)
    return made
