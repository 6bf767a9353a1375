"""Imports Ray Serve once, its own deprecated ways unheard, as for the tests of ``cluster``."""

from __future__ import annotations

import tests.unit.cluster.conftest  # noqa: F401
