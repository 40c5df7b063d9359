"""NVIDIA GPUs, as nvidia-smi shows them: heat, power, clocks, and what other processes hold."""

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from disaggregated_inference.doctor.commands import find_program, output_of
from disaggregated_inference.doctor.findings import CannotRead, Finding, found, ok
from disaggregated_inference.doctor.plan import ExpectedMachine

_FIELDS = "name,memory.total,temperature.gpu,power.limit,power.default_limit,clocks_throttle_reasons.active"
_LOAD_SHARE = 0.8  # a GPU under load below this share of its highest clock is capped or throttled
_POWER_SHARE = 0.9
_LARGE_MIB = 1024

# NVML's reasons for a lower clock. Idle (1), application clocks (2) and sync boost (16) are left out: they are choices.
_POWER_LIMIT = 0x4
_REASONS = {
    0x8: "a hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power supply's brake",
}


class NvidiaGpu(NamedTuple):
    name: str
    memory_mib: int | None  # None: shared with the CPU, as on a GB10
    temperature_c: int | None
    power_limit_w: float | None
    default_power_w: float | None
    reasons: int


class GpuLoad(NamedTuple):
    """Of one GPU while it computes."""

    clock_mhz: int | None
    highest_mhz: int | None
    reasons: int
    temperature_c: int | None
    power_limit_w: float | None
    default_power_w: float | None


class GpuProcess(NamedTuple):
    pid: int
    name: str
    used_mib: int | None


def read_gpus() -> list[NvidiaGpu]:
    return parse_gpus(output_of("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"))


def parse_gpus(text: str) -> list[NvidiaGpu]:
    found_gpus = []
    for line in text.strip().splitlines():
        name, memory, heat, limit, default, reasons = _cells(line, 6)
        found_gpus.append(
            NvidiaGpu(name, _integer(memory), _integer(heat), _number(limit), _number(default), _mask(reasons))
        )
    return found_gpus


def parse_load(line: str) -> GpuLoad:
    clock, highest, reasons, heat, limit, default = _cells(line, 6)
    return GpuLoad(_integer(clock), _integer(highest), _mask(reasons), _integer(heat), _number(limit), _number(default))


def parse_processes(text: str) -> list[GpuProcess]:
    """From `--query-compute-apps=pid,process_name,used_memory`."""
    rows = [_cells(line, 3) for line in text.strip().splitlines()]
    return [GpuProcess(int(pid), name, _integer(used)) for pid, name, used in rows if pid.isdigit()]


def check_gpus(plan: ExpectedMachine) -> Iterator[Finding]:
    if not find_program("nvidia-smi"):
        return
    for gpu in read_gpus():
        yield from judge_gpu(gpu)
    processes = output_of(
        "nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"
    )
    yield from judge_processes(parse_processes(processes))


def judge_gpu(gpu: NvidiaGpu) -> Iterator[Finding]:
    heat = f" at {gpu.temperature_c} °C" if gpu.temperature_c is not None else ""
    if held := held_back_by(gpu.reasons & ~_POWER_LIMIT):
        yield found("warning", "gpu-throttled", f"{gpu.name}{heat} is held back by {held}")
    else:
        yield ok("gpu-throttled", f"{gpu.name}{heat} is not held back")
    if _is_lowered(gpu):
        yield _lowered_power(gpu.name, gpu)


def judge_load(load: GpuLoad) -> Iterator[Finding]:
    """A GPU that multiplies with all its units reaches its usual power limit: that is no fault."""
    if not load.clock_mhz or not load.highest_mhz:
        return
    clock = f"the GPU computes at {load.clock_mhz} MHz of {load.highest_mhz}"
    at_power_limit, held = bool(load.reasons & _POWER_LIMIT), held_back_by(load.reasons & ~_POWER_LIMIT)
    if held:
        heat = f" at {load.temperature_c} °C" if load.temperature_c is not None else ""
        yield found("warning", "gpu-throttled", f"{clock}{heat}, held back by {held}")
    elif load.clock_mhz >= _LOAD_SHARE * load.highest_mhz or (at_power_limit and not _is_lowered(load)):
        yield ok("gpu-clock", clock + (", at its power limit" if at_power_limit else ""))
    elif at_power_limit:
        yield _lowered_power(clock, load)
    else:
        yield found("warning", "gpu-clock", f"{clock}, and names no reason: its clock is capped")


def _is_lowered(gpu: NvidiaGpu | GpuLoad) -> bool:
    return bool(gpu.power_limit_w and gpu.default_power_w and gpu.power_limit_w < _POWER_SHARE * gpu.default_power_w)


def _lowered_power(subject: str, gpu: NvidiaGpu | GpuLoad) -> Finding:
    what = f"{subject}: it may use {gpu.power_limit_w:.0f} W of its usual {gpu.default_power_w:.0f} W"
    return found("warning", "gpu-clock", what, f"sudo nvidia-smi --power-limit={gpu.default_power_w:.0f}")


def judge_processes(processes: list[GpuProcess]) -> Iterator[Finding]:
    for process in processes:
        if (process.used_mib or 0) >= _LARGE_MIB and not _is_node(process.pid):
            what = f"process {process.pid} ({process.name}) holds {process.used_mib / 1024:.1f} GiB of GPU memory"  # type: ignore[operator]
            yield found("warning", "gpu-memory", what, f"kill {process.pid}, or a smaller --kv-memory for the node")


def _is_node(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"disagg" in file.read() or pid == os.getpid()
    except OSError:
        return False


def held_back_by(reasons: int) -> str:
    return " and ".join(words for bit, words in _REASONS.items() if reasons & bit)


def _cells(line: str, count: int) -> list[str]:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != count:
        raise CannotRead(f"nvidia-smi answers with {len(cells)} fields instead of {count}: {line}")
    return cells


def _integer(text: str) -> int | None:
    """None for `[N/A]` and `[Not Supported]`."""
    number = _number(text)
    return None if number is None else int(number)


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def _mask(text: str) -> int:
    return int(text, 16) if text.startswith("0x") else 0
