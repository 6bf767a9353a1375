from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from benchmarks.record import Measurement, RunContext, append_rows, commit_id, read_rows
from shared.clock import ManualClock
from shared.errors import DataUnavailableError
from tests.helpers.benchmark_rows import make_row


def test_rows_survive_the_file_in_order_and_later_runs_append(tmp_path: Path) -> None:
    first, second = (
        make_row(value=1.5),
        make_row(metric="p99_ms_500", params={"candidates": 500, "loop": "closed", "quick": True}),
    )
    append_rows([first], tmp_path / "results")
    append_rows([second], tmp_path / "results")
    assert read_rows(tmp_path / "results" / "mesh.jsonl") == [first, second]


def test_one_row_is_one_json_line_with_the_promised_fields(tmp_path: Path) -> None:
    append_rows([make_row(), make_row(benchmark="stations", metric="x")], tmp_path)
    (line,) = (tmp_path / "mesh.jsonl").read_text().splitlines()
    assert {"benchmark", "metric", "value", "unit", "quantiles", "config_hash", "seed", "commit", "device"} <= set(
        json.loads(line)
    )
    assert len((tmp_path / "stations.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "fields", [{"value": math.nan}, {"value": math.inf}, {"metric": "P50"}, {"num_samples": 0}, {"extra": 1}]
)
def test_a_row_refuses_what_is_no_figure(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        make_row(**fields)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mesh.jsonl"
    path.write_text(make_row().model_dump_json() + "\n\n{}\n")
    with pytest.raises(DataUnavailableError, match="line 3"):
        read_rows(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailableError, match=r"absent\.jsonl"):
        read_rows(tmp_path / "absent.jsonl")


def test_the_context_fills_every_row_of_a_run() -> None:
    context = RunContext(seed=7, commit="c", device="d", started="s", versions={"python": "3"})
    row = context.row("mesh", "hash", Measurement("overhead_ms", 3.0, "ms", params={"candidates": 20}))
    assert (row.seed, row.commit, row.device, row.started, row.config_hash) == (7, "c", "d", "s", "hash")
    assert (row.metric, row.value, row.num_samples, row.quantiles) == ("overhead_ms", 3.0, 1, {})


def test_capture_reads_the_injected_clock() -> None:
    context = RunContext.capture(3, ManualClock(start_s=0.0))
    assert context.started == "1970-01-01T00:00:00+00:00"
    assert context.versions["python"]
    assert context.device.split(" x ")[0].isdigit()


def test_commit_marks_a_changed_tree_but_not_appended_results(tmp_path: Path) -> None:
    def git(*args: str) -> None:
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t", *args],
            check=True,
            capture_output=True,
        )

    git("init", "-q")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "mesh.jsonl").write_text("")
    (tmp_path / "code.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    clean = commit_id(tmp_path)
    assert len(clean) == 12
    (results / "mesh.jsonl").write_text("{}\n")
    assert commit_id(tmp_path) == clean
    (tmp_path / "code.py").write_text("a = 2\n")
    assert commit_id(tmp_path) == f"{clean}-dirty"


def test_commit_is_unknown_outside_a_checkout(tmp_path: Path) -> None:
    assert commit_id(tmp_path) == "unknown"
