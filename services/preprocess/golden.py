"""Preprocess's part of the golden request, checked without torch: this process never imports it.

``models.golden`` writes the answers when weights are published, and checks the other stations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from models.features import CandidateFeatures, FeatureExtractor
from models.source import WeightSource
from shared.errors import WeightsError

GOLDEN = "golden"


def check_golden(extractor: FeatureExtractor, source: WeightSource) -> None:
    """Answer the golden request once more and compare with what was stored at publication.

    Raises:
        WeightsError: the weights bring no golden request, or a value differs.
    """
    expected = source.tensors(GOLDEN)
    for name, value in _answers(extractor.extract_ids(source.json(GOLDEN)["candidates"])).items():
        if not np.array_equal(value, expected[name]):
            raise WeightsError(
                f"weights {source.version} do not answer the golden request: {name} differs",
                version=source.version,
                file=GOLDEN,
            )


def _answers(features: CandidateFeatures) -> dict[str, npt.NDArray[Any]]:
    answers: dict[str, npt.NDArray[Any]] = {"features.group_keys": features.group_keys}
    for table, rows in features.unique_rows.items():
        answers[f"features.unique.{table}"] = rows
    for feature, ids in features.features.items():
        answers[f"features.{feature}.values"] = ids.values
        answers[f"features.{feature}.offsets"] = ids.offsets
    return answers
