"""Configuration: frozen pydantic classes beside the code they configure, one complete YAML file a deployment."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from shared.errors import ConfigError


class Config(BaseModel):
    """Base of every configuration class: frozen, unknown keys are errors, values are never coerced from strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, ser_json_inf_nan="strings")

    def digest(self) -> str:
        """Return the first 12 hex digits of the SHA-256 of the resolved configuration."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


ConfigT = TypeVar("ConfigT", bound=Config)


def load_config(cls: type[ConfigT], path: Path, overrides: dict[str, Any] | None = None) -> ConfigT:
    """Read one YAML file into ``cls``.

    Args:
        cls: The configuration class.
        path: YAML file.
        overrides: Dotted names to values that win over the file, e.g. ``{"ingress.replicas": 2}``.

    Raises:
        ConfigError: the file is missing, is not YAML, or breaks a rule; names file, field and value.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(
            f"cannot read configuration {path}: {error.strerror}", field="path", value=str(path)
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}", field="path", value=str(path)) from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold a mapping, has {type(document).__name__}", field="path", value=str(path))
    for dotted, value in (overrides or {}).items():
        _set(document, dotted, value)
    try:
        return cls.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{path}: {field}: {first['msg']} (value {first['input']!r})", field=field, value=repr(first["input"])
        ) from error


def _set(document: dict[str, Any], dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    for name in parents:
        child = document.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{dotted}: {name} is not a section", field=dotted, value=str(value))
        document = child
    document[last] = value
