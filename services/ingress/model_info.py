"""What the ingress knows of a weights version: names and limits, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import orjson

from models.config import OBJECTIVES, RankerConfig
from models.payload import PayloadSizes
from models.source import WeightSource
from services.ingress.directory import ModelBody
from shared.errors import WeightsError


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A weights version, seen from the front door.

    Args:
        version: Name of the version.
        config: The ranker's configuration.
        metrics: Offline metrics by flat name.
        samples: JSON of a few held-out requests and of the items' names; None when the version has none.
    """

    version: str
    config: RankerConfig
    metrics: dict[str, float | int | str | None]
    samples: bytes | None

    @classmethod
    def from_weights(cls, source: WeightSource) -> Self:
        """Read the documents of a version; only ``model`` must be there."""
        config = RankerConfig.model_validate(source.json("model"))
        samples, display = _optional(source, "samples"), _optional(source, "display")
        shown = None if samples is None or display is None else orjson.dumps({**samples, **display})
        return cls(source.version, config, _quality(_optional(source, "metrics") or {}), shown)

    @property
    def sizes(self) -> PayloadSizes:
        """Sizes of the messages of a request."""
        return PayloadSizes.of(self.config)

    @property
    def objectives(self) -> tuple[str, ...]:
        """Names of the objectives, in the order of every score axis."""
        return OBJECTIVES

    def body(self, tiers: list[str]) -> ModelBody:
        """Return what ``GET /v1/models`` says about it."""
        return ModelBody(
            version=self.version,
            current=True,
            objectives=list(self.objectives),
            objective_weights=self.config.objective_weights,
            tiers=tiers,
            history_length=self.config.history_length,
            speculative_width=self.config.speculative_width,
            metrics=self.metrics,
        )


def _optional(source: WeightSource, name: str) -> dict[str, Any] | None:
    try:
        return source.json(name)
    except WeightsError:
        return None


def _quality(metrics: dict[str, Any]) -> dict[str, float | int | str | None]:
    """Return what was measured, as ``<split>.<history>.<tier>.<objective>.<metric>``, without how it was trained."""
    measured = {name: value for name, value in metrics.items() if name != "train"}
    for each in metrics.get("evaluations", ()):
        prefix = f"{each['split']}.{each['history_mode']}.{each['tier']}."
        measured |= _flat(each["objectives"], prefix)
    return _flat(measured)


def _flat(document: dict[str, Any], prefix: str = "") -> dict[str, float | int | str | None]:
    """Flatten nested metrics to dotted names; lists are left out."""
    flat: dict[str, float | int | str | None] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        elif value is None or isinstance(value, (bool, int, float, str)):
            flat[prefix + name] = value
    return flat
