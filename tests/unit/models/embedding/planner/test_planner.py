"""Plans fit, balance, can be carried out, and their figures are those of the shards that carry them out."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from models.config import Placement, RankerConfig, RowType, TableConfig
from models.embedding.plan import Placed, ShardPlan
from models.embedding.planner import CardConfig, PlanConfig, PlanTable, make_plan
from models.embedding.planner.calibrate import calibrate
from models.embedding.planner.config import size
from models.embedding.planner.cost import head_reads, loads, row_wise_lookups, table_bytes
from models.embedding.planner.picture import draw
from models.embedding.planner.report import make_report
from models.embedding.quantized import StoredRows, row_bytes
from models.embedding.serving_rows import with_serving_rows
from models.embedding.table_shard import TableShard
from models.source import MemorySource
from shared.clock import SystemClock
from shared.config import load_config
from shared.errors import ConfigError
from tests.helpers.repository import ROOT

CARD = CardConfig(memory_gb=1.0, read_gb_s=10.0, link_gb_s=2.0, load_gb_s=0.5)
KINDS: tuple[Placement, ...] = ("table_wise", "row_wise", "column_wise", "replicated")
TABLES = st.builds(
    PlanTable,
    name=st.just("t"),
    rows=st.integers(100, 10**7),
    width=st.sampled_from([8, 32, 64]),
    row_type=st.sampled_from(["fp32", "fp16", "int8", "int4"]),
    ids=st.floats(0.5, 100),
    zipf=st.floats(0, 1.5),
)


def _config(tables: list[PlanTable], num_cards: int = 4, **changes: Any) -> PlanConfig:
    named = tuple(table.model_copy(update={"name": f"t{index}"}) for index, table in enumerate(tables))
    given: dict[str, Any] = {"card": CARD, "origin_gb_s": 2.0, "requests_s": 10.0, "tables": named}
    return PlanConfig(num_cards=num_cards, **(given | changes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_cards", [1, 2, 4, 8])
@pytest.mark.parametrize("row_type", ["fp32", "int8", "int4"])
def test_resident_bytes_are_those_of_the_shards(kind: Placement, num_cards: int, row_type: RowType) -> None:
    table = PlanTable(name="t", rows=1_003, width=32, row_type=row_type, ids=20)
    hot = np.arange(7 if kind == "row_wise" else 0)
    plan = ShardPlan(num_cards, 32, {"t": Placed(kind, num_cards - 1, hot)})
    whole = StoredRows.of(np.zeros((1_003, 32), np.float32), row_type)
    expected = [plan.part("t", card, whole).num_bytes for card in range(num_cards)]
    found = loads(table, kind, num_cards, num_cards - 1, len(hot))
    assert [load.resident_bytes for load in found] == expected
    assert table_bytes(table) == whole.num_bytes == 1_003 * row_bytes(row_type, 32)


@given(st.floats(0.5, 500), st.integers(1, 10**9), st.floats(0, 2), st.integers(1, 40), st.integers(0, 500))
@settings(deadline=None, max_examples=40)
def test_rows_read_add_up_and_no_row_is_read_twice(
    ids: float, rows: int, zipf: float, num_cards: int, hot: int
) -> None:
    ids = min(ids, float(rows))
    head = head_reads(ids, rows, zipf)
    assert max(head) <= 1.0
    assert all(before >= after for before, after in itertools.pairwise(head))
    reads = row_wise_lookups(ids, rows, zipf, num_cards, min(hot, rows))
    assert sum(reads) == pytest.approx(ids)
    assert min(reads) >= -1e-9


def test_reads_by_card_are_those_of_zipf_traffic() -> None:
    rng = np.random.default_rng(2)
    shares = np.arange(1, 2_001) ** -1.1
    shares /= shares.sum()
    counted = np.zeros(4)
    num_distinct = 0
    for _ in range(1_500):
        distinct = np.unique(rng.choice(2_000, 40, p=shares))
        num_distinct += len(distinct)
        counted += np.bincount(distinct % 4, minlength=4)
    expected = row_wise_lookups(num_distinct / 1_500, 2_000, 1.1, 4, 0)
    np.testing.assert_allclose(expected, counted / 1_500, rtol=0.05)


def test_hot_rows_level_the_cards() -> None:
    cold, hot = (row_wise_lookups(20.0, 10**6, 1.2, 8, number) for number in (0, 200))
    assert max(cold) / (sum(cold) / 8) > 1.15
    assert max(hot) / (sum(hot) / 8) < 1.01


@given(st.lists(TABLES, min_size=1, max_size=12), st.integers(1, 9))
@settings(deadline=None, max_examples=25)
def test_a_plan_fits_and_places_every_table(tables: list[PlanTable], num_cards: int) -> None:
    config = _config(tables, num_cards)
    try:
        plan = make_plan(config)
    except ConfigError:
        return  # does not fit: the next test says when that is right
    assert [choice.table.name for choice in plan.choices] == [table.name for table in config.tables]
    assert max(plan.resident_bytes()) <= CARD.table_bytes
    assert sum(plan.lookups()) >= sum(table.ids for table in tables) - 1e-6
    for choice in plan.choices:
        assert len(choice.loads) == num_cards
        assert 0 <= choice.owner < num_cards


def test_what_does_not_fit_is_refused_with_the_bytes() -> None:
    big = PlanTable(name="t", rows=10**7, width=64, ids=1)  # 2.56 GB
    with pytest.raises(ConfigError, match=r"tables of 2.56 GB must fit into the 2.40 GB that 3 cards have"):
        make_plan(_config([big], 3))
    assert make_plan(_config([big], 4)).choices[0].kind == "row_wise"
    with pytest.raises(ConfigError, match=r"table t0 of 2.56 GB fits nowhere"):
        make_plan(_config([big.model_copy(update={"placement": "table_wise"})], 8))


def test_small_tables_lie_whole_and_large_ones_by_rows() -> None:
    tables = [PlanTable(name="t", rows=20_000_000, width=32, row_type="int8", ids=300, zipf=0.5)]
    tables += [PlanTable(name="t", rows=1_000, width=32, ids=5)] * 16
    plan = make_plan(_config(tables, 4, replicate_share=0.0))
    assert plan.choices[0].kind == "row_wise"
    assert {choice.kind for choice in plan.choices[1:]} == {"table_wise"}
    assert make_report(plan).hottest_ratio < 1.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_placement_that_is_demanded_is_taken(kind: Placement) -> None:
    table = PlanTable(name="t", rows=1_000, width=32, ids=5, placement=kind)
    choice = make_plan(_config([table])).choices[0]
    assert choice.kind == kind
    assert choice.settings()["placement"] == kind
    assert ("shard" in choice.settings()) == (kind == "table_wise")


def test_the_paper_cluster_is_feasible_and_loads_in_ten_minutes() -> None:
    config = load_config(PlanConfig, ROOT / "configs" / "plan" / "trillion.yaml")
    plan = make_plan(config)
    report = make_report(plan)
    assert report.problems == ()
    assert report.num_parameters >= 10**12
    assert report.load_s < 600
    assert report.requests_s_max > config.requests_s
    mean = sum(report.resident_bytes) / config.num_cards
    assert max(report.resident_bytes) < 1.1 * mean
    assert report.hottest_ratio < 1.1
    # The load again, from the file's own figures.
    fullest = (max(report.resident_bytes) + config.dense_gb * 1e9) / (config.card.load_gb_s * 1e9)
    assert report.load_s >= fullest
    assert any(f"{report.load_s:.1f} s" in line for line in report.arithmetic)


def test_shards_can_carry_a_plan_out_and_hold_what_it_says() -> None:
    default = RankerConfig()
    rows = {"item": 4_000, "genre": 20, "year": 82}
    ids = {"item": 300, "genre": 10, "year": 40}
    tables = tuple(PlanTable(name=name, rows=rows[name], width=32, row_type="int8", ids=ids[name]) for name in rows)
    for num_cards in (1, 2, 4):
        plan = make_plan(
            PlanConfig(num_cards=num_cards, card=CARD, origin_gb_s=1, requests_s=1, replicate_share=0, tables=tables)
        )
        chosen = {choice.table.name: choice.settings() for choice in plan.choices}
        config = default.model_copy(
            update={
                "tables": tuple(TableConfig.model_validate(chosen.get(t.name, t.model_dump())) for t in default.tables)
            }
        )
        weights = {f"tables/{name}": {"weight": np.ones((number, 32), np.float32)} for name, number in rows.items()}
        source = MemorySource("v", weights, {"model": config.model_dump(mode="json")})
        source = with_serving_rows(source, {name: np.ones(number, np.int64) for name, number in rows.items()})
        held = [sum(TableShard(source, card, num_cards).num_bytes.values()) for card in range(num_cards)]
        assert held == plan.resident_bytes()


def test_planning_needs_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; from models.embedding.planner import PlanConfig, picture, report;"
        "print(sorted({'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_what_a_cluster_cannot_do_is_said() -> None:
    table = PlanTable(name="t", rows=10**6, width=32, ids=100)
    slow = _config([table], load_s_max=0.01, requests_s=10**9)
    problems = make_report(make_plan(slow)).problems
    assert [problem.split()[0] for problem in problems] == ["loading", "the"]


def test_groups_of_tables_are_shown_as_one() -> None:
    table = PlanTable(name="small", rows=1_000, width=32, ids=5, count=9, placement="table_wise")
    plan = make_plan(PlanConfig(num_cards=3, card=CARD, origin_gb_s=1, requests_s=1, tables=(table,)))
    report = make_report(plan)
    assert [(group.name, group.num_tables, group.cards) for group in report.groups] == [("small", 9, (0, 1, 2))]
    assert plan.resident_bytes() == [3 * 128_000] * 3


def test_the_picture_has_two_bars_a_card() -> None:
    plan = make_plan(_config([PlanTable(name="t", rows=10**6, width=32, ids=100, placement="row_wise")], 3))
    root = ElementTree.fromstring(draw(plan, make_report(plan)))
    bars = [one for one in root.iter("{http://www.w3.org/2000/svg}rect") if list(one)]
    assert len(bars) == 6
    assert all(0 < float(bar.attrib["width"]) <= 360 for bar in bars)


def test_this_machine_can_be_measured() -> None:
    card = calibrate(CARD, SystemClock(), "reference", num_rounds=5)
    assert card.load_gb_s == CARD.load_gb_s
    assert card != CARD
    for value in (card.call_us, card.table_us, card.lookup_us, card.read_gb_s):
        assert 0 < value < np.inf


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0.00 B"), (7, "7.00 B"), (999, "999 B"), (66.86e9, "66.9 GB"), (1.04e12, "1.04 TB")]
)
def test_sizes_have_three_digits(number: float, words: str) -> None:
    assert size(number) == words


def test_tables_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="at most its rows 3"):
        PlanTable(name="t", rows=3, width=2, ids=4)
    with pytest.raises(ValidationError, match="must be even, is 3"):
        PlanTable(name="t", rows=3, width=3, ids=1, row_type="int4")
    table = PlanTable(name="t", rows=3, width=2, ids=1)
    with pytest.raises(ValidationError, match="distinct names, t is there 2 times"):
        PlanConfig(num_cards=1, card=CARD, origin_gb_s=1, requests_s=1, tables=(table, table))
    counted = PlanTable(name="t", rows=3, width=2, ids=1, count=2)
    one = PlanTable(name="t.0", rows=3, width=2, ids=1)
    with pytest.raises(ValidationError, match=r"distinct names, t\.0 is there 2 times"):
        PlanConfig(num_cards=1, card=CARD, origin_gb_s=1, requests_s=1, tables=(counted, one))
    with pytest.raises(ValidationError, match="at most 500000, is 40960000"):
        _config([PlanTable(name="t", rows=3, width=2, ids=1, count=10_000)], 4_096)


@pytest.mark.parametrize("name", ["", "a b", "\x1b[31m", "../x", "x" * 200])
def test_names_that_cannot_be_shown_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="name"):
        PlanTable(name=name, rows=3, width=2, ids=1)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e300, -1.0])
def test_no_figure_of_a_plan_is_infinite(value: float) -> None:
    card, config = CARD.model_dump(), _config([PlanTable(name="t", rows=3, width=2, ids=1)]).model_dump()
    for name in card:
        with pytest.raises(ValidationError, match=name):
            CardConfig.model_validate({**card, name: value})
    for name in ("origin_gb_s", "dense_gb", "requests_s", "replicate_share", "load_s_max"):
        with pytest.raises(ValidationError, match=name):
            PlanConfig.model_validate({**config, name: value})
    for name in ("ids", "zipf", "rows", "width"):
        with pytest.raises(ValidationError, match=name):
            PlanTable.model_validate({"name": "t", "rows": 3, "width": 2, "ids": 1, name: value})


def test_a_cluster_at_every_limit_has_figures() -> None:
    card = CardConfig(memory_gb=1e6, read_gb_s=1e9, link_gb_s=1e9, load_gb_s=1e-6, call_us=0, table_us=0, lookup_us=0)
    table = PlanTable(name="t", rows=10**15, width=1, ids=1e-6, zipf=3)
    report = make_report(make_plan(_config([table], 8, card=card)))
    assert 0 < report.requests_s_max < np.inf
    assert 0 < report.load_s < np.inf


def test_dense_weights_need_room_beside_the_tables() -> None:
    config = _config([PlanTable(name="t", rows=1_000, width=32, ids=10)]).model_copy(update={"dense_gb": 1.0})
    assert any("take 1.00 GB, more than its memory_gb 1" in one for one in make_report(make_plan(config)).problems)
