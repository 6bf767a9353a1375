"""Activity of a GPU's multiprocessors by NVML's GPM samples: the share of cycles in which an SM had work, over all SMs.

``nvidia-smi``'s utilisation is the share of time in which any kernel ran; one small kernel makes it 100%, so it cannot
say how many replicas fit. GPM needs Hopper or newer. The bindings are those that Ray carries; NVML itself comes with
the driver.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from shared.errors import ConfigError


class GpmSampler(Protocol):
    """The part of NVML that is needed, for one device."""

    def sample(self) -> Any:
        """Take a sample."""
        ...

    def sm_percent(self, before: Any, after: Any) -> float:
        """Return the activity between two samples, 0 to 100."""
        ...

    def free(self, sample: Any) -> None:
        """Let go of a sample."""
        ...


class SmActivity:
    """Activity since the last time it was asked for.

    Args:
        sampler: The device.
    """

    def __init__(self, sampler: GpmSampler) -> None:
        self._sampler = sampler
        self._before = sampler.sample()

    def share(self) -> float | None:
        """Return the share of SM cycles with work since the last call, 0 to 1; None where the device cannot say."""
        before, self._before = self._before, self._sampler.sample()
        try:
            percent = self._sampler.sm_percent(before, self._before)
        finally:
            self._sampler.free(before)
        return None if math.isnan(percent) else min(max(percent / 100.0, 0.0), 1.0)


class NvmlSampler:
    """GPM samples of one GPU.

    Args:
        device: Index, or UUID as ``CUDA_VISIBLE_DEVICES`` may have it.
        nvml: The bindings; default Ray's.

    Raises:
        ConfigError: there is no NVML, no such device, or it is older than Hopper.
    """

    def __init__(self, device: str, nvml: Any = None) -> None:
        self._nvml = nvml or _bindings()
        try:
            self._nvml.nvmlInit()
            by_uuid = device.startswith(("GPU-", "MIG-"))
            find = self._nvml.nvmlDeviceGetHandleByUUID if by_uuid else self._nvml.nvmlDeviceGetHandleByIndex
            self._device = find(device if by_uuid else int(device))
            supported = self._nvml.nvmlGpmQueryDeviceSupport(self._device).isSupportedDevice
        except self._nvml.NVMLError as error:
            raise _unusable(device, str(error)) from error
        if not supported:
            raise _unusable(device, "the device has no GPM samples (they come with Hopper)")

    def sample(self) -> Any:
        """Take a sample."""
        sample = self._nvml.nvmlGpmSampleAlloc()
        return self._nvml.nvmlGpmSampleGet(self._device, sample)

    def sm_percent(self, before: Any, after: Any) -> float:
        """Return the activity between two samples, 0 to 100."""
        nvml = self._nvml
        question = nvml.c_nvmlGpmMetricsGet_t()
        question.version = nvml.NVML_GPM_METRICS_GET_VERSION
        question.numMetrics = 1
        question.sample1, question.sample2 = before, after
        question.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        return float(nvml.nvmlGpmMetricsGet(question).metrics[0].value)

    def free(self, sample: Any) -> None:
        """Let go of a sample."""
        self._nvml.nvmlGpmSampleFree(sample)


def _bindings() -> Any:
    from ray._private.thirdparty import pynvml

    return pynvml


def _unusable(device: str, reason: str) -> ConfigError:
    return ConfigError(
        f"autoscaling.signal sm needs SM activity of GPU {device}: {reason}", field="autoscaling.signal", value="sm"
    )
