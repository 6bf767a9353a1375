"""``rankmesh tables``: publishes weights again with serving rows in fewer bytes and hot rows, and says what that costs.

The values that the rows stand for replace the trained ones in every part of the new version, so the oracle, the golden
request and the stations agree to the bit; quality is measured with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from models.config import RankerConfig, RowType, TableConfig
from models.embedding.plan import ShardPlan
from models.embedding.quantized import row_bytes
from models.embedding.tables import table_weight
from models.source import MemorySource
from shared.errors import ConfigError
from shared.weights import Derivation, WeightReader, WeightStore
from training.config import TrainConfig
from training.evaluate import check_release, dataset_of, evaluate_all
from training.model import TrainedModel
from training.publish import publish


@dataclass(frozen=True, slots=True)
class TableCost:
    """What another row type costs one table.

    Args:
        name: Table.
        rows: Rows.
        hot_rows: Rows that every shard holds.
        hot_share: Share of the training period's reads that they take.
        bytes_before: Of all rows.
        bytes_after: Of all rows.
        error_max: Largest change of a value.
    """

    name: str
    rows: int
    hot_rows: int
    hot_share: float
    bytes_before: int
    bytes_after: int
    error_max: float


@dataclass(frozen=True, slots=True)
class TablesReport:
    """What was done.

    Args:
        source: Version whose tables were stored anew.
        row_type: How.
        tables: Cost by table.
        quality: tier -> click NE before and after, on the test rows with the history that a server knows.
    """

    source: str
    row_type: RowType
    tables: tuple[TableCost, ...]
    quality: dict[str, tuple[float, float]]

    def document(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {
            "source": self.source,
            "row_type": self.row_type,
            "tables": {
                cost.name: {
                    "rows": cost.rows,
                    "hot_rows": cost.hot_rows,
                    "hot_share": cost.hot_share,
                    "bytes": [cost.bytes_before, cost.bytes_after],
                    "error_max": cost.error_max,
                }
                for cost in self.tables
            },
            "click_ne": {tier: list(pair) for tier, pair in self.quality.items()},
        }


def store_tables(
    store: WeightStore, version: str, data_dir: Path, row_type: RowType, hot_rows: int, console: Console
) -> tuple[str, TablesReport]:
    """Publish a version with its candidate-side tables stored in another way.

    Args:
        store: Where the version is and the new one goes.
        version: The version; its rows must be fp32, rounding twice would not be what it says.
        data_dir: Folder of fetched data: traffic and quality are measured on it.
        row_type: How the shards keep rows.
        hot_rows: Rows of each row-wise table that every shard holds, those that training read most.
        console: Where the tables are shown.

    Returns:
        The new version and what it costs.

    Raises:
        ConfigError: the version's rows are not fp32.
        DataUnavailableError: the data cannot be had.
        WeightsError: the weights do not fit their model, or a value does not fit the row type.
    """
    reader = store.open(version)
    check_release(reader)
    before = RankerConfig.model_validate(reader.json("model"))
    if other := [name for name in before.candidate_tables if before.table(name).row_type != "fp32"]:
        raise ConfigError(
            f"rows of {version} must be fp32 to be stored anew, {', '.join(other)} are not", field="row_type"
        )
    metrics = reader.json("metrics")
    dataset = dataset_of(reader, data_dir)
    old = TrainedModel.from_weights(reader, dataset)
    config = with_row_type(before, row_type, hot_rows)
    stored = TrainedModel.from_weights(_with_model(reader, config), dataset).source()
    model = TrainedModel.from_weights(stored, dataset)
    evaluations = evaluate_all(model, dataset)
    report = TablesReport(
        source=version,
        row_type=row_type,
        tables=tuple(_cost(old, stored, config, name) for name in config.candidate_tables),
        quality={
            after.tier: (was.objectives["click"].ne, after.objectives["click"].ne)
            for was, after in zip(evaluate_all(old, dataset), evaluations, strict=True)
            if after.history_mode == "strict"
        },
    )
    show_report(report, console)
    train = TrainConfig.model_validate(metrics["train"])
    notes = {"tables": report.document()}
    derived = Derivation(parent=version, made_by="tables")
    made = publish(model, train, dataset, evaluations, store, metrics["train_s"], notes, derived)
    console.print(f"published weights [bold]{made}[/bold]")
    return made, report


def with_row_type(config: RankerConfig, row_type: RowType, hot_rows: int) -> RankerConfig:
    """Return a model whose candidate-side tables are stored in another way; hot rows are of row-wise tables."""

    def stored(table: TableConfig) -> TableConfig:
        if table.name not in config.candidate_tables:
            return table
        hot = hot_rows if table.placement == "row_wise" else 0
        return TableConfig.model_validate(table.model_dump() | {"row_type": row_type, "hot_rows": hot})

    return config.model_copy(update={"tables": tuple(stored(table) for table in config.tables)})


def show_report(report: TablesReport, console: Console) -> None:
    """Print bytes, error and quality."""
    console.print(f"[bold]{report.source}[/bold], rows as {report.row_type}")
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("table")
    for name in ("rows", "hot", "their reads", "bytes", "after", "largest error"):
        table.add_column(name, justify="right")
    for cost in report.tables:
        table.add_row(
            cost.name,
            f"{cost.rows:,}",
            f"{cost.hot_rows:,}",
            f"{cost.hot_share:.0%}",
            f"{cost.bytes_before:,}",
            f"{cost.bytes_after:,}",
            f"{cost.error_max:.1e}",
        )
    console.print(table)
    for tier, (before, after) in report.quality.items():
        console.print(f"tier {tier}: click NE {before:.5f} -> {after:.5f}, test rows")


def _with_model(reader: WeightReader, config: RankerConfig) -> MemorySource:
    """Return a version with another description of its tables."""
    groups = {group: dict(reader.tensors(group)) for group in reader.groups()}
    return MemorySource(reader.version, groups, {"model": config.model_dump(mode="json")})


def _cost(old: TrainedModel, stored: MemorySource, config: RankerConfig, name: str) -> TableCost:
    before = old.ranker.tables.weights[name].detach().numpy()
    plan = ShardPlan.of(config, 1, {name: stored.groups["placement"][f"{name}.hot"]} if _hot(config, name) else None)
    hot, reads = plan.placed[name].hot, old.index.reads.get(name)
    return TableCost(
        name=name,
        rows=len(before),
        hot_rows=len(hot),
        hot_share=0.0 if reads is None else float(reads[hot].sum() / max(int(reads.sum()), 1)),
        bytes_before=before.nbytes,
        bytes_after=len(before) * row_bytes(config.table(name).row_type, config.width),
        error_max=float(np.abs(table_weight(stored, name) - before).max(initial=0.0)),
    )


def _hot(config: RankerConfig, name: str) -> bool:
    return config.table(name).hot_rows > 0
