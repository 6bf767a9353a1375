"""What cannot be computed is refused by every backend alike, and what is not finite does not become an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import wukong_layer
from kernels.block_attention import block_attention
from kernels.broadcast_attention import broadcast_attention
from kernels.broadcast_gemm import BroadcastGemm, BroadcastTokenGemm
from kernels.fm_block import fm_block
from kernels.gdpa import gdpa
from kernels.grouped_gemm import grouped_gemm
from kernels.horizontal_linear import LinearBatch, MergedLinear
from kernels.jagged_attention import jagged_attention
from kernels.jagged_norm import jagged_norm
from kernels.lowp_linear import LowpLinear, quantize, rms_norm_quantize
from kernels.packed_linear import PackedLinear
from kernels.wukong_layer import LayerGiven, LayerWeights
from tests.unit.kernels.native.support import require_native

ENDS = torch.tensor([0, 4, 11])
INDEX = torch.tensor([1, 0, 1, 0, 1])
CPU_BACKENDS = ("reference", "torch", "native")
Operator = Callable[..., Tensor]


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def _gemm(backend: Any, weight: Tensor, request_weight: Tensor, x: Tensor, request_x: Tensor) -> Tensor:
    gemm = BroadcastGemm(weight, request_weight, activation="relu", backend=backend)
    return gemm(x, gemm.request_part(request_x), INDEX)


def _token_gemm(backend: Any, weight: Tensor, request_weight: Tensor, x: Tensor, request_x: Tensor) -> Tensor:
    gemm = BroadcastTokenGemm(weight, request_weight, backend=backend)
    return gemm(x, gemm.request_part(request_x), INDEX)


def _wukong(backend: Any, **tensors: Any) -> Tensor:
    tokens, given = tensors.pop("tokens"), {name[6:]: tensors.pop(name) for name in list(tensors) if "given_" in name}
    layers = wukong_layer.pack([LayerWeights(**tensors, num_heads=2)], backend=backend)
    return wukong_layer.rank(layers, tokens, wukong_layer.give(layers, [LayerGiven(**given)]), INDEX.int())


KEYS = (made(5, 2, 2, 8), made(11, 2, 8), made(11, 2, 8))
ROWS = (made(11, 2, 8), made(11, 2, 8), made(11, 2, 8))
_LAYER: dict[str, Any] = {
    "query_tokens": made(2, 5), "query": made(8, 8), "attention_out": made(8, 8), "mixtures": made(3, 7),
    "norm_products": made(21), "up": made(6, 21), "down": made(16, 6), "linear": made(3, 7), "residual": made(5, 5),
    "norm": made(8), "tokens": made(5, 5, 8), "given_keys": made(2, 4, 8), "given_values": made(2, 4, 8),
    "given_queries": made(2, 2, 8), "given_mixtures": made(2, 3, 8), "given_linear": made(2, 3, 8),
    "given_hidden": made(2, 6),
}  # fmt: skip
_NOT_WEIGHTS = {"tokens", *(name for name in _LAYER if name.startswith("given_"))}
OPERATORS: dict[str, tuple[Operator, dict[str, Tensor], tuple[str, ...]]] = {
    "broadcast_gemm": (
        _gemm,
        {"weight": made(7, 6), "request_weight": made(7, 9), "x": made(5, 6), "request_x": made(2, 9)},
        CPU_BACKENDS,
    ),
    "broadcast_token_gemm": (
        _token_gemm,
        {"weight": made(4, 6), "request_weight": made(4, 9), "x": made(5, 6, 8), "request_x": made(2, 9, 8)},
        ("reference", "torch"),
    ),
    "broadcast_attention": (
        lambda backend, q, k, v: broadcast_attention(q, k, v, ENDS, INDEX, backend=backend),
        dict(zip("qkv", KEYS, strict=True)),
        CPU_BACKENDS,
    ),
    "gdpa": (
        lambda backend, q, k, v: gdpa(q, k, v, ENDS, INDEX, activation="silu", backend=backend),
        dict(zip("qkv", KEYS, strict=True)),
        CPU_BACKENDS,
    ),
    "block_attention": (
        lambda backend, q, k, v: block_attention(q, k, v, ENDS, block=3, window_blocks=2, backend=backend),
        dict(zip("qkv", ROWS, strict=True)),
        CPU_BACKENDS,
    ),
    "jagged_attention": (
        lambda backend, q, k, v: jagged_attention(q, k, v, ENDS, ENDS, backend=backend),
        dict(zip("qkv", ROWS, strict=True)),
        CPU_BACKENDS,
    ),
    "jagged_norm": (
        lambda backend, x, gain, residual: jagged_norm(x, gain, ENDS, residual_TD=residual, backend=backend)[1],
        {"x": made(11, 6), "gain": made(6), "residual": made(11, 6)},
        ("reference", "torch"),
    ),
    "fm_block": (
        lambda backend, x, y, part, gain: fm_block(x, y, part, INDEX, gain=gain, backend=backend),
        {"x": made(5, 4, 8), "y": made(4, 3), "part": made(2, 3, 8, dtype=torch.float32), "gain": made(12)},
        ("reference", "torch"),
    ),
    "grouped_gemm": (
        lambda backend, x, weight: grouped_gemm(x, weight, ENDS, backend=backend),
        {"x": made(11, 6), "weight": made(2, 5, 6)},
        ("reference", "torch"),
    ),
    "merged_linear": (
        lambda backend, first, second, x: torch.cat(MergedLinear([first, second], backend=backend)(x), 1),
        {"first": made(3, 6), "second": made(4, 6), "x": made(5, 6)},
        ("reference", "torch"),
    ),
    "linear_batch": (
        lambda backend, first, second, x, y: torch.cat(LinearBatch([first, second], backend=backend)([x, y]), 1),
        {"first": made(3, 6), "second": made(4, 8), "x": made(5, 6), "y": made(5, 8)},
        ("reference", "torch"),
    ),
    "int8_linear": (
        lambda backend, weight, x, gain: LowpLinear(weight, format="int8", backend=backend)(x, gain),
        {"weight": made(7, 16), "x": made(5, 16), "gain": made(16)},
        CPU_BACKENDS,
    ),
    "wukong_layer": (_wukong, _LAYER, CPU_BACKENDS),
}
CASES = [
    pytest.param(name, backend, field, id=f"{name}-{backend}-{field}")
    for name, (_, tensors, backends) in OPERATORS.items()
    for backend in backends
    for field in tensors
]


def _run(name: str, backend: str, changes: dict[str, Tensor]) -> Tensor:
    if backend == "native":
        require_native()
    operator, tensors, _ = OPERATORS[name]
    return operator(backend, **{**tensors, **changes})


@pytest.mark.parametrize(("name", "backend", "field"), CASES)
def test_a_tensor_on_another_device_is_refused(name: str, backend: str, field: str) -> None:
    """The native kernels read its memory at address 0, stock torch answered what lay in fresh memory."""
    with pytest.raises((ValueError, RuntimeError), match=r"\bon (the CPU|cpu|meta)\b"):
        _run(name, backend, {field: OPERATORS[name][1][field].to("meta")})


# Stock torch's fused attention answers 0 to a query that is NaN: its README says so.
@pytest.mark.parametrize(
    ("name", "backend", "field"), [case for case in CASES if case.values[:2] != ("jagged_attention", "torch")]
)
def test_nan_does_not_become_an_answer(name: str, backend: str, field: str) -> None:
    broken = OPERATORS[name][1][field].clone()
    broken.fill_(float("nan"))
    assert _run(name, backend, {}).isfinite().all()
    assert not _run(name, backend, {field: broken}).isfinite().all()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_nan_in_the_hidden_part_of_the_only_request_is_told(backend: Any) -> None:
    """A single request's part is oneDNN's bias, and oneDNN's own activation makes 0 of a NaN."""
    if backend == "native":
        require_native()
    layers = wukong_layer.pack(
        [LayerWeights(**{name: x for name, x in _LAYER.items() if name not in _NOT_WEIGHTS}, num_heads=2)],
        backend=backend,
    )
    given = {name.removeprefix("given_"): x[:1] for name, x in _LAYER.items() if name.startswith("given_")}
    index = torch.zeros(len(_LAYER["tokens"]), dtype=torch.int32)
    broken = {**given, "hidden": torch.full_like(given["hidden"], float("nan"))}
    for parts, is_finite in ((given, True), (broken, False)):
        made_of = wukong_layer.give(layers, [LayerGiven(**parts)])
        assert bool(wukong_layer.rank(layers, _LAYER["tokens"], made_of, index).isfinite().all()) == is_finite


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("index", [INDEX + 2**32, INDEX.float(), INDEX.bool(), INDEX.to(torch.uint8), INDEX - 1])
def test_an_index_is_checked_before_it_is_made_narrow(backend: Any, index: Tensor) -> None:
    if backend == "native":
        require_native()
    gemm = BroadcastGemm(made(7, 6), made(7, 9), backend=backend)
    with pytest.raises(ValueError, match="candidate_to_request"):
        gemm.both(made(5, 6), made(2, 9), index)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_offsets_and_index_may_be_views(backend: Any) -> None:
    if backend == "native":
        require_native()
    ends, index = torch.stack([ENDS, ENDS], 1)[:, 0], torch.stack([INDEX, INDEX], 1).int()[:, 0]
    whole = broadcast_attention(*KEYS, ENDS, INDEX, backend=backend)
    assert torch.equal(broadcast_attention(*KEYS, ends, index, backend=backend), whole)
    rows = jagged_attention(*ROWS, ENDS, ENDS, causal=True, backend=backend)
    assert torch.equal(jagged_attention(*ROWS, ends, ends, causal=True, backend=backend), rows)
    gemm = BroadcastGemm(made(7, 6), made(7, 9), backend=backend)
    assert torch.equal(gemm.both(made(5, 6), made(2, 9), index), gemm.both(made(5, 6), made(2, 9), INDEX))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-40, 1e40])
