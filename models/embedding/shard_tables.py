"""The rows that one shard holds, behind one look-up: FBGEMM's operator, or the plain gather that it must equal.

The caller checks bounds: FBGEMM on CPU reads an id that is out of range from row 0, whatever its check mode says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from models.config import TableBackend

Rows: TypeAlias = npt.NDArray[np.float32]
RowIds: TypeAlias = npt.NDArray[np.int64]
Gather: TypeAlias = Callable[[dict[str, RowIds]], dict[str, Rows]]


def shard_tables(parts: dict[str, Rows], backend: TableBackend) -> Gather:
    """Return the look-up of a shard.

    Args:
        parts: table -> float32 [rows of this shard, D].
        backend: ``fbgemm``: one call of ``IntNBitTableBatchedEmbeddingBagsCodegen`` for all tables, the operator that
            also serves quantized rows and GPUs. ``reference``: one numpy gather a table.

    Returns:
        A function from table -> int64 [U], local rows within bounds, to table -> float32 [U, D].
    """
    if not parts:
        return lambda ids: {}
    if backend == "reference":
        return lambda ids: {name: part[ids[name]] for name, part in parts.items()}
    return _Fbgemm(parts)


class _Fbgemm:
    """All tables of a shard in one table-batched embedding operator without pooling."""

    def __init__(self, parts: dict[str, Rows]) -> None:
        # Only a replica that looks up in tables pays for this import.
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

        self._names = tuple(parts)
        fp32 = SparseType.FP32
        self._tables = IntNBitTableBatchedEmbeddingBagsCodegen(
            [(name, len(part), part.shape[1], fp32, EmbeddingLocation.HOST) for name, part in parts.items()],
            pooling_mode=PoolingMode.NONE,
            output_dtype=fp32,
            device="cpu",
            row_alignment=1,
        )
        self._tables.initialize_weights()
        as_bytes = [torch.from_numpy(np.array(part)).view(torch.uint8) for part in parts.values()]
        self._tables.assign_embedding_weights([(weight, None) for weight in as_bytes])

    def __call__(self, ids: dict[str, RowIds]) -> dict[str, Rows]:
        wanted = [ids[name] for name in self._names]
        # Without pooling a table is one bag: offsets are where each table's ids end.
        ends = np.cumsum([0, *map(len, wanted)], dtype=np.int32)
        rows = self._tables(torch.from_numpy(np.concatenate(wanted).astype(np.int32)), torch.from_numpy(ends)).numpy()
        return {name: rows[ends[index] : ends[index + 1]] for index, name in enumerate(self._names)}
