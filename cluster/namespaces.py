"""Network namespaces of this machine: into which a process moves before it opens anything."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

from shared.errors import ConfigError

FOLDER: Final = Path("/run/netns")
"""Where ``ip netns`` keeps those that have a name."""

_CLONE_NEWNET: Final = 0x40000000


def enter(namespace: Path) -> None:
    """Move the calling thread into a network namespace; threads and processes that it starts from then on follow.

    Args:
        namespace: ``FOLDER / name``, or ``/proc/<pid>/ns/net``.

    Raises:
        ConfigError: there is none, or this process may not (that takes root, or ``CAP_SYS_ADMIN``).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        handle = os.open(namespace, os.O_RDONLY)
        try:
            if libc.setns(handle, _CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        finally:
            os.close(handle)
    except OSError as error:
        message = f"cannot enter the network namespace {namespace}: {error.strerror}"
        raise ConfigError(message, field="namespace", value=str(namespace)) from error
