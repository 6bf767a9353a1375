"""Configuration: frozen pydantic classes beside the code they configure, one complete YAML file a deployment."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from shared.errors import ConfigError
from shared.log import REDACTED, is_secret, redact_text
from shared.rules import VALUE_CHARS_MAX, broken

FILE_BYTES_MAX: Final = 2**20
"""A larger configuration file is refused before it is parsed."""

VALUES_MAX: Final = 100_000
"""Limit on the values of one file, those behind aliases counted wherever they stand."""

CHARS_PER_VALUE: Final = 64
"""Characters of a text that count as one value more."""

DEPTH_MAX: Final = 64
"""Levels of mappings and lists in one file."""


class Config(BaseModel):
    """Base of every configuration class: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, ser_json_inf_nan="strings")

    def digest(self) -> str:
        """Return the first 12 hex digits of the SHA-256 of the resolved configuration."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


ConfigT = TypeVar("ConfigT", bound=Config)


def load_config(cls: type[ConfigT], path: Path, overrides: dict[str, Any] | None = None) -> ConfigT:
    """Read one YAML file into ``cls``; values are never coerced from another type (``"8000"`` is no port).

    Args:
        cls: The configuration class.
        path: YAML file.
        overrides: Dotted names to values that win over the file, e.g. ``{"ingress.replicas": 2}``.

    Raises:
        ConfigError: the file is missing, is not YAML, or breaks a rule; names file, field and value.
    """
    document = read_document(path)
    for dotted, value in (overrides or {}).items():
        _set(document, dotted, value)
    return validated(cls, document, path, overrides)


def read_document(path: Path) -> dict[str, Any]:
    """Return the mapping of one YAML file, empty when the file is.

    Raises:
        ConfigError: the file is missing or too large, or is not YAML with a mapping.
    """
    try:
        document = yaml.load(_text(path), _Loader)
        _count_values(document, path)
    except OSError as error:
        raise ConfigError(
            f"cannot read configuration {path}: {error.strerror}", field="path", value=str(path)
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason}", field="path", value=str(path)) from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{path} is not valid YAML: {redact_text(str(error))}", field="path", value=str(path)
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply", field="path", value=str(path)) from error
    except ValueError as error:  # an integer of thousands of digits, a date that is none
        raise ConfigError(
            f"{path} holds a value that cannot be read: {error}", field="path", value=str(path)
        ) from error
    document = {} if document is None else document
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold a mapping, has {type(document).__name__}", field="path", value=str(path))
    return document


def _text(path: Path) -> str:
    """Return the text of a file, read no further than its limit."""
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(
            f"{path} must have at most {FILE_BYTES_MAX} bytes", field="path", limit=FILE_BYTES_MAX, value=str(path)
        )
    return data.decode()


def _count_values(document: object, path: Path) -> None:
    """Refuse a document whose aliases make more of it than its file shows."""
    left, waiting = VALUES_MAX, [(document, 0)]
    while waiting:
        value, depth = waiting.pop()
        children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
        left -= len(children) + (len(value) // CHARS_PER_VALUE if isinstance(value, str) else 0)
        if left < 0:
            raise ConfigError(
                f"{path} must hold at most {VALUES_MAX} values, aliases counted wherever they stand",
                field="path",
                limit=VALUES_MAX,
                value=str(path),
            )
        if children and depth == DEPTH_MAX:
            raise ConfigError(
                f"{path} is nested too deeply: the limit is {DEPTH_MAX} levels",
                field="path",
                limit=DEPTH_MAX,
                value=str(path),
            )
        waiting += [(child, depth + 1) for child in children]


def validated(
    cls: type[ConfigT], document: dict[str, Any], path: Path, overrides: dict[str, Any] | None = None
) -> ConfigT:
    """Return the document of a file as ``cls``.

    Args:
        cls: The configuration class.
        document: What the file holds, overrides set.
        path: The file, for messages.
        overrides: Values that are not the file's: it is not blamed for them.

    Raises:
        ConfigError: a rule is broken; names file, field, rule and value.
    """
    try:
        # As JSON: there "strict" knows which texts stand for paths and enums and still takes a list for a tuple.
        return cls.model_validate_json(json.dumps(document, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        value = _shown(first["input"], str(first["loc"][-1]) if first["loc"] else "")
        said = "" if isinstance(first["input"], dict | list) else value  # a whole section says nothing
        words = broken(field, [first], said)
        if first["type"] == "extra_forbidden":
            words = f"{words}{_meant(cls, first['loc'])} (value {value})"
        where = "" if field in (overrides or {}) else f"{path}: "
        raise ConfigError(f"{where}{words}", field=field, value=value) from error


def _shown(value: object, name: str) -> str:
    """Return a value as a message shows it: not what is named like a secret, nor credentials of a URL."""
    text = REDACTED if is_secret(name) and not isinstance(value, int | float) else redact_text(repr(value))
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - 1] + "…"


def _meant(cls: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """Return of which section an unknown name is no field, and which one it resembles."""
    *parents, name = loc
    section: type[BaseModel] | None = cls
    for part in parents:
        if section is not None and part in section.model_fields:
            section = next(_models(section.model_fields[str(part)].annotation), None)
    words = f" of {'.'.join(map(str, parents))}" if parents else ""
    close = get_close_matches(str(name), section.model_fields if section else (), n=1)
    return f"{words}; did you mean {close[0]}?" if close else words


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: no key twice, text keys only, ``1e-3`` is a number and a date is text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.YAMLError(f"field names must be text, has {key!r}{key_node.start_mark}")
            if key in seen:
                raise yaml.YAMLError(f"{key!r} is given twice{key_node.start_mark}")
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    char: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for char, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _set(document: dict[str, Any], dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    for name in parents:
        child = document.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{dotted}: {name} is not a section", field=dotted, value=str(value))
        document = child
    document[last] = value
