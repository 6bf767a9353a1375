"""What rows of operators say of the roofline of the same run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.kernels.operators import _searched
from benchmarks.kernels.roofs import Roofs, least_s
from kernels.roofline import Work
from kernels.search import Problem, Variant

GEMM_FLOPS = 2 * 1_000 * 1_024 * 1_024
WORK = Work(2e6, 8e3)


def test_a_share_is_the_least_time_of_this_run_over_the_time() -> None:
    roofs = Roofs(WORK.num_bytes, ["bf16"])
    # 1 TFLOP/s: 2 us of arithmetic; 4 GB/s: 2 us of bytes. The operator takes 8.
    taken_s = {"roof_bf16": GEMM_FLOPS * 1e-12, "roof_copy": 2e-6, "other": 9.0}
    assert roofs.params(Work(4e6, 8e3), 8e-6, taken_s) == {
        "flops": 4_000_000, "bytes": 8_000, "gflops": 500.0, "gbytes_s": 1.0, "roof_gflops": 1000.0,
        "roof_gbytes_s": 4.0, "bound": "compute", "roofline_share": 0.5,
    }  # fmt: skip
    assert roofs.params(Work(1e6, 8e3), 8e-6, taken_s)["bound"] == "memory"
    assert roofs.params(Work(1e6, 8e3), 8e-6, taken_s)["roofline_share"] == 0.25
    assert roofs.rate("bf16", np.array([2.0])).tolist() == [GEMM_FLOPS / 2]


def test_a_roof_is_the_best_of_its_rounds() -> None:
    assert least_s({"roof_copy": np.array([3.0, 1.0, 2.0])}) == {"roof_copy": 1e-3}


def test_what_multiplies_nothing_has_one_roof() -> None:
    roofs = Roofs(4e6, ())
    assert list(roofs.calls) == ["roof_copy"]
    found = roofs.params(Work(0.0, 4e6, "fp32"), 4e-3, {"roof_copy": 1e-3})
    assert (found["bound"], found["roofline_share"], found["gbytes_s"]) == ("memory", 0.25, 1.0)
    assert "gflops" not in found


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("int8", torch.int32)])
def test_the_calls_are_a_product_of_the_precision_and_a_copy_of_the_bytes(precision: str, dtype: torch.dtype) -> None:
    roofs = Roofs(8e3, ["int8" if precision == "int8" else "fp32"])
    product = roofs.calls[f"roof_{precision}"]()
    assert isinstance(product, Tensor)
    assert (product.shape, product.dtype) == ((1_000, 1_024), dtype)
    copied = roofs.calls["roof_copy"]()
    assert isinstance(copied, Tensor)
    assert 2 * copied.nbytes == 8_000


def test_a_cpu_has_no_fp8_product() -> None:
    with pytest.raises(ValueError, match="precision must be one of bf16, fp32, int8 on a CPU, is 'fp8'"):
        Roofs(8e3, ["fp8"])


def _problem(work: Work | None) -> Problem:
    def inputs(seed: int) -> tuple[Tensor, ...]:
        return (torch.ones(4),)

    variants = [Variant("plain", lambda: torch.neg, precision="fp32")]
    return Problem("negative", {"n": 4}, "float32", inputs, torch.neg, 1e-6, variants, work)


def test_a_searched_row_carries_its_roofline() -> None:
    (found,) = _searched(_problem(Work(4.0, 32.0)), 1, 0)
    # The variant's own precision names the roof.
    assert float(found.params["roof_gflops"]) > 0
    assert found.params["bytes"] == 32
    assert float(found.params["roofline_share"]) > 0
    assert found.params["winner"] == "plain"


def test_an_operator_that_nobody_counted_is_an_error() -> None:
    with pytest.raises(ValueError, match="work of negative must be counted"):
        _searched(_problem(None), 1, 0)
