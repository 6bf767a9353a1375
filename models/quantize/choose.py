"""Chooses formats: the most time for the least damage first, under a budget, with a joint check at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from models.quantize.formats import Format

GAIN_MIN = 0.03
"""Share of a layer's time that a format must save; less is within what repeats differ by."""

_DAMAGE_MIN = 1e-9

Formats = Mapping[str, Format]
"""Layer name -> format."""


@dataclass(frozen=True, slots=True)
class Option:
    """One layer in one format.

    Args:
        layer: Layer name.
        number_format: The format.
        saved_s: Seconds that it saves against ``fp32``.
        damage: Absolute relative change of NE with only this layer in the format.
    """

    layer: str
    number_format: Format
    saved_s: float
    damage: float

    @property
    def ratio(self) -> float:
        """Seconds a unit of damage."""
        return self.saved_s / max(self.damage, _DAMAGE_MIN)


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen.

    Args:
        layers: Layer name -> format.
        change: Relative change of NE with all of them.
        rolled_back: Layers that the joint check took back, in that order.
    """

    layers: dict[str, Format]
    change: float
    rolled_back: tuple[str, ...]


def options(seconds: Mapping[str, Mapping[Format, float]], damage: Callable[[str, Format], float]) -> list[Option]:
    """List the options that save time; damage is asked for those alone.

    Args:
        seconds: Layer -> format -> seconds, ``fp32`` among them.
        damage: Relative change of NE with only that layer in that format.
    """
    found = []
    for layer, by_format in seconds.items():
        plain_s = by_format["fp32"]
        for number_format, spent_s in by_format.items():
            if number_format != "fp32" and plain_s - spent_s > GAIN_MIN * plain_s:
                found.append(Option(layer, number_format, plain_s - spent_s, abs(damage(layer, number_format))))
    return found


def choose(found: list[Option], joint: Callable[[Formats], float], budget: float) -> Choice:
    """Take options by seconds a unit of damage while the sum of damages fits, then check them together.

    Args:
        found: What can be chosen.
        joint: Relative change of NE with all of some layers in their formats.
        budget: Largest absolute relative change of NE.

    Returns:
        At most one format a layer, and together within the budget: while they are not, the layer with the worst ratio
        goes back to ``fp32``.
    """
    taken: dict[str, Option] = {}
    spent = 0.0
    for option in sorted(found, key=lambda option: (-option.ratio, option.layer, option.number_format)):
        before = taken.get(option.layer)
        extra = option.damage - (before.damage if before else 0.0)
        # A layer that was taken in one format may change to another that saves more, if the budget still allows it.
        if (before is None or option.saved_s > before.saved_s) and spent + extra <= budget:
            taken[option.layer], spent = option, spent + extra
    rolled_back: list[str] = []
    while True:
        layers = {name: taken[name].number_format for name in sorted(taken)}
        change = joint(layers) if layers else 0.0
        if abs(change) <= budget:
            return Choice(layers, change, tuple(rolled_back))
        worst = min(taken.values(), key=lambda option: (option.ratio, option.layer))
        del taken[worst.layer]
        rolled_back.append(worst.layer)
