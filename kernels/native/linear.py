"""Linears over rows: bf16 with the request's part in fp32, and int8 with scales by row and by output channel."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.native.checks import check_range, check_requests, check_tensor
from kernels.native.library import check_done, load, num_threads, pointer
from kernels.native.packing import LANES, PackedMatrixStruct, pack_matrix, pack_panels

ROWS_MAX = 96
"""Rows of one chunk: sixteen tiles of six, which read each panel of weights once from the shared cache."""
INT8_LARGEST = 127
INPUTS_MAX = 65536
"""Largest K of an int8 linear: 255 * 127 * K must fit into the int32 sums."""
NORM_EPSILON = 1e-6
"""Of the RMS norm that may be fused into quantization, as in ``models.layers.norm``."""

_FLOATS = (torch.bfloat16, torch.float32)


class _BroadcastLinearArguments(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("request_part", ctypes.c_void_p),
        ("requests", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("request_x", ctypes.c_void_p),
        ("weight", PackedMatrixStruct),
        ("request_weight", PackedMatrixStruct),
        ("num_rows", ctypes.c_int64),
        ("num_requests", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("relu", ctypes.c_int32),
        ("out_is_fp32", ctypes.c_int32),
    ]


class _QuantizeArguments(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("gain", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("is_fp32", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
    ]


class _Int8LinearArguments(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("gain", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("weight_scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("num_quads", ctypes.c_int64),
        ("bias_stride", ctypes.c_int64),
        ("x_is_fp32", ctypes.c_int32),
        ("out_is_fp32", ctypes.c_int32),
        ("relu", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
    ]


class BroadcastLinear:
    """act(x W^T + request part of the row's request): a request's half of a linear is computed once, not a candidate.

    The fp32 request part starts the fp32 sums, so the result is rounded once. A row's result is equal to the bit for
    any batch and any number of threads.

    Args:
        weight: [N, K], any floating dtype; kept in bf16.
        request_weight: [N, R], the request's half of the layer; None: parts come from elsewhere.

    Raises:
        ValueError: a weight is not such a matrix.
    """

    def __init__(self, weight: Tensor, request_weight: Tensor | None = None) -> None:
        if weight.dim() != 2 or min(weight.shape) < 1:
            raise ValueError(f"weight must be [N, K] with N and K at least 1, is {list(weight.shape)}")
        self.num_outputs, self.num_inputs = weight.shape
        self._weight = pack_matrix(weight)
        self._request_half: BroadcastLinear | None = None
        if request_weight is not None:
            if len(request_weight) != len(weight):
                raise ValueError(f"request_weight must have {len(weight)} rows, has {len(request_weight)}")
            self._request_half = BroadcastLinear(request_weight)

    def __call__(
        self,
        x: Tensor,
        request_part: Tensor | None = None,
        candidate_to_request: Tensor | None = None,
        relu: bool = False,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """Run it with parts that are there.

        Args:
            x: bf16 [C, K].
            request_part: fp32 [B, N]; None: zero.
            candidate_to_request: int32 [C] in [0, B), any order; None: there is one request.
            relu: Whether negative sums become 0.
            out_dtype: bf16 or fp32.

        Returns:
            [C, N].

        Raises:
            ValueError: an argument breaks these rules.
            NativeUnavailableError: there is no native library.
        """
        num_requests = 1
        if request_part is not None:
            check_tensor("request_part", request_part, torch.float32, None, self.num_outputs)
            num_requests = len(request_part)
        return self._run(x, request_part, candidate_to_request, num_requests, relu, out_dtype, None)

    def request_part(self, request_x: Tensor) -> Tensor:
        """Run the request's half: bf16 [B, R] -> fp32 [B, N].

        Raises:
            ValueError: it is not such a tensor, or there was no request_weight.
            NativeUnavailableError: there is no native library.
        """
        return self._half()(request_x, out_dtype=torch.float32)

    def both(
        self,
        x: Tensor,
        request_x: Tensor,
        candidate_to_request: Tensor | None = None,
        relu: bool = False,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """Run both halves in one call: ``self(x, self.request_part(request_x), ..)``, to the bit.

        Args:
            x: bf16 [C, K].
            request_x: bf16 [B, R].
            candidate_to_request: int32 [C] in [0, B), any order; None: there is one request.
            relu: Whether negative sums become 0.
            out_dtype: bf16 or fp32.

        Returns:
            [C, N].

        Raises:
            ValueError: an argument breaks these rules, or there was no request_weight.
            NativeUnavailableError: there is no native library.
        """
        half = self._half()
        check_tensor("request_x", request_x, torch.bfloat16, None, half.num_inputs)
        part = torch.empty(len(request_x), self.num_outputs)
        return self._run(x, part, candidate_to_request, len(request_x), relu, out_dtype, request_x)

    def _half(self) -> BroadcastLinear:
        if self._request_half is None:
            raise ValueError("request_weight must be given for the request's half, is None")
        return self._request_half

    def _run(
        self,
        x: Tensor,
        part: Tensor | None,
        candidate_to_request: Tensor | None,
        num_requests: int,
        relu: bool,
        out_dtype: torch.dtype,
        request_x: Tensor | None,
    ) -> Tensor:
        check_tensor("x", x, torch.bfloat16, None, self.num_inputs)
        num_rows = len(x)
        requests = None
        if candidate_to_request is not None or num_requests != 1:
            requests = check_requests(candidate_to_request, num_rows, num_requests)
        out = _output(num_rows, self.num_outputs, out_dtype)
        x, request_x = _even(x), None if request_x is None else _even(request_x)
        arguments = _BroadcastLinearArguments(
            *map(pointer, (x, part, requests, out, request_x)),
            self._weight.struct,
            PackedMatrixStruct() if request_x is None else self._half()._weight.struct,
            num_rows,
            num_requests,
            _chunk_rows(num_rows),
            self.num_outputs,
            int(relu),
            int(out_dtype == torch.float32),
        )
        code = load().rankmesh_broadcast_linear(ctypes.byref(arguments), ctypes.c_int(num_threads()))
        check_done(code, "broadcast_linear")
        return out


def _even(x: Tensor) -> Tensor:
    """Pad rows to an even width: a pair must not reach into the next row."""
    return torch.nn.functional.pad(x, (0, 1)) if x.shape[1] % 2 else x


def quantize_rows(x: Tensor, gain: Tensor | None = None, epsilon: float = NORM_EPSILON) -> tuple[Tensor, Tensor]:
    """Round each row to int8 with a scale of its own: symmetric, the largest absolute value becomes 127.

    Args:
        x: bf16 or fp32 [M, K].
        gain: fp32 [K]: what is quantized is the RMS norm of x with this gain, in the same pass; None: x itself.
        epsilon: Of the norm.

    Returns:
        int8 [M, K] and fp32 [M]; ``q * scale`` approximates the row. A row of zeros has scale 0, a row with a NaN has
        scale NaN.

    Raises:
        ValueError: an argument breaks these rules.
        NativeUnavailableError: there is no native library.
    """
    check_tensor("x", x, _FLOATS, None, None)
    _check_norm(gain, epsilon, x.shape[1])
    q, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x))
    arguments = _QuantizeArguments(
        pointer(x),
        pointer(gain),
        pointer(q),
        pointer(scales),
        *x.shape,
        int(x.dtype == torch.float32),
        epsilon,
    )
    code = load().rankmesh_quantize_rows(ctypes.byref(arguments), ctypes.c_int(num_threads()))
    check_done(code, "quantize_rows")
    return q, scales


class Int8Linear:
    """x W^T in int8: rows are quantized as they come in, the weight by output channel; sums are exact in int32.

    Rows are quantized around a zero point of 128, because VPDPBUSD multiplies unsigned by signed; what the zero point
    adds is the same for every row and is taken off again. A row's result is equal to the bit for any batch and any
    number of threads.

    Args:
        weight: [N, K], any floating dtype; K at most 65,536.

    Raises:
        ValueError: the weight is not such a matrix.
    """

    def __init__(self, weight: Tensor) -> None:
        if weight.dim() != 2 or min(weight.shape) < 1 or weight.shape[1] > INPUTS_MAX:
            raise ValueError(f"weight must be [N, K] with K in [1, {INPUTS_MAX}], is {list(weight.shape)}")
        self.num_outputs, self.num_inputs = weight.shape
        wide = weight.detach().float()
        scales = wide.abs().amax(1) / INT8_LARGEST
        rounded = torch.where(scales[:, None] > 0, wide / scales[:, None], 0.0).round()
        q = torch.nn.functional.pad(rounded.to(torch.int8), (0, -self.num_inputs % 4, 0, -self.num_outputs % LANES))
        self._weight = pack_panels(q.contiguous().view(torch.int32).T)
        self._num_quads = q.shape[1] // 4
        self._scales = torch.nn.functional.pad(scales, (0, -self.num_outputs % LANES))
        self._offsets = 128 * q.sum(1, dtype=torch.int32)

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        relu: bool = False,
        gain: Tensor | None = None,
        epsilon: float = NORM_EPSILON,
        out_dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Run it.

        Args:
            x: bf16 or fp32 [M, K].
            bias: fp32 [N] or [M, N], added in fp32; None: nothing.
            relu: Whether negative sums become 0.
            gain: fp32 [K]: x is RMS-normalised with this gain first, in the pass that quantizes it; None: it is not.
            epsilon: Of the norm.
            out_dtype: fp32 or bf16.

        Returns:
            [M, N].

        Raises:
            ValueError: an argument breaks these rules.
            NativeUnavailableError: there is no native library.
        """
        check_tensor("x", x, _FLOATS, None, self.num_inputs)
        _check_norm(gain, epsilon, self.num_inputs)
        num_rows = len(x)
        bias_stride = 0
        if bias is not None and bias.dim() == 2:
            check_tensor("bias", bias, torch.float32, num_rows, self.num_outputs)
            bias_stride = self.num_outputs
        elif bias is not None:
            check_tensor("bias", bias, torch.float32, self.num_outputs)
        out = _output(num_rows, self.num_outputs, out_dtype)
        arguments = _Int8LinearArguments(
            pointer(x),
            pointer(gain),
            pointer(self._weight),
            pointer(self._scales),
            pointer(self._offsets),
            pointer(bias),
            pointer(out),
            num_rows,
            _chunk_rows(num_rows),
            self.num_inputs,
            self.num_outputs,
            len(self._scales),
            self._num_quads,
            bias_stride,
            int(x.dtype == torch.float32),
            int(out_dtype == torch.float32),
            int(relu),
            epsilon,
        )
        code = load().rankmesh_int8_linear(ctypes.byref(arguments), ctypes.c_int(num_threads()))
        check_done(code, "int8_linear")
        return out


def _output(num_rows: int, num_outputs: int, out_dtype: torch.dtype) -> Tensor:
    if out_dtype not in _FLOATS:
        raise ValueError(f"out_dtype must be torch.bfloat16 or torch.float32, is {out_dtype}")
    return torch.empty(num_rows, num_outputs, dtype=out_dtype)


def _check_norm(gain: Tensor | None, epsilon: float, width: int) -> None:
    check_range("epsilon", epsilon, 1e-12, 1.0)
    if gain is not None:
        check_tensor("gain", gain, torch.float32, width)


def _chunk_rows(num_rows: int) -> int:
    """Return full tiles of six, and the same work for every thread."""
    of_a_thread = max(1, -(-num_rows // num_threads()))
    rounds = -(-of_a_thread // ROWS_MAX)
    return -(-of_a_thread // (rounds * 6)) * 6
