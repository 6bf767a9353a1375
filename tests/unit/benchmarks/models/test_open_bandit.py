"""Two policies' logs of one world: what each says of the other meets the other's own click rate, or shows why not."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from benchmarks.models import open_bandit
from benchmarks.record import Measurement
from benchmarks.registry import BENCHMARKS, BenchmarkOptions
from shared.errors import DataUnavailableError
from training.policy_value import Floats

RATES = np.array([0.05, 0.2, 0.6])
"""Chance of a click by item; at the second position half of it."""

EVEN, BTS = np.full(3, 1 / 3), np.array([0.15, 0.25, 0.6])
HEADER = ",timestamp,item_id,position,click,propensity_score,user_feature_0"


def write_log(folder: Path, policy: str, chances: Floats, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for campaign in open_bandit.CAMPAIGNS:
        items = rng.choice(3, size=2_000, p=chances)
        positions = rng.integers(1, 3, size=len(items))
        clicks = (rng.random(len(items)) < RATES[items] / positions).astype(int)
        rows = [
            f"{row},2019-11-24 00:00:00+00:00,{item},{position},{click},{chances[item]},x"
            for row, (item, position, click) in enumerate(zip(items, positions, clicks, strict=True))
        ]
        write(folder, policy, campaign, [HEADER, *rows])


def write(folder: Path, policy: str, campaign: str, lines: list[str]) -> Path:
    path = folder / open_bandit.FOLDER / policy / campaign / f"{campaign}.csv.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANKMESH_DATA_DIR", str(tmp_path))
    write_log(tmp_path, "random", EVEN, 1)
    write_log(tmp_path, "bts", BTS, 2)
    return tmp_path


def run() -> dict[str, Measurement]:
    return {each.metric: each for each in open_bandit.run(BenchmarkOptions()).measurements}


@pytest.mark.usefixtures("folder")
def test_each_log_says_what_the_other_policy_gave() -> None:
    figures = run()
    assert set(BENCHMARKS["open_bandit"].metrics) == set(figures)
    for name, figure in figures.items():
        assert abs(float(figure.params["z"])) < 4, name
        assert figure.params["weight_mean"] == pytest.approx(1.0, abs=0.1), name
    for campaign in open_bandit.CAMPAIGNS:
        weighted, robust = figures[f"ips_bts_{campaign}"], figures[f"dr_bts_{campaign}"]
        assert weighted.value > 1.3 * figures[f"ips_uniform_{campaign}"].value, "the policies differ"
        assert float(robust.params["standard_error"]) < float(weighted.params["standard_error"])
        assert 1_000 < float(weighted.params["effective_sample_size"]) < 2_000


def test_a_shown_item_with_hardly_a_chance_leaves_a_handful_of_samples_in_the_row(folder: Path) -> None:
    lines = [HEADER] + [f"{row},t,{row % 3},1,{row % 2},{1e-6 if row == 1 else 0.5},x" for row in range(100)]
    write(folder, "bts", "men", lines)
    write(folder, "random", "men", [HEADER] + [f"{row},t,{row % 3},1,{row % 2},{1 / 3},x" for row in range(100)])
    figure = run()["dr_uniform_men"]
    assert figure.params["effective_sample_size"] == pytest.approx(1.0, abs=0.1)
    assert float(figure.params["weight_mean"]) > 1_000
    assert float(figure.params["standard_error"]) > 100 * float(figure.params["own_standard_error"])


def test_the_model_of_a_row_has_not_seen_its_half() -> None:
    log = open_bandit.Impressions(
        np.zeros(2, np.int64), np.zeros(2, np.int64), np.array([1.0, 0.0]), np.array([1.0, 1.0])
    )
    expected, predicted = open_bandit._model(log, np.ones((1, 1)), seed=0)
    np.testing.assert_allclose(predicted, [0.0, 1.0])
    np.testing.assert_allclose(expected, predicted)


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ([",item_id,position,click", "0,1,1,0"], r"column propensity_score .*all\.csv\.gz: line 2"),
        ([HEADER, "0,t,1,1,0,0.5,x", "1,t,1,one,0,0.5,x"], r"column position .*line 3"),
        ([HEADER, "0,t,1,1,0,0.5,x", "1,t,1,1,2,0.5,x"], r"column click .*line 3: 2\.0 cannot be"),
        ([HEADER, "0,t,1,1,0,0,x"], r"column propensity_score .*line 2: 0\.0 cannot be"),
        ([HEADER, "0,t,1,1"], r"column click .*line 2"),
        ([HEADER, "0,t,nan,1,0,0.5,x"], r"column item_id .*line 2: nan"),
        ([HEADER, "0,t,1,1,0,0.5,x"], r"column click .*some clicks and some without"),
        ([HEADER], r"column click .*0 impressions"),
    ],
)
def test_a_malformed_log_is_named_with_its_column(folder: Path, lines: list[str], match: str) -> None:
    write(folder, "random", "all", lines)
    with pytest.raises(DataUnavailableError, match=match):
        run()


def test_a_log_that_is_not_there_or_no_gzip_is_named(folder: Path) -> None:
    path = folder / open_bandit.FOLDER / "bts" / "women" / "women.csv.gz"
    path.write_bytes(b"not gzip")
    with pytest.raises(DataUnavailableError, match=r"cannot read the impressions in .*women\.csv\.gz"):
        run()
    path.unlink()
    with pytest.raises(DataUnavailableError, match=r"cannot read the impressions in .*women\.csv\.gz"):
        run()


def test_logs_that_do_not_fit_together_are_refused(folder: Path) -> None:
    write(folder, "random", "all", [HEADER, "0,t,1,1,0,0.5,x", "1,t,0,2,1,0.5,x"])
    with pytest.raises(DataUnavailableError, match=r"column propensity_score .*one over 3 items"):
        run()
    write(folder, "random", "all", [HEADER, "0,t,1,1,0,0.5,x", "1,t,0,1,1,0.5,x"])
    with pytest.raises(DataUnavailableError, match=r"column position .*not those of the bts log"):
        run()
