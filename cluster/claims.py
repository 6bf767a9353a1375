"""What only one mesh may have at a time: a name in a folder, and ports of this machine.

The kernel keeps both, and lets go of them when the process that has them ends, however it ends. A look first and a
start after it would let two starts at one moment both pass.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from shared.errors import ConfigError


class NameClaim:
    """The right to start, or to clean up after, the mesh of one folder; ``fcntl.flock`` on a file that stays.

    Args:
        descriptor: Of the locked file. A process that inherits it has the claim too, until both have closed it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path) -> NameClaim | None:
        """Return the claim, None while another process has it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return cls(descriptor)

    @classmethod
    def inherited(cls, descriptor: int) -> NameClaim:
        """Return the claim that this process was started with; its own children do not get it."""
        os.set_inheritable(descriptor, False)
        return cls(descriptor)

    def fileno(self) -> int:
        """Return the descriptor, for a child that is to have the claim."""
        return self._descriptor

    def release(self) -> None:
        """Let go of it in this process."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class PortClaim:
    """Ports that are a mesh's from before its first program listens on them.

    Each is a name among the machine's abstract Unix sockets, which are apart by network namespace just as ports are.
    Holding the ports themselves would keep the programs of the mesh from them too.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    @classmethod
    def is_free(cls, ports: Iterable[int]) -> bool:
        """Return whether no mesh has any of these ports; one may take them the moment after."""
        claim = cls()
        try:
            claim.take(ports)
        except ConfigError:
            return False
        claim.release()
        return True

    def take(self, ports: Iterable[int]) -> None:
        """Take ports, all or none.

        Raises:
            ConfigError: another mesh has one; names it.
        """
        for port in ports:
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._sockets.append(claim)
            try:
                claim.bind(f"\0rankmesh-port-{port}")
            except OSError as error:
                self.release()
                raise ConfigError(
                    f"port {port} is taken by another mesh: give another --port (http.port)",
                    field="http.port",
                    value=port,
                ) from error

    def release(self) -> None:
        """Let go of all."""
        for claim in self._sockets:
            claim.close()
        self._sockets = []
