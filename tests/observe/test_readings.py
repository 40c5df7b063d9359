"""Readings of this machine, of NVIDIA GPUs by the types of pynvml, and of Apple's chip by the fields of its library."""

import ctypes
import os
import plistlib
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from disaggregated_inference.api import Readings
from disaggregated_inference.observe import ReadingsSampler
from disaggregated_inference.observe.apple import AppleMeter, apple_gpu
from disaggregated_inference.observe.machine import HostReader
from disaggregated_inference.observe.nvidia import NvidiaGpus
from disaggregated_inference.observe.readings import MachineReader
from tests.support.waiting import until

pynvml = pytest.importorskip("pynvml")


def test_this_machine() -> None:
    host = HostReader()
    used, total = host.memory()
    assert total == psutil.virtual_memory().total
    assert 0 < used < total
    assert 0 <= host.cpu_share() <= 1
    assert host.cpu_count == os.cpu_count()


def test_network_rates_are_those_of_the_counters() -> None:
    host = HostReader()
    time.sleep(0.01)
    found = host.networks()
    states = psutil.net_if_stats()
    assert {each.name for each in found} <= {name for name, state in states.items() if state.isup}
    assert all(each.received_bytes_s is not None and each.received_bytes_s >= 0 for each in found)
    host._networks["lo"] = host._networks["lo"]._replace(bytes_recv=1 << 60)
    assert {each.name: each for each in host.networks()}["lo"].received_bytes_s is None, "a counter began again"


def test_a_sampler_reads_at_its_pace_and_tells_the_age() -> None:
    sampler = ReadingsSampler("nothing", every_s=0.01).start()
    assert until(lambda: sampler.latest() is not None)
    first = sampler.latest()
    assert first
    assert until(lambda: (sampler.latest() or first).time > first.time)
    sampler.close()
    last = sampler.latest()
    assert last
    assert until(lambda: (sampler.latest() or last).age_s > last.age_s)
    assert last.missing["power_w"] == "the simulated engine computes nothing"
    assert last.power_w is None


class Nvml:
    """The driver of a machine that is not here. Types, constants and errors are pynvml's own."""

    NVMLError, NVML_ERROR_NOT_SUPPORTED = pynvml.NVMLError, pynvml.NVML_ERROR_NOT_SUPPORTED
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = (
        pynvml.NVML_TEMPERATURE_GPU,
        pynvml.NVML_CLOCK_SM,
        pynvml.NVML_CLOCK_MEM,
    )

    def __init__(self, *names: str, **unsupported: type[Exception]) -> None:
        self.names, self.unsupported = names, unsupported
        self.pids: dict[int, list[int]] = {}

    def __getattribute__(self, name: str) -> Any:
        unsupported = object.__getattribute__(self, "unsupported") if name.startswith("nvmlDevice") else {}
        if name in unsupported:
            raise unsupported[name](pynvml.NVML_ERROR_NOT_SUPPORTED)
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:  # noqa: N802
        return None

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return self.names[handle]

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}abc"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [pynvml.c_nvmlProcessInfo_v3_t(pid=pid) for pid in self.pids.get(handle, [])]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return pynvml.c_nvmlMemory_t(total=100, free=60, used=40)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        return pynvml.c_nvmlUtilization_t(gpu=75, memory=10)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        return ctypes.c_uint(120_500 + handle * 1000).value

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:  # noqa: N802
        return 240_000

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802
        return 61

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        return {pynvml.NVML_CLOCK_SM: 2418, pynvml.NVML_CLOCK_MEM: 9000}[kind]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:  # noqa: N802
        return int(pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonGpuIdle)


def test_every_function_that_is_called_is_pynvmls() -> None:
    for name in (name for name in dir(Nvml) if name.startswith("nvml")):
        assert callable(getattr(pynvml, name))


def test_an_nvidia_gpu() -> None:
    (gpu,) = NvidiaGpus(Nvml("NVIDIA H200"), {}).read()
    assert (gpu.name, gpu.utilisation, gpu.power_w, gpu.power_limit_w) == ("NVIDIA H200", 0.75, 120.5, 240)
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes, gpu.memory_shared) == (40, 100, False)
    assert (gpu.temperature_c, gpu.clock_mhz, gpu.memory_clock_mhz) == (61, 2418, 9000)
    assert (gpu.throttled, gpu.missing) == (("power limit",), {})


def test_a_dgx_spark_shares_its_memory_with_the_processor() -> None:
    """Its driver refuses the GPU's memory and its power limit."""
    refused = pynvml.NVMLError_NotSupported
    nvml = Nvml("NVIDIA GB10", nvmlDeviceGetMemoryInfo=refused, nvmlDeviceGetEnforcedPowerLimit=refused)
    (gpu,) = NvidiaGpus(nvml, {}).read()
    assert gpu.memory_shared
    assert gpu.memory_used_bytes is gpu.memory_total_bytes is gpu.power_limit_w is None
    assert gpu.missing["memory_total_bytes"] == "this GPU has no memory of its own: it shares the machine's"
    assert gpu.missing["power_limit_w"] == "NVML: Not Supported"
    found = MachineReader("gpu", "linux", NvidiaGpus(nvml, {})).read()
    assert found.memory_shared
    assert found.memory_total_bytes == psutil.virtual_memory().total, "one memory: the machine's"
    assert (found.power_w, found.power_covers) == (120.5, "GPU")


