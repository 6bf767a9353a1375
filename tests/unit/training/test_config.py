"""Training configurations: the shipped ones load, and mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import ConfigError
from training.config import load_train_config

_CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs" / "train").glob("*.yaml"))


@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_load(path: Path) -> None:
    config = load_train_config(path)
    assert config.name == path.stem
    assert config.dataset == "ml-1m"


def test_quick_is_shipped() -> None:
    assert "quick" in [path.stem for path in _CONFIGS]


def test_model_file_is_relative_to_the_run(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text("width: 16\n")
    (tmp_path / "run.yaml").write_text("name: run\nmodel: model.yaml\n")
    assert load_train_config(tmp_path / "run.yaml").model.width == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: run\nmodel: absent.yaml\n", "absent.yaml"),
        ("name: run\nbatch_rows: 0\n", "batch_rows"),
        ("name: run\nunheard_of: 1\n", "unheard_of"),
        ("- 1\n", "mapping"),
        ("name: [\n", "not valid YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_train_config(tmp_path / "run.yaml")


def test_a_mistake_is_one_line_of_plain_words_and_blames_the_file_that_it_is_in(tmp_path: Path) -> None:
    run, model = tmp_path / "run.yaml", tmp_path / "model.yaml"
    run.write_text("name: run\nbatch_rows: 0\n")
    with pytest.raises(ConfigError) as caught:
        load_train_config(run)
    assert str(caught.value) == f"{run}: batch_rows must be at least 1, is 0"
    run.write_text("name: run\nmodel: model.yaml\n")
    model.write_text("widht: 16\n")
    with pytest.raises(ConfigError) as caught:
        load_train_config(run)
    assert str(caught.value) == f"{model}: widht is not a field; did you mean width? (value 16)"
