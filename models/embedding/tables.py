"""Embedding tables: the plain reference that trains and checks, and FBGEMM's for the shards."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import RankerConfig
from models.source import Tensors, WeightSource, tensor

INIT_STD = 0.05


def group(table: str) -> str:
    """Return the weight group of a table."""
    return f"tables/{table}"


class ReferenceTables(nn.Module):
    """All tables as parameters, looked up by ``F.embedding``.

    Args:
        config: The ranker's configuration.
        num_rows: table -> rows, row 0 included.
    """

    def __init__(self, config: RankerConfig, num_rows: dict[str, int]) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {
                table.name: nn.Parameter(torch.randn(num_rows[table.name], config.width) * INIT_STD)
                for table in config.tables
            }
        )

    def lookup(self, table: str, rows: Tensor) -> Tensor:
        """Return rows: int64 of any shape -> [.., D]."""
        return functional.embedding(rows, self.weights[table])

    def export(self, table: str) -> Tensors:
        """Return the tensors of one table's weight group."""
        return {"weight": self.weights[table].detach().numpy()}


def table_weight(source: WeightSource, table: str) -> npt.NDArray[np.float32]:
    """Read a whole table: float32 [rows, D]."""
    return tensor(source, group(table), "weight", np.float32)
