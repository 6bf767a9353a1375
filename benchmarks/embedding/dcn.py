"""The deep and cross network that the table schemes are compared in: small, and the same for all.

Adam at 1e-3, batches of 128, no normalisation, no dropout, tables uniform in +-0.05: the paper's recipe. The epoch is
the one that is best on the validation rows.

Source: Wang et al., DCN V2, arXiv 2008.13535; Coleman et al., arXiv 2305.12102.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.embedding.movielens_ids import IdSamples
from models.embedding.unified import INIT_BOUND
from training.metrics import auc

BATCH = 128
LEARNING_RATE = 1e-3
NUM_CROSS = 2
HIDDEN = (128, 64)


@dataclass(frozen=True, slots=True)
class Fitted:
    """What training one scheme gave.

    Args:
        test_auc: AUC of the test rows at the epoch that is best on the validation rows.
        epoch: That epoch, from 1.
        network: The network at the end of the last epoch.
        row_norm_growth: Mean squared norm of the rows at the end over that at the start.
    """

    test_auc: float
    epoch: int
    network: DeepCross
    row_norm_growth: float


class DeepCross(nn.Module):
    """Cross layers, then hidden layers, over concatenated embeddings.

    Args:
        num_rows: Rows of the one matrix that holds all tables.
        width: Width of a row.
        num_lookups: Rows that one sample reads.
    """

    def __init__(self, num_rows: int, width: int, num_lookups: int) -> None:
        super().__init__()
        size = num_lookups * width
        self.table = nn.Parameter(torch.empty(num_rows, width).uniform_(-INIT_BOUND, INIT_BOUND))
        self.cross = nn.ModuleList(nn.Linear(size, size) for _ in range(NUM_CROSS))
        sizes = (size, *HIDDEN)
        self.deep = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        self.head = nn.Linear(HIDDEN[-1], 1)

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits: int64 [B, L] rows -> float32 [B]."""
        first = functional.embedding(rows, self.table).flatten(1)
        hidden = first
        for layer in self.cross:
            hidden = torch.addcmul(hidden, first, layer(hidden))
        for layer in self.deep:
            hidden = functional.relu(layer(hidden))
        logits: Tensor = self.head(hidden).squeeze(1)
        return logits


def fit(
    samples: IdSamples, rows: npt.NDArray[np.int64], num_rows: int, width: int, num_epochs: int, seed: int
) -> Fitted:
    """Train on one scheme's rows.

    Args:
        samples: Labels and split.
        rows: int64 [N, L], rows that each sample reads.
        num_rows: Rows of the matrix.
        width: Width of a row.
        num_epochs: Epochs, at least 1.
        seed: Of the weights and the order of the batches.
    """
    torch.manual_seed(seed)
    network = DeepCross(num_rows, width, rows.shape[1])
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, fused=True)
    generator = torch.Generator().manual_seed(seed)
    all_rows, labels, train = torch.from_numpy(rows), torch.from_numpy(samples.labels), torch.from_numpy(samples.train)
    norm_before = float(network.table.detach().square().mean())
    best, test_auc, best_epoch = 0.0, 0.0, 0
    for epoch in range(1, num_epochs + 1):
        for batch in torch.split(train[torch.randperm(len(train), generator=generator)], BATCH):
            optimizer.zero_grad(set_to_none=True)
            functional.binary_cross_entropy_with_logits(network(all_rows[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        found = evaluate(network, samples, rows, samples.valid)
        if found > best:
            best, best_epoch = found, epoch
            test_auc = evaluate(network, samples, rows, samples.test)
    growth = float(network.table.detach().square().mean()) / norm_before
    return Fitted(test_auc, best_epoch, network, growth)


def evaluate(
    network: DeepCross, samples: IdSamples, rows: npt.NDArray[np.int64], where: npt.NDArray[np.int64]
) -> float:
    """Return the AUC of some rows."""
    return auc(predict(network, rows[where]), samples.labels[where] > 0.5)


@torch.inference_mode()
def predict(network: DeepCross, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return logits: int64 [N, L] rows -> float32 [N]."""
    logits: npt.NDArray[np.float32] = torch.cat(
        [network(part) for part in torch.split(torch.from_numpy(rows), 8_192)]
    ).numpy()
    return logits
