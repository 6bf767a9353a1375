"""The stamp on every message between stations: whose it is, which weights made it, how long it took."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import VersionMismatchError


@dataclass(frozen=True, slots=True)
class Stamp:
    """Provenance of a message.

    Args:
        request_id: The request it belongs to.
        version: Weights version that produced it.
        station: Deployment that produced it, e.g. ``embedding:1``.
        replica: Replica of that deployment.
        compute_ms: Milliseconds spent computing it, without waiting and transport.
    """

    request_id: str
    version: str
    station: str
    replica: str
    compute_ms: float


def check_version(asked: str, held: str, station: str) -> None:
    """Refuse to mix weights versions.

    Raises:
        VersionMismatchError: ``asked`` differs from ``held``.
    """
    if asked != held:
        raise VersionMismatchError(
            f"{station} holds weights {held}, asked for {asked}", asked=asked, held=held, station=station
        )