def test_a_scale_has_one_range_in_every_backend(backend: Any, value: float) -> None:
    with pytest.raises(ValueError, match="scale must be in"):
        broadcast_attention(*KEYS, ENDS, INDEX, scale=value, backend=backend)
    with pytest.raises(ValueError, match="scale must be in"):
        jagged_attention(*ROWS, ENDS, ENDS, scale=value, backend=backend)
    with pytest.raises(ValueError, match="scale must be in"):
        block_attention(*ROWS, ENDS, block=3, window_blocks=2, scale=value, backend=backend)
    with pytest.raises(ValueError, match="tau must be in"):
        gdpa(*KEYS, ENDS, INDEX, activation="silu", tau=value, backend=backend)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-13, 1.5])
def test_an_epsilon_has_one_range_in_every_backend(value: float) -> None:
    backend: Any
    for backend in ("reference", "torch"):
        with pytest.raises(ValueError, match="epsilon must be in"):
            jagged_norm(made(11, 6), made(6), ENDS, epsilon=value, backend=backend)
        with pytest.raises(ValueError, match="epsilon must be in"):
            fm_block(made(5, 4, 8), made(4, 3), gain=made(12), epsilon=value, backend=backend)
        with pytest.raises(ValueError, match="epsilon must be in"):
            LowpLinear(made(7, 16), format="int8", backend=backend)(made(5, 16), made(16), value)
        with pytest.raises(ValueError, match="epsilon must be in"):
            rms_norm_quantize(made(5, 16), made(16), format="int8", backend=backend, epsilon=value)


