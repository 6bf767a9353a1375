from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import cli, registry
from benchmarks.record import Measurement, append_rows, read_rows
from benchmarks.registry import BENCHMARKS, BenchmarkOptions, BenchmarkReport, Entry
from benchmarks.site import Where
from benchmarks.verify import Verdict
from shared.errors import ConfigError
from tests.helpers.benchmark_rows import make_row


def fake_benchmark(options: BenchmarkOptions) -> BenchmarkReport:
    spread = {"min": 1.0, "p50": 2.0, "p90": 3.0, "p99": 4.0, "max": 5.0}
    return BenchmarkReport(
        (Measurement("p50_ms", 2.0, "ms", spread, 9, {"seed": options.seed}), Measurement("rate", 7.0, "1/s")), "cfg"
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(registry.BENCHMARKS, "fake", Entry(f"{__name__}:fake_benchmark", "pretends", ("p50_ms",)))
    return "fake"


def test_bench_appends_rows_and_prints_a_table(fake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.bench(fake, BenchmarkOptions(seed=5), results_dir=tmp_path) == 0
    rows = read_rows(tmp_path / "fake.jsonl")
    assert [(row.metric, row.value, row.seed, row.config_hash) for row in rows] == [
        ("p50_ms", 2.0, 5, "cfg"),
        ("rate", 7.0, 5, "cfg"),
    ]
    assert "p50_ms" in capsys.readouterr().out


def test_bench_json_is_one_row_a_line_and_nothing_else(
    fake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.bench(fake, BenchmarkOptions(quick=True), json_lines=True, results_dir=tmp_path)
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.model_dump() for row in read_rows(tmp_path / "fake.jsonl")] == documents
    assert [document["params"] for document in documents] == [{"seed": 0, "quick": True}, {"quick": True}]


def test_a_quick_run_is_no_result(fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "RESULTS_DIR", tmp_path / "results")
    monkeypatch.setenv("RANKMESH_VAR_DIR", str(tmp_path / "var"))
    cli.bench(fake, BenchmarkOptions(quick=True))
    assert len(read_rows(tmp_path / "var" / "bench" / "fake.jsonl")) == 2
    assert not (tmp_path / "results").exists()
    cli.bench(fake, BenchmarkOptions())
    rows = read_rows(tmp_path / "results" / "fake.jsonl")
    assert [row.params for row in rows] == [{"seed": 0}, {}]


def test_bench_without_a_name_lists_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    cli.bench(None, BenchmarkOptions(), json_lines=True)
    listed = [json.loads(line)["benchmark"] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(BENCHMARKS)
    cli.bench(None, BenchmarkOptions())
    assert all(name in capsys.readouterr().out for name in ("mesh",))


def test_an_unknown_benchmark_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"nothing; there are mesh"):
        cli.bench("nothing", BenchmarkOptions())


def test_compare_prints_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_rows([make_row(value=20.0)], tmp_path / "a")
    append_rows([make_row(value=10.0)], tmp_path / "b")
    paths = tmp_path / "a" / "mesh.jsonl", tmp_path / "b" / "mesh.jsonl"
    assert cli.compare(*paths, json_lines=True) == 0
    assert json.loads(capsys.readouterr().out)["ratio"] == 0.5
    cli.compare(*paths)
    assert "0.500" in capsys.readouterr().out


class _Site:
    @contextmanager
    def running(self, where: Where) -> Iterator[_Site]:
        self.where = where
        yield self


@pytest.mark.parametrize(("wrong", "status"), [(0, 0), (1, 1)])
def test_verify_prints_one_object_and_fails_when_an_answer_is_wrong(
    wrong: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = _Site()
    monkeypatch.setattr("benchmarks.site.running_site", site.running)
    monkeypatch.setattr("benchmarks.verify.verify_site", lambda *_: Verdict(requests=300, wrong=wrong))
    assert cli.verify(cli.VerifyOptions(name="mine"), json_lines=True) == status
    (line,) = capsys.readouterr().out.splitlines()
    assert {"requests", "wrong", "degraded", "max_abs_error"} <= set(json.loads(line))
    assert site.where == Where(None, "mine", None)
    assert cli.verify(cli.VerifyOptions()) == status
    assert "requests" in capsys.readouterr().out
