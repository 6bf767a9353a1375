"""The environment variables of rankmesh."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

import shared.settings
from shared.errors import ConfigError
from shared.settings import Settings, child_environment, export, load_settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("RANKMESH_"):
            monkeypatch.delenv(name)


def test_defaults() -> None:
    assert load_settings() == Settings(var_dir=Path("var"), data_dir=Path("var/data"), log_level="info")


def test_every_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"VAR_DIR": "/v", "DATA_DIR": "/d", "LOG_LEVEL": "DEBUG"}.items():
        monkeypatch.setenv(f"RANKMESH_{name}", value)
    assert load_settings() == Settings(var_dir=Path("/v"), data_dir=Path("/d"), log_level="debug")


def test_where_tokens_and_certificates_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKENS_FILE", "TOKEN_FILE", "CA_FILE"):
        monkeypatch.setenv(f"RANKMESH_{name}", f"/{name}")
    found = load_settings()
    assert (found.tokens_file, found.token_file, found.ca_file) == (
        Path("/TOKENS_FILE"), Path("/TOKEN_FILE"), Path("/CA_FILE")
    )  # fmt: skip
    monkeypatch.setenv("RANKMESH_TOKEN", "secret-of-mine")
    assert load_settings().client_token() == "secret-of-mine"
    assert "secret-of-mine" not in repr(load_settings())


@pytest.mark.parametrize("around", ["", "\n", " ", "\r\n", "\t"])
def test_a_token_is_sent_without_the_space_around_it(around: str, tmp_path: Path) -> None:
    text = f"{around}secret-of-mine{around}"
    path = tmp_path / "token"
    path.write_bytes(text.encode("utf-8-sig"))
    for settings in (Settings(token=SecretStr(text)), Settings(token_file=path)):
        assert settings.client_token() == "secret-of-mine"


@pytest.mark.parametrize(
    "text", ["secret-of-mine\nanother-of-mine", "secret of-mine", "secret-of-mine\u00e9", " ", "\x00"]
)
def test_what_no_header_can_carry_is_no_token_and_is_not_shown(text: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(text, encoding="utf-8")
    for settings in (Settings(token=SecretStr(text)), Settings(token_file=path)):
        with pytest.raises(ConfigError, match=r"must hold one token|is empty") as caught:
            settings.client_token()
        assert "of-mine" not in caught.value.message + str(caught.value.context)
        assert str(caught.value.context["field"]).startswith("RANKMESH_TOKEN")


def test_data_lies_in_the_var_folder_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKMESH_VAR_DIR", "/v")
    assert load_settings().data_dir == Path("/v/data")


def test_a_wrong_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKMESH_LOG_LEVEL", "loud")
    with pytest.raises(ValidationError, match="log_level"):
        load_settings()


def test_the_table_lists_every_variable_that_is_read() -> None:
    source = Path(shared.settings.__file__).read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| (RANKMESH_\w+) \|", source, re.MULTILINE))
    read = set(re.findall(r'"(RANKMESH_\w+)"', source))
    assert listed == read
    assert listed


def test_a_child_gets_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKMESH_TEST", "mine")
    environment = child_environment(RANKMESH_TEST="theirs", RANKMESH_OTHER="x")
    assert environment["RANKMESH_TEST"] == "theirs"
    assert environment["RANKMESH_OTHER"] == "x"
    assert environment["PATH"] == os.environ["PATH"]
    assert os.environ["RANKMESH_TEST"] == "mine"
    assert "RANKMESH_OTHER" not in os.environ


def test_what_the_user_has_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKMESH_TEST", "user")
    monkeypatch.setenv("RANKMESH_TEST_2", "x")
    monkeypatch.delenv("RANKMESH_TEST_2")  # so that it is removed again after the test
    export({"RANKMESH_TEST": "ours", "RANKMESH_TEST_2": "ours"})
    assert os.environ["RANKMESH_TEST"] == "user"
    assert os.environ["RANKMESH_TEST_2"] == "ours"
