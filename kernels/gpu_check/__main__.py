"""Run all checks on the first GPU, print a table, write rows; or print what a device allows at best."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from kernels.backends import interpreting
from kernels.gpu_check.cases import all_checks
from kernels.gpu_check.measure import run_checks
from kernels.gpu_check.rows import HEADER

SEED = 20_261_129
LIMIT_S = 270.0
"""Then nothing more is timed, which leaves time to check the rest within six minutes."""


def obstacle() -> str | None:
    """Say why the checks cannot run on this machine, None if they can."""
    if interpreting():
        return "TRITON_INTERPRET is set: kernels would run on the CPU; unset it"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device; `make kernels` interprets the kernels on a CPU instead"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        return f"compute capability {major}.{minor} has no FP8; the kernels need at least 8.9"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Run the command: 0 all right, 1 some check failed, 2 nothing can run here."""
    parser = argparse.ArgumentParser(prog="python -m kernels.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, help="write one JSON row a check to this file")
    parser.add_argument("--only", default="", help="run operators whose name starts so")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="stop timing after so many seconds")
    parser.add_argument("--roofline", action="store_true", help="print every kernel's roofline; needs no GPU")
    parser.add_argument("--write", action="store_true", help="with --roofline: renew the READMEs and the picture")
    options = parser.parse_args(arguments)
    if options.write and (not options.roofline or options.only):
        parser.error("--write goes with --roofline, and without --only")
    if options.roofline:
        return _roofline(options.only, is_written=options.write)
    reason = obstacle()
    if reason is not None:
        sys.stderr.write(f"gpu-check: {reason}\n")
        return 2
    import triton

    rows = run_checks(
        [check for check in all_checks() if check.op.startswith(options.only)],
        torch.device("cuda"),
        device_name=torch.cuda.get_device_name(),
        versions=f"torch {torch.__version__}, triton {triton.__version__}",
        seed=SEED,
        limit_s=options.limit_s,
    )
    sys.stdout.write(f"{HEADER}\n")
    num_rows = num_wrong = 0
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    # Written one by one: what was found stays if a later kernel hangs.
    with nullcontext() if options.out is None else options.out.open("w") as file:
        for row in rows:
            sys.stdout.write(f"{row.as_line()}\n")
            sys.stdout.flush()
            if file is not None:
                file.write(f"{row.as_json()}\n")
                file.flush()
            num_rows += 1
            num_wrong += not row.ok
    sys.stdout.write(f"{num_rows} checks, {num_wrong} failed\n")
    return 1 if num_wrong or not num_rows else 0


def _roofline(only: str, *, is_written: bool) -> int:
    from kernels.roofline.pages import pages, write
    from kernels.roofline.tables import all_tables, lines

    tables = all_tables()
    chosen = {name: table for name, table in tables.items() if name.startswith(only)}
    if not chosen:
        sys.stderr.write(f"gpu-check: no kernel's name starts with {only!r}; there are {', '.join(sorted(tables))}\n")
    for line in lines(chosen):
        sys.stdout.write(f"{line}\n")
    if is_written:
        for path in write(pages(tables)):
            sys.stdout.write(f"wrote {path}\n")
    return 0 if chosen else 1


if __name__ == "__main__":
    raise SystemExit(main())
