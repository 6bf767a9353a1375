"""``python -m kernels.native``: build the library into the default folder, and say in one line what came of it."""

from __future__ import annotations

import sys

from kernels.native.build import BuildError, build
from kernels.native.library import status


def main() -> int:
    """Build; where that is not possible PyTorch's own operators are used, so it is no failure.

    Returns:
        0, the exit status.
    """
    try:
        build()
    except BuildError as error:
        sys.stdout.write(
            f"native kernels: not built ({str(error).splitlines()[0]}); PyTorch's own operators are used\n"
        )
        return 0
    found = status()
    note = f"ready ({found.path})" if found.available else f"built, but they cannot run here: {found.reason}"
    sys.stdout.write(f"native kernels: {note}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
