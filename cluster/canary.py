"""Whether a version that a share of the users gets is good enough for all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from shared.config import Config


class CanaryConfig(Config):
    """When a version is taken back.

    Args:
        answers_min: Requests of the canary before their outcomes count.
        failed_share_max: Share of them that may fail or be degraded beyond that of the other requests.
        labels_min: Labelled events before quality counts.
        ne_rise_max: How much larger the normalized entropy of clicks may be than that of the version that serves, on
            the same events, as a share of it; a rise must also be twice its standard error.
        calibration_max: Largest factor between predicted and observed clicks, either way, unless the version that
            serves is as far off.
    """

    answers_min: int = Field(20, ge=1)
    failed_share_max: float = Field(0.05, ge=0, le=1)
    labels_min: int = Field(50, ge=2)
    ne_rise_max: float = Field(0.02, ge=0)
    calibration_max: float = Field(1.5, gt=1)


def figures(reports: Sequence[Mapping[str, Any]], base: str, canary: str) -> dict[str, float]:
    """Add up what the ingress replicas counted and measured.

    Args:
        reports: Of each replica: ``outcomes`` by version, and ``feedback`` sums of labelled events.
        base: The version that serves.
        canary: The version that is tried.
    """
    found: dict[str, float] = {}
    for name, version in (("base", base), ("canary", canary)):
        counts = [report.get("outcomes", {}).get(version, {}) for report in reports]
        total = sum(sum(count.values()) for count in counts)
        found[f"{name}_answers"] = float(total)
        found[f"{name}_bad"] = float(total - sum(count.get("whole", 0) for count in counts))
    sums: dict[str, float] = {}
    for report in reports:
        for key, value in report.get("feedback", {}).items():
            sums[key] = sums.get(key, 0.0) + value
    labels, clicks = sums.get("labels", 0.0), sums.get("clicks", 0.0)
    found["labels"] = labels
    if labels < 2 or not 0 < clicks < labels:
        return found
    rate = clicks / labels
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    found["base_ne"] = sums["base_loss"] / labels / entropy
    found["canary_ne"] = sums["canary_loss"] / labels / entropy
    found["base_calibration"] = sums["base_predicted"] / clicks
    found["canary_calibration"] = sums["canary_predicted"] / clicks
    rise = (sums["canary_loss"] - sums["base_loss"]) / labels
    variance = max(sums["rise_squared"] / labels - rise**2, 0.0)
    found["ne_rise"] = rise / max(sums["base_loss"] / labels, 1e-12)
    found["ne_rise_error"] = math.sqrt(variance / (labels - 1)) / max(sums["base_loss"] / labels, 1e-12)
    return found


def alarm(config: CanaryConfig, measured: Mapping[str, float]) -> str:
    """Return why a version must be taken back, empty while there is no reason."""
    answers, others = measured["canary_answers"], measured["base_answers"]
    if answers >= config.answers_min:
        bad = measured["canary_bad"] / answers
        usual = measured["base_bad"] / others if others else 0.0
        if bad - usual > config.failed_share_max:
            return (
                f"{bad:.1%} of its answers are degraded or failed, {usual:.1%} of the others, "
                f"limit {config.failed_share_max:.1%} more"
            )
    if measured["labels"] < config.labels_min or "canary_ne" not in measured:
        return ""
    rise, error = measured["ne_rise"], measured["ne_rise_error"]
    if rise > config.ne_rise_max and rise > 2 * error:
        return (
            f"normalized entropy rises by {rise:.1%} (standard error {error:.1%}) on {measured['labels']:.0f} "
            f"labelled events, limit {config.ne_rise_max:.1%}"
        )
    off, usual_off = (abs(math.log(max(measured[f"{name}_calibration"], 1e-9))) for name in ("canary", "base"))
    if off > math.log(config.calibration_max) and off > usual_off:
        return (
            f"calibration is {measured['canary_calibration']:.2f} on {measured['labels']:.0f} labelled events, "
            f"limit {config.calibration_max:.2f} either way"
        )
    return ""
