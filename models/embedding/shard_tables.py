"""The rows that one shard holds, behind one look-up: FBGEMM's operator, or the plain gather that it must equal.

Bounds are checked here, always: FBGEMM on CPU reads an id that is out of range from row 0, whatever its check mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from models.config import RowType, TableBackend
from models.embedding.quantized import HEAD_BYTES, StoredRows, row_bytes, row_length, stored_dtype
from shared.errors import InvalidRequestError, WeightsError

Rows: TypeAlias = npt.NDArray[np.float32]
RowIds: TypeAlias = npt.NDArray[np.int64]
Gather: TypeAlias = Callable[[dict[str, RowIds]], dict[str, Rows]]

FBGEMM_ROWS_MAX = 2**31 - 1
"""FBGEMM's operator takes 32-bit ids."""


def shard_tables(parts: Mapping[str, Rows | StoredRows], backend: TableBackend) -> Gather:
    """Return the look-up of a shard.

    Args:
        parts: table -> rows of this shard, stored or float32 [rows, D].
        backend: ``fbgemm``: one call of ``IntNBitTableBatchedEmbeddingBagsCodegen`` for all tables, the operator that
            also serves GPUs; it copies the rows. ``reference``: one numpy gather a table; copies nothing, so it is the
            one for rows that are mapped from a file.

    Returns:
        A function from table -> int64 [U], local rows, to table -> float32 [U, D]. It raises ``InvalidRequestError``
        where a row is outside its table.

    Raises:
        WeightsError: FBGEMM is asked for rows that are mapped from a file, or for more rows than it can address.
    """
    stored = {name: part if isinstance(part, StoredRows) else StoredRows.of(part) for name, part in parts.items()}
    if not stored:
        return lambda ids: {}
    return _Reference(stored) if backend == "reference" else _Fbgemm(stored)


def check_rows(table: str, rows: RowIds, num_rows: int) -> None:
    """Refuse rows that a table does not have.

    Args:
        table: Its name.
        rows: int64 [U].
        num_rows: Rows of the table.

    Raises:
        InvalidRequestError: a row is negative or at least ``num_rows``; names table, limit and value.
    """
    # One pass for both ends: as unsigned, a negative row is larger than any table.
    if len(rows) and int(np.maximum.reduce(rows.view(np.uint64))) >= num_rows:
        wrong = rows[(rows < 0) | (rows >= num_rows)]
        raise InvalidRequestError(
            f"rows of table {table} must be in [0, {num_rows}), are {wrong.min()} to {wrong.max()}",
            field=f"unique_rows.{table}",
            limit=num_rows,
            value=int(wrong[0]),
        )


class _Reference:
    """One gather a table."""

    def __init__(self, parts: dict[str, StoredRows]) -> None:
        self._parts = parts

    def __call__(self, ids: dict[str, RowIds]) -> dict[str, Rows]:
        for name, part in self._parts.items():
            check_rows(name, ids[name], len(part))
        return {name: part.read(ids[name]) for name, part in self._parts.items()}


class TableForm(NamedTuple):
    """What memory a table takes.

    Args:
        row_type: How rows are stored.
        width: D.
        num_rows: R.
    """

    row_type: RowType
    width: int
    num_rows: int


