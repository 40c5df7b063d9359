"""Readings of NVIDIA GPUs, by NVML (package nvidia-ml-py, extra `energy`)."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from disaggregated_inference.api import GpuReading

_INSTALL = "the package nvidia-ml-py is not installed: pip install 'disaggregated-inference[energy]'"
_SHARED = "this GPU has no memory of its own: it shares the machine's"
# Bits of NVML's clocks event reasons that mean a slower GPU, in words. Idle and the user's own settings do not.
_THROTTLES = {
    0x0000000000000004: "power limit",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "temperature",
    0x0000000000000040: "temperature (hardware)",
    0x0000000000000080: "power brake",
}


class NvidiaGpus:
    """`library`: pynvml. Raises LookupError with the reason where there is nothing to read."""

    def __init__(self, library: Any = None, environ: Mapping[str, str] = os.environ, pid: int | None = None) -> None:
        self._nvml = library or _load()
        self._pid = pid or os.getpid()
        try:
            self._nvml.nvmlInit()
            found = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        except self._nvml.NVMLError as error:
            raise LookupError(f"no NVIDIA GPU can be read: {_words(error)}") from error
        self._handles = [handle for index, handle in enumerate(found) if self._is_visible(index, handle, environ)]
        if not self._handles:
            raise LookupError("this machine has no NVIDIA GPU that the node may use")

    def read(self) -> tuple[GpuReading, ...]:
        return tuple(map(self._read, self._handles))

    def own(self) -> list[int]:
        """Places in `read` of the GPUs that this process computes on; all, where the driver does not say."""
        mine = [place for place, handle in enumerate(self._handles) if self._pid in self._pids(handle)]
        return mine or list(range(len(self._handles)))

    def _is_visible(self, index: int, handle: Any, environ: Mapping[str, str]) -> bool:
        """As CUDA_VISIBLE_DEVICES says, by number or by the beginning of the GPU's UUID."""
        wanted = environ.get("CUDA_VISIBLE_DEVICES")
        if wanted is None:
            return True
        uuid = str(self._nvml.nvmlDeviceGetUUID(handle))
        names = [name.strip() for name in wanted.split(",")]
        return str(index) in names or any(name.startswith("GPU-") and uuid.startswith(name) for name in names)

    def _pids(self, handle: Any) -> list[int]:
        try:
            return [process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        except self._nvml.NVMLError:
            return []

    def _read(self, handle: Any) -> GpuReading:
        nvml, missing, unsupported = self._nvml, dict[str, str](), set[str]()

        def ask(field: str, read: Callable[[], Any]) -> Any:
            try:
                return read()
            except nvml.NVMLError as error:
                missing[field] = _words(error)
                if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                    unsupported.add(field)
                return None

        memory = ask("memory_total_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        shared = "memory_total_bytes" in unsupported
        if shared:
            missing["memory_total_bytes"] = _SHARED
        power_mw = ask("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        limit_mw = ask("power_limit_w", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        used = ask("utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        reasons = ask("throttled", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)) or 0
        return GpuReading(
            name=str(ask("name", lambda: nvml.nvmlDeviceGetName(handle)) or ""),
            utilisation=None if used is None else min(1.0, used / 100),
            memory_used_bytes=memory.used if memory else None,
            memory_total_bytes=memory.total if memory else None,
            memory_shared=shared,
            power_w=None if power_mw is None else power_mw / 1000,
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
            temperature_c=ask(
                "temperature_c", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            clock_mhz=ask("clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=ask("memory_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            throttled=tuple(words for bit, words in _THROTTLES.items() if reasons & bit),
            missing=missing,
        )


def _load() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise LookupError(_INSTALL) from error
    return pynvml


def _words(error: Exception) -> str:
    return f"NVML: {error}"[:300]
