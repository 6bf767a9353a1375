"""A search at publish time decides what a replica that is free to choose runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.native import NativeStatus, status
from models.execution_config import PrecisionChoice
from models.network import RankingNetwork
from models.random_weights import TINY
from models.tuning import execution_problem, executions_of, tune, tuned_execution


@pytest.fixture(scope="module")
def network() -> RankingNetwork:
    torch.manual_seed(0)
    return RankingNetwork(TINY).requires_grad_(False).eval()


def test_a_replica_takes_what_the_search_chose(network: RankingNetwork, tmp_path: Path) -> None:
    result = tune(network, "float32", tmp_path)
    chosen = tuned_execution(TINY, "float32", tmp_path)
    assert chosen is not None
    assert f"{chosen.backend}_{chosen.precision}" == result.winner
    assert "search:" in chosen.reason
    assert [each.fate for each in result.outcomes].count("chosen") == 1


def test_without_a_search_for_this_very_model_there_is_none(network: RankingNetwork, tmp_path: Path) -> None:
    tune(network, "float32", tmp_path)
    assert tuned_execution(TINY, "auto", tmp_path) is None
    assert tuned_execution(TINY.model_copy(update={"head_width": 9}), "float32", tmp_path) is None
    assert tuned_execution(TINY, "float32", tmp_path / "elsewhere") is None


def test_what_was_found_with_another_native_library_does_not_count(
    network: RankingNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A winner that cannot run any more would keep every replica from starting."""
    tune(network, "auto", tmp_path)
    assert tuned_execution(TINY, "auto", tmp_path) is not None
    other = NativeStatus(not status().available, "changed", None)
    monkeypatch.setattr("models.tuning.status", lambda: other)
    assert tuned_execution(TINY, "auto", tmp_path) is None


@pytest.mark.parametrize("precision", ["auto", "float32", "bfloat16"])
def test_only_executions_of_the_allowed_precision_are_tried(precision: PrecisionChoice) -> None:
    tried = {each.precision for each in executions_of(precision)}
    assert tried == ({"float32", "bfloat16"} if precision == "auto" else {precision})


def test_a_network_whose_packed_form_is_wrong_runs_as_its_modules(
    network: RankingNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault in the fast path: the search finds it before any replica does."""
    import models.execution

    right = models.execution.FusedNetwork.full_pass

    def wrong(*args: object, **kwargs: object) -> torch.Tensor:
        found = right(*args, **kwargs)  # type: ignore[arg-type]
        found[-1] += 1.0
        return found

    monkeypatch.setattr(models.execution.FusedNetwork, "full_pass", wrong)
    result = tune(network, "float32", tmp_path)
    assert result.winner == "reference_float32"
    assert result.outcomes[1].fate == "wrong"


def test_looking_up_needs_no_network_but_searching_does() -> None:
    problem = execution_problem(TINY, "float32")
    with pytest.raises(ValueError, match="network must be given"):
        problem.variants[0].build()
