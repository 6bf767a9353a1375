"""What a mesh may be called and where it may listen; apart from the configuration, so that ``--help`` loads no more."""

from __future__ import annotations

PORTS_PER_MESH = 64
"""A mesh uses the ports from ``http.port`` up to this many."""

PORT_MIN = 1_024
"""Lowest ``http.port``: those below are the system's."""

PORT_MAX = 65_535 - PORTS_PER_MESH
"""Highest ``http.port``."""

NAME_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,31}$"
"""A name is a folder, a prefix of keys and a label."""

NAME_RULE = "must be 1 to 32 of a-z, 0-9, _ and -, the first one a letter or a digit"

NAMESPACE_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}$"
"""Of a network namespace: it is the name of a file."""

ADDRESS_PATTERN = r"^\d{1,3}(\.\d{1,3}){3}$"
"""Of a Ray node."""