class FbgemmTables:
    """Memory of tables and FBGEMM's operator over it, without pooling: one call for all tables of a width.

    The memory never moves, so whoever owns the tables may go on writing rows into it.

    Args:
        forms: table -> form.

    Raises:
        WeightsError: a table has more rows than FBGEMM can address.
    """

    def __init__(self, forms: Mapping[str, TableForm]) -> None:
        for name, form in forms.items():
            if form.num_rows > FBGEMM_ROWS_MAX:
                raise WeightsError(
                    f"table {name} must have at most {FBGEMM_ROWS_MAX} rows for FBGEMM, has {form.num_rows}"
                )
        self._storage: dict[str, npt.NDArray[Any]] = {}
        # Rows without pooling come out side by side in one matrix, so all tables of one operator have one width.
        widths = dict.fromkeys(form.width for form in forms.values())
        self._groups = [
            (names, self._operator({name: forms[name] for name in names}))
            for names in ([name for name, form in forms.items() if form.width == width] for width in widths)
        ]

    def storage(self, table: str) -> npt.NDArray[Any]:
        """Return the rows of a table to write to, as ``StoredRows.data``: [R, row length]."""
        return self._storage[table]

    def read(self, places: Mapping[str, RowIds]) -> dict[str, Rows]:
        """Return rows: table -> int64 [U], every one known to be inside its table -> float32 [U, D]."""
        found: dict[str, Rows] = {}
        for names, operator in self._groups:
            wanted = [places[name] for name in names]
            # Without pooling a table is one bag: offsets are where each table's ids end.
            ends = [0, *accumulate(map(len, wanted))]
            flat = np.empty(ends[-1], np.int32)
            np.concatenate(wanted, out=flat, casting="same_kind")
            rows = operator(torch.from_numpy(flat), torch.from_numpy(np.array(ends, np.int32))).numpy()
            for index, name in enumerate(names):
                found[name] = rows[ends[index] : ends[index + 1]]
        return found

    def _operator(self, forms: dict[str, TableForm]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        module = _module(forms)
        # np.empty asks the kernel for huge pages, which torch does not: scattered rows miss the TLB less.
        memory = np.empty(len(module.weights_host), np.uint8)
        module.weights_host = torch.from_numpy(memory)
        for name, start, form in zip(forms, module.weights_offsets.tolist(), forms.values(), strict=True):
            part = memory[start : start + form.num_rows * row_bytes(form.row_type, form.width)]
            shape = (form.num_rows, row_length(form.row_type, form.width))
            self._storage[name] = part.view(stored_dtype(form.row_type)).reshape(shape)
        return _bound(module)


class _Fbgemm:
    """Tables that do not change, copied into FBGEMM's memory."""

    def __init__(self, parts: dict[str, StoredRows]) -> None:
        for name, part in parts.items():
            if part.is_mapped:
                raise WeightsError(f"rows of table {name} are mapped from a file, which needs backend reference")
        self._num_rows = {name: len(part) for name, part in parts.items()}
        self._tables = FbgemmTables(
            {name: TableForm(part.row_type, part.width, len(part)) for name, part in parts.items()}
        )
        for name, part in parts.items():
            self._tables.storage(name)[:] = part.data

    def __call__(self, ids: dict[str, RowIds]) -> dict[str, Rows]:
        for name, num_rows in self._num_rows.items():
            check_rows(name, ids[name], num_rows)
        return self._tables.read(ids)


def fbgemm_tables(parts: Mapping[str, StoredRows]) -> Any:
    """Return FBGEMM's inference module of tables of one width: int32 ids [T], int32 offsets [tables + 1] -> [T, D].

    It checks no bounds that one may rely on.
    """
    tables = _module({name: TableForm(part.row_type, part.width, len(part)) for name, part in parts.items()})
    tables.assign_embedding_weights([_as_bytes(part) for part in parts.values()])
    return tables


def _module(forms: Mapping[str, TableForm]) -> Any:
    """Return FBGEMM's inference module of tables of one width, all zero."""
    # Only a replica that looks up in tables pays for this import.
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

    types: dict[RowType, SparseType] = {
        "fp32": SparseType.FP32,
        "fp16": SparseType.FP16,
        "int8": SparseType.INT8,
        "int4": SparseType.INT4,
    }
    tables = IntNBitTableBatchedEmbeddingBagsCodegen(
        [
            (name, form.num_rows, form.width, types[form.row_type], EmbeddingLocation.HOST)
            for name, form in forms.items()
        ],
        pooling_mode=PoolingMode.NONE,
        output_dtype=SparseType.FP32,
        device="cpu",
        row_alignment=1,
    )
    tables.initialize_weights()
    return tables


def _bound(tables: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the module's operator with all arguments but ids and offsets given.

    The module's own ``forward`` spends more on a request than the operator does: attribute look-ups, a bounds check
    that only warns, a cache that a CPU does not have.
    """
    return partial(
        torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function,
        tables.weights_host,
        tables.weights_uvm,
        tables.weights_placements,
        tables.weights_offsets,
        tables.weights_tys,
        tables.D_offsets,
        tables.total_D,
        tables.max_int2_D,
        tables.max_int4_D,
        tables.max_int8_D,
        tables.max_float16_D,
        tables.max_float32_D,
        pooling_mode=int(tables.pooling_mode),
        indice_weights=None,
        output_dtype=tables.output_dtype,
        row_alignment=tables.row_alignment,
    )


def _as_bytes(part: StoredRows) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a copy of the rows as FBGEMM takes them: bytes of the values, and of scale and bias where there are."""
    if part.row_type in ("fp32", "fp16"):
        return torch.from_numpy(np.array(part.data, order="C")).view(torch.uint8), None
    values, head = part.data[:, HEAD_BYTES:], part.data[:, :HEAD_BYTES]
    return torch.from_numpy(np.array(values, order="C")), torch.from_numpy(np.array(head, order="C"))
