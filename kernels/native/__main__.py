"""``python -m kernels.native``: build the library into the default folder, and say in one line what came of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kernels.native.build import BuildError, build
from kernels.native.library import status


def main(arguments: list[str] | None = None) -> int:
    """Build; where that is not possible PyTorch's own operators are used, so it is no failure.

    Args:
        arguments: ``--stamp FILE``: a file that is touched when the library is built, and only then.

    Returns:
        0, the exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m kernels.native", description=__doc__)
    parser.add_argument("--stamp", type=Path, help="file to touch when the library is built")
    stamp: Path | None = parser.parse_args(arguments).stamp
    try:
        build()
    except BuildError as error:
        sys.stdout.write(
            f"native kernels: not built ({str(error).splitlines()[0]}); PyTorch's own operators are used\n"
        )
        return 0
    if stamp is not None:
        stamp.touch()
    found = status()
    note = f"ready ({found.path})" if found.available else f"built, but they cannot run here: {found.reason}"
    sys.stdout.write(f"native kernels: {note}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
