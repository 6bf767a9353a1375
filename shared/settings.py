"""Settings from the environment: the only place that reads environment variables.

All are optional; configuration proper lives in YAML files (see ``shared.config``).

| variable | meaning | default |
| --- | --- | --- |
| RANKMESH_VAR_DIR | folder of everything written at run time | var |
| RANKMESH_DATA_DIR | folder of training data | <var>/data |
| RANKMESH_LOG_LEVEL | debug, info, warning, error | info |
| RANKMESH_TOKENS_FILE | tokens that a mesh started here accepts, where its configuration names no file | none |
| RANKMESH_TOKEN | token that the command line sends | none |
| RANKMESH_TOKEN_FILE | file with that token, where RANKMESH_TOKEN is not set | none |
| RANKMESH_CA_FILE | certificates that the command line trusts beside the system's | none |
| RANKMESH_CLOCK_SKEW_DIR | for trials: in its files ``<pid>`` stands by how much the process's clock is wrong | none |

``RANKMESH_NATIVE=0`` keeps every kernel on its portable path; ``kernels.backends``, which imports nothing, reads it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from shared.errors import ConfigError


class Settings(BaseModel):
    """The resolved settings of this process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    var_dir: Path = Path("var")
    data_dir: Path = Path("var/data")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
    tokens_file: Path | None = None
    token: SecretStr | None = None
    token_file: Path | None = None
    ca_file: Path | None = None
    clock_skew_dir: Path | None = None

    def client_token(self) -> str | None:
        """Return the token that a client sends, without the space around it; None when there is none.

        Raises:
            ConfigError: its file cannot be read, it is empty, or no header can carry it; never says what it holds.
        """
        if self.token is not None:
            where, token = "RANKMESH_TOKEN", self.token.get_secret_value()
        elif self.token_file is not None:
            where, token = "RANKMESH_TOKEN_FILE", self._text_of(self.token_file)
        else:
            return None
        said = where if self.token is not None else str(self.token_file)
        if not (token := token.strip()):
            raise ConfigError(f"{said} is empty", field=where, value=said)
        if re.fullmatch(r"[\x21-\x7e]+", token) is None:
            raise ConfigError(f"{said} must hold one token, of visible ASCII characters", field=where, value=said)
        return token

    def _text_of(self, path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the token in {path}: {type(error).__name__}",
                field="RANKMESH_TOKEN_FILE", value=str(path),
            ) from error  # fmt: skip


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
        tokens_file=_path("RANKMESH_TOKENS_FILE"),
        token=SecretStr(token) if (token := os.environ.get("RANKMESH_TOKEN")) else None,
        token_file=_path("RANKMESH_TOKEN_FILE"),
        ca_file=_path("RANKMESH_CA_FILE"),
        clock_skew_dir=_path("RANKMESH_CLOCK_SKEW_DIR"),
    )


def _path(name: str) -> Path | None:
    text = os.environ.get(name)
    return Path(text) if text else None


def child_environment(**overrides: str) -> dict[str, str]:
    """Return a copy of this process's environment for a child, with overrides; the client's token is not handed on."""
    kept = {name: value for name, value in os.environ.items() if name != "RANKMESH_TOKEN"}
    return {**kept, **overrides}


def export(variables: dict[str, str]) -> None:
    """Set environment variables of this process that a library reads at import or start-up (Ray, OpenMP).

    Values that the user has set already win.
    """
    for name, value in variables.items():
        os.environ.setdefault(name, value)
