"""The facade: by name, and the announced fall-back."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from shared.errors import ConfigError, DataUnavailableError
from training.data import DatasetName, SyntheticConfig, load_dataset

TINY = SyntheticConfig(num_events=500, num_users=30, num_ads=20, num_groups=4)


@pytest.fixture
def blocked_dir(tmp_path: Path) -> Path:
    """Return a data folder that cannot be made: nothing can be fetched into it."""
    (tmp_path / "file").write_text("in the way")
    return tmp_path / "file" / "data"


def test_the_synthetic_log_needs_no_folder(tmp_path: Path) -> None:
    dataset = load_dataset("synthetic", tmp_path / "nowhere", seed=4, synthetic=TINY)
    assert (dataset.name, len(dataset.log)) == ("synthetic", 500)
    assert "seed 4" in dataset.provenance
    assert not (tmp_path / "nowhere").exists()


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ml-20m"):
        load_dataset(cast("DatasetName", "ml-20m"), tmp_path)


def test_movielens_that_cannot_be_had_is_an_error(blocked_dir: Path) -> None:
    with pytest.raises(DataUnavailableError, match="cannot write the data folder"):
        load_dataset("ml-1m", blocked_dir, synthetic=TINY)


def test_the_fallback_says_what_it_stands_for_and_why(blocked_dir: Path) -> None:
    dataset = load_dataset("ml-1m", blocked_dir, synthetic=TINY, synthetic_fallback=True)
    assert (dataset.name, len(dataset.log)) == ("synthetic", 500)
    assert "in place of ml-1m: cannot write the data folder" in dataset.provenance
