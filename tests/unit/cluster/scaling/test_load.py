"""What a replica tells about its load, and what a GPU tells about its."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.scaling.device import NvmlSampler, SmActivity
from cluster.scaling.load import LoadReporter
from services.meter import Meter
from services.worker import WorkerLoad
from shared.clock import ManualClock
from shared.errors import ConfigError


class Service:
    """A station with a compute thread."""

    def __init__(self, clock: ManualClock) -> None:
        self.meter = Meter("ranking:full", "r", clock, label_values={"tier": ("full",)})
        self.told = WorkerLoad(0.0, 0, 0)

    def load(self) -> WorkerLoad:
        return self.told


async def test_the_share_and_the_queue_of_a_compute_thread() -> None:
    clock = ManualClock()
    service = Service(clock)
    reporter = LoadReporter(service, clock)
    await clock.advance(2.0)
    service.told = WorkerLoad(busy_s=1.5, num_ended=30, num_waiting=4)
    assert reporter.report() == {"busy_share": 0.75, "waiting_s": pytest.approx(4 * 0.05)}
    await clock.advance(1.0)
    assert reporter.report()["busy_share"] == 0.0
    assert reporter.report() == {}  # no time has passed


async def test_the_percentile_of_a_call_counts_its_waiting() -> None:
    clock = ManualClock()
    service = Service(clock)
    reporter = LoadReporter(service, clock)
    for elapsed_s in [0.01] * 98 + [0.5, 0.7]:
        with service.meter.call("rank"):
            await clock.advance(elapsed_s)
    assert reporter.report()["p99_ms"] == pytest.approx(500)
    await clock.advance(11)
    assert "p99_ms" not in reporter.report()  # of the last ten seconds


async def test_a_station_without_a_compute_thread_is_as_busy_as_its_process() -> None:
    clock, used = ManualClock(), iter([1.0, 1.25, 9.0])
    reporter = LoadReporter(SimpleNamespace(), clock, processor=lambda: next(used))
    await clock.advance(0.5)
    assert reporter.report() == {"busy_share": 0.5}
    await clock.advance(0.5)
    assert reporter.report() == {"busy_share": 1.0}  # other threads of the process helped


NVML_NAMES = {
    "nvmlInit": "start",
    "nvmlDeviceGetHandleByIndex": "by_index",
    "nvmlDeviceGetHandleByUUID": "by_uuid",
    "nvmlGpmQueryDeviceSupport": "support",
    "nvmlGpmSampleAlloc": "allocate",
    "nvmlGpmSampleGet": "take",
    "nvmlGpmSampleFree": "free",
    "c_nvmlGpmMetricsGet_t": "question",
    "nvmlGpmMetricsGet": "answer",
}


class FakeNvml:
    """NVML with one device, whose multiprocessors are as busy as ``percent`` says."""

    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL = 2

    class NVMLError(Exception):
        pass

    def __init__(self, supported: bool = True, devices: int = 1) -> None:
        self.supported, self.devices = supported, devices
        self.percent = 0.0
        self.held: set[int] = set()
        self.asked: list[Any] = []
        self._number = 0

    def __getattr__(self, name: str) -> Any:
        if name not in NVML_NAMES:
            raise AttributeError(name)
        return getattr(self, NVML_NAMES[name])

    def start(self) -> None: ...

    def by_index(self, index: int) -> str:
        if index >= self.devices:
            raise self.NVMLError("Invalid Argument")
        return f"device {index}"

    def by_uuid(self, uuid: str) -> str:
        return f"device {uuid}"

    def support(self, device: str) -> Any:
        return SimpleNamespace(isSupportedDevice=int(self.supported))

    def allocate(self) -> int:
        self._number += 1
        self.held.add(self._number)
        return self._number

    def take(self, device: str, sample: int) -> int:
        return sample

    def free(self, sample: int) -> None:
        self.held.remove(sample)

    def question(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, value=0.0)])

    def answer(self, question: Any) -> Any:
        self.asked.append((question.sample1, question.sample2, question.metrics[0].metricId))
        question.metrics[0].value = self.percent
        return question


async def test_a_replica_with_a_gpu_is_as_busy_as_its_multiprocessors() -> None:
    nvml, clock = FakeNvml(), ManualClock()
    service = Service(clock)
    reporter = LoadReporter(service, clock, SmActivity(NvmlSampler("0", nvml)))
    for percent in (40.0, 120.0):
        nvml.percent = percent
        service.told = WorkerLoad(busy_s=99.0, num_ended=1, num_waiting=0)
        await clock.advance(1.0)
        assert reporter.report()["busy_share"] == min(percent / 100, 1.0)
    assert nvml.asked == [(1, 2, 2), (2, 3, 2)]
    assert nvml.held == {3}  # samples are let go of


def test_what_a_device_cannot_say_is_not_known_and_its_samples_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    activity = SmActivity(NvmlSampler("0", nvml))
    nvml.percent = float("nan")
    assert activity.share() is None
    nvml.percent = 40.0
    assert activity.share() == 0.4

    def fails(question: Any) -> Any:
        raise nvml.NVMLError("GPU is lost")

    monkeypatch.setattr(nvml, "answer", fails)
    with pytest.raises(nvml.NVMLError):
        activity.share()
    assert len(nvml.held) == 1


@pytest.mark.parametrize(
    ("nvml", "device", "reason"),
    [(FakeNvml(supported=False), "0", "Hopper"), (FakeNvml(devices=1), "1", "Invalid Argument")],
)
def test_a_device_that_cannot_tell_is_refused(nvml: FakeNvml, device: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"SM activity of GPU {device}: .*{reason}"):
        NvmlSampler(device, nvml)


def test_a_machine_without_a_driver_is_refused() -> None:
    nvml: Any = importlib.import_module("ray._private.thirdparty.pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        with pytest.raises(ConfigError, match=r"autoscaling.signal sm needs SM activity of GPU 0"):
            NvmlSampler("0")
    else:
        pytest.skip("this machine has a driver")
