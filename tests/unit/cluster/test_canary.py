"""When a version that is tried is taken back."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cluster.canary import CanaryConfig, alarm, figures

CONFIG = CanaryConfig(answers_min=10, labels_min=20)


def report(base: list[float], canary: list[float], labels: list[int]) -> dict[str, Any]:
    """What an ingress measures: click probabilities of both versions for labelled events."""
    losses = [[-math.log(p if y else 1 - p) for p, y in zip(ps, labels, strict=True)] for ps in (base, canary)]
    rises = [new - old for old, new in zip(*losses, strict=True)]
    return {
        "outcomes": {"v": {"whole": 90}, "w": {"whole": 30}},
        "feedback": {
            "labels": float(len(labels)),
            "clicks": float(sum(labels)),
            "base_loss": sum(losses[0]),
            "canary_loss": sum(losses[1]),
            "base_predicted": sum(base),
            "canary_predicted": sum(canary),
            "rise_squared": sum(rise**2 for rise in rises),
        },
    }


def judged(*reports: dict[str, Any]) -> str:
    return alarm(CONFIG, figures(reports, "v", "w"))


LABELS = [1, 0, 0, 1, 0] * 10
GOOD = [0.8 if label else 0.2 for label in LABELS]


def test_as_good_as_the_one_that_serves() -> None:
    measured = figures([report(GOOD, GOOD, LABELS)], "v", "w")
    assert alarm(CONFIG, measured) == ""
    rate = 0.4
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert measured["base_ne"] == pytest.approx(-math.log(0.8) / entropy)
    assert measured["canary_ne"] == measured["base_ne"]
    assert measured["ne_rise"] == 0
    assert measured["base_calibration"] == pytest.approx((0.4 * 0.8 + 0.6 * 0.2) / 0.4)


def test_worse_on_the_same_events() -> None:
    worse = [0.7 if label else 0.3 for label in LABELS]
    assert judged(report(GOOD, worse, LABELS)).startswith("normalized entropy rises by 59.8%")
    halves = [report(GOOD[half], worse[half], LABELS[half]) for half in (slice(0, 25), slice(25, 50))]
    assert "on 50 labelled events" in judged(*halves), "replicas' figures are added up"


def test_too_few_labels_or_answers_say_nothing() -> None:
    worse = [0.01 if label else 0.9 for label in LABELS]
    assert judged(report(GOOD[:19], worse[:19], LABELS[:19])) == ""
    few = {"outcomes": {"v": {"whole": 5}, "w": {"failed": 9}}}
    assert judged(few) == ""
    enough = {"outcomes": {"v": {"whole": 5}, "w": {"failed": 10}}}
    assert judged(enough).startswith("100.0% of its answers are degraded or failed")


def test_a_rise_within_its_error_is_no_alarm() -> None:
    noisy = [p + (0.15 if index % 2 else -0.15) for index, p in enumerate(GOOD)]
    measured = figures([report(GOOD, noisy, LABELS)], "v", "w")
    assert measured["ne_rise"] > CONFIG.ne_rise_max
    assert measured["ne_rise"] < 2 * measured["ne_rise_error"]
    assert alarm(CONFIG, measured) == ""


def test_calibration_alone() -> None:
    off = [min(2.2 * p, 0.99) for p in [0.4] * 50]
    config = CONFIG.model_copy(update={"ne_rise_max": 10.0})
    measured = figures([report([0.4] * 50, off, LABELS)], "v", "w")
    assert alarm(config, measured).startswith("calibration is 2.20 on 50 labelled events, limit 1.50 either way")
    both = figures([report(off, off, LABELS)], "v", "w")
    assert alarm(config, both) == "", "no worse than what serves"
