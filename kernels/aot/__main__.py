"""Compile all kernels and print what they use as one JSON object, or write it as the golden file."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from kernels.aot.case import AotCase
from kernels.aot.compile import compile_case

OPERATORS = (
    "broadcast_gemm",
    "fm_block",
    "broadcast_attention",
    "lowp_linear",
    "grouped_gemm",
    "segmented_topk",
    "horizontal_linear",
    "jagged_attention",
    "gdpa",
    "jagged_norm",
)
GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden" / "kernels_sm90.json"


def all_cases() -> list[AotCase]:
    """Return the cases of every operator.

    Raises:
        ValueError: two cases have one name.
    """
    cases: list[AotCase] = []
    for operator in OPERATORS:
        cases += importlib.import_module(f"kernels.{operator}.triton_kernel").AOT_CASES
    names = [case.name for case in cases]
    if len(names) != len(set(names)):
        raise ValueError(f"case names must differ, are {sorted(names)}")
    return cases


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=__doc__)
    parser.add_argument("--update", action="store_true", help=f"write {GOLDEN.name} instead of printing")
    parser.add_argument("--only", default="", help="compile cases whose name starts so")
    options = parser.parse_args(arguments)
    if options.update and options.only:
        parser.error("--update writes every case: it cannot go with --only")
    cases = [case for case in all_cases() if case.name.startswith(options.only)]
    found = {case.name: compile_case(case).as_dict() | {"tensor_cores": case.tensor_cores} for case in cases}
    text = json.dumps(found, indent=2, sort_keys=True) + "\n"
    if options.update:
        GOLDEN.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
