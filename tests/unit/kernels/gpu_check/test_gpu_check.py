"""The GPU check's own parts: plan, rows, time limit, failures; and its small checks in the interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.gpu_check import __main__ as command
from kernels.gpu_check.cases import all_checks
from kernels.gpu_check.check import Check, Prepared
from kernels.gpu_check.measure import run_checks
from kernels.gpu_check.rows import HEADER, Row, quantiles, rates
from kernels.roofline import Work

CPU = torch.device("cpu")
CHECKS = all_checks()
WORK = Work(3e6, 2e3)


def _prepared(error: float = 0.0, tolerance: float = 0.5, fused: Callable[[], Tensor] | None = None) -> Prepared:
    return Prepared(
        fused=fused or (lambda: torch.ones(2) + error),
        unfused=lambda: torch.ones(2),
        expected=lambda: (torch.ones(2).double(), torch.ones(2).double()),
        tolerance=tolerance,
    )


def _run(
    checks: list[Check],
    clock: Callable[[], float] = lambda: 0.0,
    timed: list[str] | None = None,
    device_name: str = "GPU",
) -> list[Row]:
    def timer(prepared: Prepared) -> tuple[list[float], list[float]]:
        if timed is not None:
            timed.append("timed")
        return [1.0, 2.0, 3.0], [6.0, 8.0, 10.0]

    rows = run_checks(
        checks, CPU, device_name=device_name, versions="torch 1", seed=3, limit_s=10.0, timer=timer, clock=clock
    )
    return list(rows)


def _check(make: Callable[[torch.device], Prepared], is_timed: bool = True) -> Check:
    return Check("op", "C1", make, is_timed, WORK)


def test_a_right_kernel_is_timed_beside_the_torch_form() -> None:
    (row,) = _run([_check(lambda _: _prepared())])
    assert (row.ok, row.error, row.tolerance, row.failure) == (True, 0.0, 0.5, "")
    assert row.fused_us == (1.0, 2.0, 3.0)
    assert row.ratio == 4.0
    assert row.tflops == pytest.approx(1.5)
    assert row.gbytes_per_s == pytest.approx(1.0)
    assert "WRONG" not in row.as_line()


def test_a_row_of_a_known_device_says_what_share_of_the_roofline_was_reached() -> None:
    (row,) = _run([_check(lambda _: _prepared())], device_name="NVIDIA H200")
    # 3 MFLOP at 989 TFLOP/s are 3.03 ns, 2 kB at 4.8 TB/s 0.42 ns; the median is 2 us.
    assert row.bound == "compute"
    assert row.roofline_share == pytest.approx(3e6 / 989e12 / 2e-6)
    assert json.loads(row.as_json())["roofline_share"] == row.roofline_share
    for other in ("GPU", "NVIDIA H200 NVL"):
        (row,) = _run([_check(lambda _: _prepared())], device_name=other)
        assert (row.bound, row.roofline_share) == (None, None)
        assert row.as_line().split()[-1] == "-"
    (row,) = _run([_check(lambda _: _prepared(), is_timed=False)], device_name="NVIDIA H200")
    assert row.roofline_share is None


def test_a_wrong_kernel_is_not_timed_and_shows() -> None:
    timed: list[str] = []
    (row,) = _run([_check(lambda _: _prepared(error=0.75))], timed=timed)
    assert not row.ok
    assert row.error == pytest.approx(0.75)
    assert timed == []
    assert row.as_line().endswith("WRONG")


def test_an_unwritten_value_is_wrong() -> None:
    (row,) = _run([_check(lambda _: _prepared(fused=lambda: torch.tensor([1.0, float("nan")])))])
    assert not row.ok
    assert row.error == float("inf")


def test_a_kernel_that_raises_does_not_hide_the_next() -> None:
    def broken() -> Tensor:
        raise RuntimeError("out of\n shared memory")

    first, second = _run([_check(lambda _: _prepared(fused=broken)), _check(lambda _: _prepared())])
    assert not first.ok
    assert first.failure == "RuntimeError: out of shared memory"
    assert "RAISED RuntimeError" in first.as_line()
    assert second.ok


def test_after_the_limit_checks_run_but_are_not_timed() -> None:
    times = iter([0.0, 9.9, 10.0, 99.0])
    rows = _run([_check(lambda _: _prepared())] * 3, clock=lambda: next(times))
    assert [row.ok for row in rows] == [True, True, True]
    assert [row.fused_us is not None for row in rows] == [True, False, False]


def test_inputs_come_from_the_seed() -> None:
    seen: list[Tensor] = []

    def make(_: torch.device) -> Prepared:
        seen.append(torch.randn(3))
        return _prepared()

    _run([_check(make, is_timed=False)] * 2)
    assert torch.equal(seen[0], seen[1])


def test_rows_are_json_lines_with_the_environment() -> None:
    (row,) = _run([_check(lambda _: _prepared())])
    read = json.loads(row.as_json())
    assert (read["op"], read["shape"], read["device"], read["seed"], read["ratio"]) == ("op", "C1", "GPU", 3, 4.0)
    assert "\n" not in row.as_json()
    assert len(HEADER.split()) >= 8


def test_quantiles_are_samples() -> None:
    assert quantiles([5.0]) == (5.0, 5.0, 5.0)
    assert quantiles([float(i) for i in range(11)][::-1]) == (2.0, 5.0, 8.0)
    with pytest.raises(ValueError, match="samples must be at least one"):
        quantiles([])


def test_rates_are_per_second() -> None:
    assert rates(WORK, median_us=1e6) == pytest.approx((3e-6, 2e-6))


def test_the_plan_covers_every_operator_small_and_real() -> None:
    names = [check.name for check in CHECKS]
    assert len(names) == len(set(names))
    operators = {check.op for check in CHECKS}
    assert operators == {
        "broadcast_gemm", "broadcast_token_gemm", "fm_block", "broadcast_attention", "lowp_linear", "grouped_gemm",
        "horizontal_linear", "segmented_topk", "jagged_attention", "gdpa", "jagged_norm",
    }  # fmt: skip
    for op in operators:
        assert {check.is_timed for check in CHECKS if check.op == op} == {True, False}
    assert max(len(name) for name in names) <= 62


SMALL = [check for check in CHECKS if not check.is_timed]


@pytest.mark.interpret
@pytest.mark.parametrize("check", [pytest.param(check, id=check.name) for check in SMALL])
def test_small_checks_hold_in_the_interpreter(check: Check) -> None:
    (row,) = _run([check])
    assert row.ok, row.as_line()


@pytest.mark.parametrize("op", sorted({check.op for check in CHECKS}))
def test_torch_forms_answer_what_is_expected(op: str) -> None:
    # The time of a torch form says something only if it does the same work; jagged attention has none.
    torch.manual_seed(0)
    check = next(check for check in SMALL if check.op == op)
    prepared = check.make(CPU)
    truth, _ = prepared.expected()
    assert prepared.unfused().shape == truth.shape


def test_without_a_gpu_the_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert command.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert command.main([]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "status"), [(0.0, 0), (1.0, 1)])
def test_the_command_writes_rows_and_its_status_says_whether_all_is_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, error: float, status: int
) -> None:
    def stand_in(*_: Any, **__: Any) -> list[Row]:
        return _run([_check(lambda _: _prepared()), _check(lambda _: _prepared(error=error))])

    monkeypatch.setattr(command, "obstacle", lambda: None)
    monkeypatch.setattr(command, "run_checks", stand_in)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU")
    out = tmp_path / "rows" / "gpu.jsonl"
    assert command.main(["--out", str(out)]) == status
    assert [json.loads(line)["ok"] for line in out.read_text().splitlines()] == [True, status == 0]
    assert f"2 checks, {status} failed" in capsys.readouterr().out
    monkeypatch.setattr(command, "run_checks", lambda *_, **__: [])
    assert command.main(["--only", "nothing"]) == 1
