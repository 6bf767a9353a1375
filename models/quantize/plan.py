"""The plan: number format of each layer, for one weights version on one kind of device, with its evidence."""

from __future__ import annotations

import hashlib
import json
import platform
import stat
from pathlib import Path

import torch
from pydantic import Field, ValidationError

from models.config import RankerConfig
from models.quantize.formats import Format, missing
from models.quantize.measure import eligible_names
from shared.config import Config
from shared.log import JsonLogger

_INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "i8mm", "bf16")
_PLAN_BYTES_MAX = 1 << 20
_REASON_CHARS_MAX = 300

SCORE_ERROR_MAX = 0.05
"""Largest error of a score that a plan may have. The golden request is held to what the plan says, so a plan that says
more would leave it nothing to find."""


class LayerEvidence(Config):
    """What was measured about one layer.

    Args:
        shape: Outputs and inputs of the linear.
        seconds: format -> seconds over all candidate counts, medians of interleaved repeats.
        ne_changes: format -> relative change of NE with only this layer in the format, the worst exit's.
    """

    shape: tuple[int, int]
    seconds: dict[Format, float]
    ne_changes: dict[Format, float]


class PrecisionPlan(Config):
    """Formats of the candidate side's linears.

    Args:
        version: Weights version that it was made for.
        device: Device that it was measured on, ``device_name``.
        shapes: ``shapes_digest`` of the model.
        threads: Threads of torch while it was measured.
        candidate_counts: Rows that layers were timed at.
        ne_budget: Largest relative change of NE that was allowed.
        ne_change: Relative change of NE with all choices together, the worst exit's.
        score_error_max: Largest difference of a score to float32 on the held-out rows.
        layers: Layer name -> format; a layer that is not named stays in ``fp32``.
        skipped_formats: format -> why it was not measured.
        rolled_back: Layers that were chosen one by one and taken back: by the joint check, or all of them because the
            whole pass was not faster.
        pass_seconds: What the whole full pass took, over all counts: ``fp32``, ``bf16`` (every layer), ``plan``, as it
            was chosen, before it was taken back if it was, and the packed forms that ``models.execution`` has on this
            device, one of which a replica runs without a plan.
        without_plan: Name among ``pass_seconds`` of what ``models.execution`` chooses on this device.
        stack_ne_changes: Name of the packed form -> relative change of NE with it, the worst exit's.
        evidence: Layer name -> measurements.
    """

    version: str
    device: str
    shapes: str
    threads: int = Field(ge=1)
    candidate_counts: tuple[int, ...]
    ne_budget: float = Field(ge=0)
    ne_change: float
    score_error_max: float = Field(ge=0)
    layers: dict[str, Format]
    skipped_formats: dict[Format, str] = Field(default_factory=dict)
    rolled_back: tuple[str, ...] = ()
    pass_seconds: dict[str, float] = Field(default_factory=dict)
    without_plan: str = ""
    stack_ne_changes: dict[str, float] = Field(default_factory=dict)
    evidence: dict[str, LayerEvidence] = Field(default_factory=dict)

    def file_name(self) -> str:
        """Return the name of its file: one for each version and device."""
        return f"{self.version}.{hashlib.sha256(self.device.encode()).hexdigest()[:12]}.json"

    def write(self, folder: Path) -> Path:
        """Write it to a folder, which is made if it is not there; returns the path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.file_name()
        staged = path.with_suffix(".tmp")
        staged.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        staged.replace(path)
        return path


def device_name() -> str:
    """Return what decides how fast a format is here: processor, its instructions, torch's version."""
    model, flags = platform.processor() or platform.machine(), set[str]()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        first = cpuinfo.read_text(encoding="utf-8").split("\n\n")[0]
        pairs = (line.partition(":") for line in first.splitlines())
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        # The model number tells generations apart that share a name.
        number = "-".join(fields.get(name, "") for name in ("cpu family", "model"))
        model = f"{fields.get('model name', model)} {number}"
        flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return " ".join([model, *(name for name in _INSTRUCTIONS if name in flags), f"torch {torch.__version__}"])


def shapes_digest(config: RankerConfig) -> str:
    """Return a digest of all sizes of the model."""
    sizes = [layer.model_dump(mode="json") for layer in config.layer_sizes]
    text = json.dumps([config.width, sizes, config.head_widths, config.exits], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def find_plan(
    folder: Path, version: str, config: RankerConfig, logger: JsonLogger, device: str | None = None
) -> PrecisionPlan | None:
    """Return the plan in a folder for this version on this device; None where there is none.

    A plan of another version, device or shape, one that names a layer that the model has not or a format whose kernels
    are not there, one whose own figures break its budget or ``SCORE_ERROR_MAX``, one that says that nothing pays, and a
    file that is no plan, is ignored, with a line in the log that says why.

    Args:
        folder: Where ``rankmesh quantize`` writes.
        version: Weights version.
        config: The model.
        logger: Gets one line for each file that is ignored.
        device: ``device_name`` of this machine; None: look it up.
    """
    device = device or device_name()
    for path in sorted(folder.glob("*.json")):
        reason, plan = _read(path, {"version": version, "device": device, "shapes": shapes_digest(config)})
        if plan is not None:
            reason = _unfit(plan, config)
            if not reason:
                return plan
        logger.info("precision_plan_ignored", path=str(path), reason=reason[:_REASON_CHARS_MAX])
    return None


def _read(path: Path, wanted: dict[str, str]) -> tuple[str, PrecisionPlan | None]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device would be read for ever
            return "is no regular file", None
        if status.st_size > _PLAN_BYTES_MAX:
            return f"larger than {_PLAN_BYTES_MAX} bytes", None
        plan = PrecisionPlan.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        return f"cannot be read: {error}", None
    except ValidationError as error:
        first = error.errors()[0]
        return f"is no plan: {': '.join(filter(None, ['.'.join(map(str, first['loc'])), first['msg']]))}", None
    for name, value in wanted.items():
        if (found := getattr(plan, name)) != value:
            return f"{name} is {found!r}, not {value!r}", None
    return "", plan


def _unfit(plan: PrecisionPlan, config: RankerConfig) -> str:
    """Say why a plan for this version and device cannot be obeyed; "" when it can."""
    if not plan.layers:
        return "says that nothing pays here"
    if unknown := sorted(set(plan.layers) - set(eligible_names(config))):
        return f"layers must be those of the model that may run in low precision, name {unknown}"
    if not abs(plan.ne_change) <= plan.ne_budget:
        return f"ne_change must be within ne_budget {plan.ne_budget:g}, is {plan.ne_change:g}"
    if not plan.score_error_max <= SCORE_ERROR_MAX:
        return f"score_error_max must be at most {SCORE_ERROR_MAX:g}, is {plan.score_error_max:g}"
    for number_format in sorted(set(plan.layers.values())):
        if why := missing(number_format):
            return f"format {number_format}: {why}"
    return ""
