"""The budget holds for the sum and for all together; the best ratio goes first; the worst goes back first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.quantize.choose import Formats, Option, choose, options
from models.quantize.formats import Format


def _sum_of(found: list[Option], factor: float = 1.0) -> dict[str, float]:
    return {f"{option.layer} {option.number_format}": option.damage * factor for option in found}


@pytest.mark.parametrize(("budget", "expected"), [(0.0, []), (1.0, ["a"]), (3.0, ["a", "b"]), (9.0, ["a", "b", "c"])])
def test_the_best_ratio_goes_first(budget: float, expected: list[str]) -> None:
    found = [Option("c", "int8", 1.0, 4.0), Option("a", "int8", 2.0, 1.0), Option("b", "bf16_packed", 3.0, 2.0)]
    choice = choose(found, lambda layers: 0.0, budget)
    assert list(choice.layers) == expected
    assert choice.rolled_back == ()


def test_a_layer_moves_to_a_faster_format_where_the_budget_allows() -> None:
    found = [Option("a", "bf16_packed", 1.0, 0.1), Option("a", "int8", 2.0, 0.9)]
    assert choose(found, lambda layers: 0.0, 1.0).layers == {"a": "int8"}
    assert choose(found, lambda layers: 0.0, 0.5).layers == {"a": "bf16_packed"}


def test_what_is_too_much_together_goes_back_worst_first() -> None:
    found = [Option("a", "int8", 3.0, 0.1), Option("b", "int8", 2.0, 0.1), Option("c", "int8", 1.0, 0.1)]

    def joint(layers: Formats) -> float:
        return -0.4 * len(layers)  # an improvement is a change too

    choice = choose(found, joint, 0.5)
    assert choice.layers == {"a": "int8"}
    assert choice.change == -0.4
    assert choice.rolled_back == ("c", "b")
    assert choose(found, joint, 0.35).layers == {}


def test_nothing_is_chosen_where_nothing_pays() -> None:
    asked: list[tuple[str, Format]] = []

    def damage(layer: str, number_format: Format) -> float:
        asked.append((layer, number_format))
        return 0.0

    seconds: dict[str, dict[Format, float]] = {"a": {"fp32": 1.0, "bf16_packed": 0.99, "int8": 2.0}}
    assert options(seconds, damage) == []
    assert asked == []
    assert choose([], lambda layers: 1.0, 0.1).layers == {}


_OPTIONS = st.lists(
    st.builds(
        Option,
        layer=st.sampled_from("abcdef"),
        number_format=st.sampled_from(["bf16_packed", "int8"]),
        saved_s=st.floats(1e-6, 1),
        damage=st.floats(0, 1),
    ),
    max_size=12,
    unique_by=lambda option: (option.layer, option.number_format),
)


@given(_OPTIONS, st.floats(0, 2), st.floats(0, 3))
def test_the_joint_change_is_always_within_the_budget(found: list[Option], budget: float, factor: float) -> None:
    damages = _sum_of(found, factor)

    def joint(layers: Formats) -> float:
        return sum(damages[f"{name} {number_format}"] for name, number_format in layers.items())

    choice = choose(found, joint, budget)
    assert abs(choice.change) <= budget
    assert choice.change == joint(choice.layers)
    alone = _sum_of(found)
    assert sum(alone[f"{name} {fmt}"] for name, fmt in choice.layers.items()) <= budget * (1 + 1e-9)
