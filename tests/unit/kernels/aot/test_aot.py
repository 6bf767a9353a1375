"""Triton kernels compiled for sm_90: no spills, shared memory within bounds, tensor cores, no silent change."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[4]
GOLDEN = REPOSITORY / "tests" / "golden" / "kernels_sm90.json"
SHARED_BYTES_MAX = 232_448
REGISTERS_MAX = 255
REGISTER_TOLERANCE = 8
"""ptxas gives registers in steps of 8 once warp groups are used; one step may come from a source line that moved."""
TIMEOUT_S = 300

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def _compiled() -> dict[str, Any]:
    """Compile in a child: this process interprets kernels, and triton decides that once, at its import."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "kernels.aot"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _differences(found: dict[str, Any], golden: dict[str, Any]) -> list[str]:
    """Say where kernels differ from the golden file; ``python -m kernels.aot --update`` writes it again."""
    wrong = [f"{name}: only on one side" for name in sorted(found.keys() ^ golden.keys())]
    for name in sorted(found.keys() & golden.keys()):
        for field, value in golden[name].items():
            seen = found[name][field]
            same = abs(seen - value) <= REGISTER_TOLERANCE if field == "regs" else seen == value
            if not same:
                wrong.append(f"{name}.{field}: {seen}, golden {value}")
    return wrong


def _broken_rules(found: dict[str, Any]) -> list[str]:
    wrong = []
    for name, used in found.items():
        if used["spill_bytes"] != 0:
            wrong.append(f"{name} spills {used['spill_bytes']} bytes")
        if used["shared_bytes"] > SHARED_BYTES_MAX:
            wrong.append(f"{name} takes {used['shared_bytes']} bytes of shared memory, at most {SHARED_BYTES_MAX}")
        if used["regs"] > REGISTERS_MAX:
            wrong.append(f"{name} takes {used['regs']} registers, at most {REGISTERS_MAX}")
        if used["tensor_cores"] is not None and used[used["tensor_cores"]] == 0:
            wrong.append(f"{name} has no {used['tensor_cores'].upper()} instruction")
    return wrong


# One test, not one a kernel: xdist would spread them, and every worker would compile everything. 42 s of CPU with an
# empty compiler cache, 8 s with a full one: a lane of its own, `pytest -m slow tests/unit/kernels/aot`.
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_kernels_compile_for_sm90_within_bounds_and_as_recorded() -> None:
    found = _compiled()
    assert _broken_rules(found) == []
    assert _differences(found, json.loads(GOLDEN.read_text())) == []


_USED: dict[str, Any] = {
    "regs": 128, "spill_bytes": 0, "shared_bytes": 98304, "hgmma": 4, "qgmma": 0, "hmma": 0, "tensor_cores": "hgmma",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spill_bytes": 8}, "spills 8 bytes"),
        ({"shared_bytes": SHARED_BYTES_MAX + 1}, "bytes of shared memory"),
        ({"regs": REGISTERS_MAX + 1}, "registers"),
        ({"hgmma": 0}, "no HGMMA instruction"),
    ],
)
def test_a_broken_rule_is_found(change: dict[str, Any], message: str) -> None:
    (wrong,) = _broken_rules({"kernel": _USED | change})
    assert message in wrong


@pytest.mark.parametrize(
    ("change", "num_differences"),
    [({}, 0), ({"regs": 128 + REGISTER_TOLERANCE}, 0), ({"regs": 129 + REGISTER_TOLERANCE}, 1), ({"hgmma": 8}, 1)],
)
def test_a_change_is_found(change: dict[str, Any], num_differences: int) -> None:
    assert len(_differences({"kernel": _USED | change}, {"kernel": _USED})) == num_differences
    assert _differences({}, {"kernel": _USED}) == ["kernel: only on one side"]


def test_an_interpreted_kernel_is_refused() -> None:
    from kernels.aot.compile import compile_case
    from kernels.broadcast_gemm.triton_kernel import AOT_CASES

    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        compile_case(AOT_CASES[0])
