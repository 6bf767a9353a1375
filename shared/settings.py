"""Settings from the environment: the only place that reads environment variables.

All are optional; configuration proper lives in YAML files (see ``shared.config``).

| variable | meaning | default |
| --- | --- | --- |
| RANKMESH_VAR_DIR | folder of everything written at run time | var |
| RANKMESH_DATA_DIR | folder of training data | <var>/data |
| RANKMESH_LOG_LEVEL | debug, info, warning, error | info |
| RANKMESH_NATIVE | "0" keeps every kernel on its portable path | 1 |
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """The resolved settings of this process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    var_dir: Path = Path("var")
    data_dir: Path = Path("var/data")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
    native: bool = True


def load_settings() -> Settings:
    """Read the settings from the environment.

    Raises:
        pydantic.ValidationError: a variable has a value that is not allowed.
    """
    var_dir = Path(os.environ.get("RANKMESH_VAR_DIR", "var"))
    return Settings(
        var_dir=var_dir,
        data_dir=Path(os.environ.get("RANKMESH_DATA_DIR", str(var_dir / "data"))),
        log_level=os.environ.get("RANKMESH_LOG_LEVEL", "info").lower(),
        native=os.environ.get("RANKMESH_NATIVE", "1") != "0",
    )


def child_environment(**overrides: str) -> dict[str, str]:
    """Return a copy of this process's environment for a child, with overrides."""
    return {**os.environ, **overrides}


def export(variables: dict[str, str]) -> None:
    """Set environment variables of this process that a library reads at import or start-up (Ray, OpenMP).

    Values that the user has set already win.
    """
    for name, value in variables.items():
        os.environ.setdefault(name, value)