@pytest.mark.parametrize("size", [0, -1, 1.5, float("nan"), 2**31 + 1])
def test_blocks_and_windows_have_one_range_in_every_backend(size: Any) -> None:
    backend: Any
    for backend in CPU_BACKENDS:
        for block, window in ((size, 2), (3, size)):
            with pytest.raises(ValueError, match=r"must be a whole number in \[1, 2147483648\]"):
                block_attention(*ROWS, ENDS, block=block, window_blocks=window, backend=backend)


def test_a_row_with_nan_has_no_finite_values_in_int8() -> None:
    x = made(3, 16, dtype=torch.float32)
    x[1, 4] = float("nan")
    rows = quantize(x, format="int8", backend="reference").dequantize()
    assert rows.isfinite().all(1).tolist() == [True, False, True]


def test_a_packed_relu_keeps_nan_and_has_the_values_of_the_plain_one() -> None:
    weight, x = made(8, 6, dtype=torch.float32), made(5, 6, dtype=torch.float32)
    packed = PackedLinear(weight)
    assert torch.equal(packed(x, None, "relu"), packed(x).relu())
    x[2, 3] = float("nan")
    assert packed(x, None, "relu").isnan().all(1).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("shape", [(0, 6), (7, 0), (7,)])
def test_a_linear_of_nothing_is_refused_in_words(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"weight must be \[N, K\] with N and K at least 1"):
        PackedLinear(torch.zeros(shape))


@pytest.mark.parametrize(
    ("field", "value"),
    [("query_tokens", torch.zeros(())), ("up", torch.zeros(6)), ("norm", torch.zeros(0)), ("down", made(16, 6).int())],
)
def test_weights_of_a_layer_are_checked_before_their_sizes_are_read(field: str, value: Tensor) -> None:
    with pytest.raises(ValueError, match=rf"weights\[0\]\.{field} must"):
        _run("wukong_layer", "reference", {field: value})
