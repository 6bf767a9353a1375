"""The check that every station makes on what it is given: this request's, and of one weights version."""

from __future__ import annotations

from collections.abc import Iterable

from shared.errors import VersionMismatchError
from shared.schema.stamp import Stamp, check_version


def check_stamps(stamps: Iterable[Stamp], request_id: str, version: str, station: str) -> None:
    """Refuse inputs of another request or another weights version: a wrong answer is worse than none.

    Raises:
        VersionMismatchError: names the station and replica that the foreign input came from.
    """
    for stamp in stamps:
        check_version(stamp.version, version, f"{stamp.station} ({stamp.replica})")
        if stamp.request_id != request_id:
            raise VersionMismatchError(
                f"{stamp.station} ({stamp.replica}) brought request {stamp.request_id} to {station} for {request_id}",
                asked=request_id, held=stamp.request_id, station=stamp.station,
            )  # fmt: skip
