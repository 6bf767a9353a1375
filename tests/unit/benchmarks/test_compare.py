from __future__ import annotations

import pytest

from benchmarks.compare import compare_rows
from tests.helpers.benchmark_rows import make_row


def test_the_newest_row_of_a_figure_counts() -> None:
    (one,) = compare_rows([make_row(value=99.0), make_row(value=20.0)], [make_row(value=10.0)])
    assert one.left is not None
    assert one.left.value == 20.0
    assert one.ratio == pytest.approx(0.5)
    assert one.same_device


def test_other_parameters_are_another_figure() -> None:
    comparisons = compare_rows([make_row(params={"candidates": 20})], [make_row(params={"candidates": 500})])
    assert [(one.left is None, one.right is None) for one in comparisons] == [(False, True), (True, False)]
    assert all(one.ratio is None and not one.same_device for one in comparisons)


def test_the_order_of_parameters_does_not_matter() -> None:
    assert len(compare_rows([make_row(params={"a": 1, "b": 2})], [make_row(params={"b": 2, "a": 1})])) == 1


def test_figures_of_different_machines_are_told_apart_and_zero_has_no_ratio() -> None:
    (one,) = compare_rows([make_row(value=0.0, device="x")], [make_row(device="y")])
    assert not one.same_device
    assert one.ratio is None
