"""A thread of the node that reads the machine at a fixed, slow pace. Requests never wait for it."""

import logging
import sys
import threading
import time
from typing import Literal

import msgspec

from disaggregated_inference.api import GpuReading, Readings
from disaggregated_inference.observe.apple import AppleMeter, apple_gpu
from disaggregated_inference.observe.machine import HostReader, chip_name
from disaggregated_inference.observe.nvidia import NvidiaGpus

log = logging.getLogger(__name__)

Computes = Literal["gpu", "cpu", "nothing", "elsewhere"]  # what the node's engine computes on

_WHY_NOT = {
    "cpu": "the engine computes on the processor, which has no meter here",
    "nothing": "the simulated engine computes nothing",
    "elsewhere": "the engine runs on another machine",
}


class ReadingsSampler:
    """Call `close` at the end. A reading that fails is logged once and leaves the last one."""

    def __init__(self, computes: Computes, every_s: float = 1.0) -> None:
        self._computes, self._every_s = computes, every_s
        self._latest: Readings | None = None
        self._read_at = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="readings", daemon=True)

    def start(self) -> "ReadingsSampler":
        self._thread.start()
        return self

    def latest(self) -> Readings | None:
        """The last reading with its age; None before the first."""
        found, read_at = self._latest, self._read_at
        return found and msgspec.structs.replace(found, age_s=max(0.0, time.monotonic() - read_at))

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        reader, failing = MachineReader(self._computes), False
        while not self._closing.wait(self._every_s):
            try:
                found = msgspec.convert(msgspec.to_builtins(reader.read()), Readings)  # what others will accept
                self._read_at, self._latest, failing = time.monotonic(), found, False
            except Exception:
                if not failing:
                    log.exception("the machine could not be read")
                failing = True


class MachineReader:
    """All readings of this machine. What cannot be read now is not tried again: drivers come with a restart. `gpus`:
    instead of those that NVIDIA's driver finds."""

    def __init__(self, computes: Computes, system: str = sys.platform, gpus: NvidiaGpus | None = None) -> None:
        self._computes, self._machine, self._is_mac = computes, HostReader(), system == "darwin"
        self._why: dict[str, str] = {}
        self._nvidia: NvidiaGpus | None = None
        self._meter: AppleMeter | None = None
        self._chip = chip_name()
        try:
            if self._is_mac:
                self._meter = AppleMeter()
            else:
                self._nvidia = gpus or NvidiaGpus()
        except LookupError as error:
            self._why["power_w" if self._is_mac else "gpus"] = str(error)

    def read(self) -> Readings:
        used, total = self._machine.memory()
        gpus, power_w, covers = self._read_apple() if self._is_mac else self._read_nvidia()
        missing = dict(self._why)
        if power_w is None:
            missing["power_w"] = self._why_no_power()
        return Readings(
            time=time.time(),
            machine=self._machine.name,
            cpu_share=self._machine.cpu_share(),
            cpu_count=self._machine.cpu_count,
            memory_used_bytes=used,
            memory_total_bytes=total,
            memory_shared=self._is_mac or any(gpu.memory_shared for gpu in gpus),
            networks=self._machine.networks(),
            gpus=gpus,
            power_w=power_w,
            power_covers=covers if power_w is not None else "",
            missing=missing,
        )

    def _why_no_power(self) -> str:
        if self._computes in ("nothing", "elsewhere"):
            return _WHY_NOT[self._computes]
        if self._computes == "cpu" and not self._is_mac:
            return _WHY_NOT["cpu"]
        return self._why.get("power_w") or self._why.get("gpus") or "the meter gives no value"

    def _read_nvidia(self) -> tuple[tuple[GpuReading, ...], float | None, str]:
        if self._nvidia is None:
            return (), None, ""
        gpus = self._nvidia.read()
        if self._computes != "gpu":
            return gpus, None, ""
        watts = [gpus[place].power_w for place in self._nvidia.own()]
        known = [each for each in watts if each is not None]
        return gpus, sum(known) if known and len(known) == len(watts) else None, "GPU"

    def _read_apple(self) -> tuple[tuple[GpuReading, ...], float | None, str]:
        chip_w, gpu_w = self._meter.read() if self._meter else (None, None)
        gpu = apple_gpu(self._chip, gpu_w, self._why.get("power_w") or "the chip does not count it")
        return (gpu,), chip_w if self._computes in ("gpu", "cpu") else None, AppleMeter.covers