def test_power_is_that_of_the_gpus_that_the_node_computes_on() -> None:
    nvml = Nvml("a", "b", "c")
    gpus = NvidiaGpus(nvml, {"CUDA_VISIBLE_DEVICES": "0, GPU-2ab"}, pid=7)
    assert [gpu.name for gpu in gpus.read()] == ["a", "c"]
    assert gpus.own() == [0, 1], "the driver does not say which"
    nvml.pids = {2: [7], 0: [8]}
    assert gpus.own() == [1]
    assert MachineReader("gpu", "linux", gpus).read().power_w == 122.5
    found = MachineReader("cpu", "linux", gpus).read()
    assert found.power_w is None
    assert found.missing["power_w"] == "the engine computes on the processor, which has no meter here"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: NvidiaGpus(Nvml(), {}), "this machine has no NVIDIA GPU that the node may use"),
        (lambda: NvidiaGpus(Nvml("a"), {"CUDA_VISIBLE_DEVICES": ""}), "this machine has no NVIDIA GPU"),
        (lambda: AppleMeter(), "zeus-apple-silicon is not installed: pip install"),
    ],
)
def test_what_cannot_be_read_says_why(make: Any, reason: str) -> None:
    with pytest.raises(LookupError, match=reason):
        make()


def test_a_machine_without_a_driver_says_so() -> None:
    try:
        NvidiaGpus()
    except LookupError as error:
        assert str(error) == "no NVIDIA GPU can be read: NVML: NVML Shared Library Not Found"  # noqa: PT017
    else:
        pytest.skip("this machine has an NVIDIA GPU")


class Monitor:
    """With the methods and fields of zeus_apple_silicon 1.1.0, whose library runs on macOS alone."""

    def __init__(self, **counted_mj: int | None) -> None:
        self.counted, self.windows = counted_mj, set[str]()

    def begin_window(self, key: str, restart: bool = False) -> None:
        assert key not in self.windows
        self.windows.add(key)

    def end_window(self, key: str) -> Any:
        self.windows.remove(key)
        return SimpleNamespace(**self.counted)


def test_the_power_of_an_apple_chip() -> None:
    clock = iter([0.0, 2.0, 3.0])
    counted: dict[str, int | None] = {"cpu_total_mj": 10_000, "gpu_mj": 40_000, "gpu_sram_mj": None}
    meter = AppleMeter(Monitor(**counted, ane_mj=0, dram_mj=10_000), lambda: next(clock))
    assert meter.read() == (30, 20)
    assert meter.read() == (60, 40)
    nothing = AppleMeter(Monitor(gpu_mj=None), iter([0.0, 1.0]).__next__)
    assert nothing.read() == (None, None)


def test_the_use_of_an_apple_gpu() -> None:
    statistics = {"Device Utilization %": 87, "Renderer Utilization %": 80, "In use system memory": 42 << 30}
    listing = plistlib.dumps([{"IOClass": "AGXAcceleratorG15X", "PerformanceStatistics": statistics}])
    gpu = apple_gpu("Apple M3 Ultra", 55.0, "", lambda: listing)
    assert (gpu.name, gpu.utilisation, gpu.memory_used_bytes) == ("Apple M3 Ultra GPU", 0.87, 42 << 30)
    assert gpu.memory_shared
    assert gpu.power_w == 55
    assert gpu.missing["temperature_c"] == "macOS tells it to root only"
    for wrong in (plistlib.dumps([{}]), b"not a list", plistlib.dumps([])):
        gpu = apple_gpu("Apple M3 Ultra", None, "no meter", lambda wrong=wrong: wrong)  # type: ignore[misc]
        assert gpu.utilisation is None
        assert gpu.missing["utilisation"].startswith("ioreg: ")
        assert gpu.missing["power_w"] == "no meter"


def test_readings_are_bounded() -> None:
    """They come from other machines, and go onto screens."""
    wrongs: list[Any] = [
        {"cpu_share": 2},
        {"power_w": -1},
        {"power_w": 1e30},
        {"machine": "x" * 301},
        {"gpus": [{}] * 65},
    ]
    for wrong in wrongs:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, Readings)


def test_a_reading_that_others_would_refuse_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node with a strange sensor keeps serving."""
    monkeypatch.setattr(MachineReader, "read", lambda self: Readings(power_w=-5.0))
    sampler = ReadingsSampler("gpu", every_s=0.01).start()
    assert until(lambda: "the machine could not be read" in caplog.text)
    sampler.close()
    assert sampler.latest() is None
