"""Imports Ray Serve once, its own deprecated ways unheard: warnings are errors here, and these are not ours to mend."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve
    import ray.serve.handle  # noqa: F401
