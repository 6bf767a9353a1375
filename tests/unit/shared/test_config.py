"""Configuration files: what is accepted, and what the error names."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field, ValidationError

from shared.config import DEPTH_MAX, FILE_BYTES_MAX, VALUES_MAX, Config, load_config
from shared.errors import ConfigError


class Mode(StrEnum):
    FAST = "fast"


class Part(Config):
    replicas: int = Field(1, ge=1)
    timeout_s: float = 1.0


class Sample(Config):
    name: str = "mesh"
    port: int = 8_000
    enabled: bool = True
    limit_ms: float = 5.0
    tiers: tuple[str, ...] = ("full",)
    folder: Path = Path("var")
    mode: Mode = Mode.FAST
    part: Part = Part()
    parts: dict[str, Part] = Field(default_factory=dict)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mesh.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path, overrides: dict[str, Any] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(Sample, path, overrides)
    return caught.value


def test_a_file_with_every_kind_of_field(tmp_path: Path) -> None:
    text = """
    name: a
    port: 9000
    enabled: false
    limit_ms: 7
    tiers: [light, full]
    folder: /tmp/x
    mode: fast
    part: {replicas: 3, timeout_s: 1e-3}
    parts: {light: {timeout_s: .5}}
    """
    config = load_config(Sample, write(tmp_path, text))
    assert config == Sample(
        name="a",
        port=9_000,
        enabled=False,
        limit_ms=7.0,
        tiers=("light", "full"),
        folder=Path("/tmp/x"),
        part=Part(replicas=3, timeout_s=0.001),
        parts={"light": Part(timeout_s=0.5)},
    )


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load_config(Sample, write(tmp_path, "")) == Sample()
    assert load_config(Sample, write(tmp_path, "# nothing\n")) == Sample()


def test_a_date_is_text(tmp_path: Path) -> None:
    assert load_config(Sample, write(tmp_path, "name: 2026-11-29")).name == "2026-11-29"


@pytest.mark.parametrize(
    "text",
    [
        "part: {password: s3cr3t}", "part: {tls_passphrase: s3cr3t}", "api_key: s3cr3t", "token: [s3cr3t]",
        "parts: {x: {secret: {a: s3cr3t}}}", "part: 's3://AKIA:s3cr3t/bucket'", "part: 'gs://AKIA:s3cr3t'",
        "part: 'redis://:s3cr3t@host", "a: {b: redis://u:s3cr3t@host}\n\tx: 1",
    ],
)  # fmt: skip
def test_no_mistake_shows_what_is_named_like_a_secret_or_is_part_of_a_url(text: str, tmp_path: Path) -> None:
    error = refused(write(tmp_path, text))
    assert "s3cr3t" not in error.message + str(error.context)


def test_the_error_shows_no_credentials(tmp_path: Path) -> None:
    error = refused(write(tmp_path, "port: redis://user:hunter2@host"))
    assert "hunter2" not in f"{error} {error.context}"


def test_overrides_win(tmp_path: Path) -> None:
    path = write(tmp_path, "part: {replicas: 3}\nname: a")
    config = load_config(Sample, path, {"part.replicas": 5, "part.timeout_s": 2.0, "name": "b", "parts.x.replicas": 2})
    assert config.part == Part(replicas=5, timeout_s=2.0)
    assert config.name == "b"
    assert config.parts == {"x": Part(replicas=2)}
    assert load_config(Sample, path, {"folder": Path("elsewhere")}).folder == Path("elsewhere")
    assert refused(path, {"name.first": "x"}).context["field"] == "name.first"


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("prot: 9000", "prot", "9000"),
        ("part: {replica: 3}", "part.replica", "3"),
        ("part: {replicas: 0}", "part.replicas", "0"),
        ("port: nine", "port", "'nine'"),
        ("parts: {x: {replicas: -1}}", "parts.x.replicas", "-1"),
        ("mode: slow", "mode", "'slow'"),
        # Values are never coerced from strings or other types.
        ("port: '9000'", "port", "'9000'"),
        ("port: 9000.0", "port", "9000.0"),
        ("port: true", "port", "True"),
        ("enabled: 'yes'", "enabled", "'yes'"),
        ("enabled: 1", "enabled", "1"),
        ("limit_ms: '7'", "limit_ms", "'7'"),
        ("name: 7", "name", "7"),
        ("tiers: full", "tiers", "'full'"),
    ],
)
def test_the_error_names_field_and_value(tmp_path: Path, text: str, field: str, value: str) -> None:
    path = write(tmp_path, text)
    error = refused(path)
    assert error.context == {"field": field, "value": value}
    assert str(path) in str(error)
    assert field in str(error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("part: {replicas: 0}", "part.replicas must be at least 1, is 0"),
        ("part: {replica: 3}", "part.replica is not a field of part; did you mean replicas? (value 3)"),
        ("parts: {x: {timeout: 3}}", "parts.x.timeout is not a field of parts.x; did you mean timeout_s? (value 3)"),
        ("prot: 9000", "prot is not a field; did you mean port? (value 9000)"),
        ("zzz: 1", "zzz is not a field (value 1)"),
    ],
)
def test_the_rule_is_told_in_plain_words(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    assert str(refused(path)) == f"{path}: {words}"


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    error = refused(write(tmp_path, f"prot: {list(range(100))}"))
    assert len(str(error.context["value"])) == 60
    assert str(error).endswith("…)")


def test_the_file_is_not_blamed_for_what_was_given_over_it(tmp_path: Path) -> None:
    path = write(tmp_path, "part: {replicas: 3}")
    assert str(refused(path, {"part.replicas": 0})) == "part.replicas must be at least 1, is 0"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a: [1", "not valid YAML"),
        (b"a: \xff\xfe", "not UTF-8"),
        (b"- 1\n- 2", "must hold a mapping, has list"),
        (b"text", "must hold a mapping, has str"),
        (b"1: 2", "field names must be text, has 1"),
        (b"port: 1\nname: a\nport: 2", "'port' is given twice"),
        (b"part:\n  replicas: 1\n  replicas: 2", "'replicas' is given twice"),
        (b"[]", "must hold a mapping, has list"),
        (b"false", "must hold a mapping, has bool"),
        (b"name: !!python/object:os.system {}", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_bytes(content)
    assert reason in str(refused(path))


@pytest.mark.parametrize("leaf", ["[x, x, x, x, x, x, x, x, x, x]", "{a: 1, b: 2, c: 3, d: 4, e: 5, f: 6, g: 7}"])
def test_aliases_are_counted_wherever_they_stand(tmp_path: Path, leaf: str) -> None:
    levels = [f"a0: &a0 {leaf}", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12))]
    assert "must hold at most 100000 values" in refused(write(tmp_path, "\n".join(levels))).message


def test_an_alias_of_itself_ends(tmp_path: Path) -> None:
    assert refused(write(tmp_path, "tiers: &a [*a]")).context["limit"] == DEPTH_MAX
    chain = "\n".join(["a0: &a0 [1]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 400))])
    assert "nested too deeply" in refused(write(tmp_path, chain)).message


def test_an_integer_of_thousands_of_digits(tmp_path: Path) -> None:
    assert "cannot be read" in refused(write(tmp_path, f"port: {'1' * 5_000}")).message


def test_a_file_is_read_no_further_than_its_limit(tmp_path: Path) -> None:
    for path in (Path("/dev/zero"), write(tmp_path, "# " + "x" * FILE_BYTES_MAX)):
        assert refused(path).context["limit"] == FILE_BYTES_MAX


def test_a_long_text_behind_many_aliases(tmp_path: Path) -> None:
    text = f"name: &a {'x' * 100_000}\ntiers: [{', '.join(['*a'] * 1_000)}]"
    assert refused(write(tmp_path, text)).context["limit"] == VALUES_MAX


def test_a_missing_file(tmp_path: Path) -> None:
    error = refused(tmp_path / "none.yaml")
    assert "No such file" in str(error)
    assert error.context["field"] == "path"
    assert "Is a directory" in str(refused(tmp_path))


def test_a_configuration_is_frozen_and_closed() -> None:
    config = Sample()
    with pytest.raises(ValidationError, match="frozen"):
        config.port = 1  # type: ignore[misc]
    with pytest.raises(ValidationError, match="extra"):
        Sample.model_validate({"prot": 1})


def test_the_digest_follows_the_values_alone() -> None:
    digest = Sample().digest()
    assert digest == Sample(port=8_000, part=Part(replicas=1)).digest()
    assert digest != Sample(port=8_001).digest()
    assert digest != Sample(part=Part(timeout_s=1.5)).digest()
    one, two = Part(replicas=1), Part(replicas=2)
    assert Sample(parts={"a": one, "b": two}).digest() == Sample(parts={"b": two, "a": one}).digest()
    assert len(digest) == 12
    assert int(digest, 16) >= 0
    assert Sample(limit_ms=float("inf")).digest() != digest  # infinity has a JSON form too


def test_a_resolved_configuration_can_be_loaded_again(tmp_path: Path) -> None:
    config = Sample(port=9, parts={"x": Part(replicas=2)})
    path = write(tmp_path, yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(Sample, path).digest() == config.digest()
