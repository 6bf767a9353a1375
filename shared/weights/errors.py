"""What can be wrong with chunks and deltas, by name.

::

    WeightsError
    ├── ChunkError            a chunk could not be read whole, or is not what the manifest says: another try may help
    └── DeltaError            a delta cannot be used
        ├── DeltaDamagedError     truncated, checksum wrong, not a delta at all
        ├── DeltaBaseError        made for another version
        ├── DeltaRepeatedError    its sequence number was applied already
        ├── DeltaGapError         deltas before it are missing: take a full snapshot
        ├── DeltaForkError        follows another delta than the one that was applied
        ├── DeltaTooLargeError    touches more rows than can be replaced at once: take a full snapshot
        └── DeltaShapeError       names a tensor, type, shape or row that the weights do not have
"""

from __future__ import annotations

from shared.errors import WeightsError


class ChunkError(WeightsError):
    """A chunk was cut short or does not match its checksum; context has ``chunk``, ``expected`` and ``found``."""

    retryable = True


class DeltaError(WeightsError):
    """A delta cannot be used; context has ``version`` (the base) and ``sequence``."""


class DeltaDamagedError(DeltaError):
    """The bytes are not the delta that was written."""


class DeltaBaseError(DeltaError):
    """The delta belongs to another base version."""


class DeltaRepeatedError(DeltaError):
    """The delta was applied already, or its place in the log is taken."""


class DeltaGapError(DeltaError):
    """Deltas are missing; context has ``expected`` and ``found``. The remedy is a full snapshot."""


class DeltaForkError(DeltaError):
    """The delta follows another one than the one that was applied: two writers, or a log that was rewritten."""


class DeltaTooLargeError(DeltaError):
    """The delta touches more blocks than there are spare ones; context has ``limit`` and ``value``."""


class DeltaShapeError(DeltaError):
    """The delta does not fit the weights: unknown tensor, other type or shape, row out of range."""


NEEDS_SNAPSHOT = (DeltaGapError, DeltaForkError, DeltaTooLargeError)
"""After these no later delta helps: only a full version does."""
