"""Whether engines compute on the GPU or by Metal, measured by a short multiplication in a process of its own."""

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from disaggregated_inference.doctor import nvidia
from disaggregated_inference.doctor.commands import output_of
from disaggregated_inference.doctor.findings import CannotRead, Finding, found, note, ok, unknown
from disaggregated_inference.doctor.plan import ExpectedMachine
from disaggregated_inference.doctor.software import REAL_ENGINES, installed_engines
from disaggregated_inference.timeouts import DoctorTimeouts

_ENGINES_FOLDER = Path(__file__).parents[1] / "engines"
_MATRIX_RATIO = 1.5  # of 16-bit to 32-bit multiplication; without matrix units the two are about equal


def check_devices(plan: ExpectedMachine) -> Iterator[Finding]:
    wanted = [name for name in plan.engines if name in REAL_ENGINES] if plan.servers else REAL_ENGINES
    for engine in installed_engines():
        if engine in wanted:
            try:
                yield from judge_device(engine, measure_device(engine), has_gpu())
            except CannotRead as error:
                yield unknown("engine-device", str(error))


def measure_device(engine: str, timeouts: DoctorTimeouts = DoctorTimeouts()) -> dict[str, Any]:
    """What `device_check.py` of the engine says."""
    command = [sys.executable, "-P", str(_ENGINES_FOLDER / engine / "device_check.py")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeouts.engine_s)
    except subprocess.TimeoutExpired:
        raise CannotRead(f"{engine} did not start within {timeouts.engine_s:.0f} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        words = done.stderr.strip().splitlines()
        raise CannotRead(f"{engine} cannot be started: {words[-1] if words else f'exit code {done.returncode}'}")
    reading: dict[str, Any] = json.loads(lines[-1])
    return reading


def has_gpu() -> str:
    """The name of the GPU that an engine should use; empty without one."""
    if platform.system() == "Darwin":
        return "Metal" if platform.machine() == "arm64" else ""
    try:
        return nvidia.read_gpus()[0].name
    except (CannotRead, IndexError):
        return ""


def judge_device(engine: str, reading: dict[str, Any], gpu: str) -> Iterator[Finding]:
    if reading["device"] != "cpu":
        rate = f", {reading['tflops']:.0f} TFLOP/s measured" if "tflops" in reading else ""
        yield ok("engine-device", f"{engine} computes on {reading.get('name', 'the GPU')}{rate}")
        yield from _judge_clock(reading.get("clocks", ""))
        yield from judge_matrix_units(reading)
    elif gpu and not (engine == "mlx" and platform.system() != "Darwin"):
        build = f" ({reading['build']})" if "build" in reading else ""
        yield found("error", "engine-device", f"{engine} computes on the CPU{build}; this machine has {gpu}")
    else:
        yield note("engine-device", f"{engine} computes on the CPU; this machine has no GPU for it")


def _judge_clock(line: str) -> Iterator[Finding]:
    """The GPU's clock while it multiplied."""
    if line:
        yield from nvidia.judge_load(nvidia.parse_load(line))


def judge_matrix_units(reading: dict[str, Any]) -> Iterator[Finding]:
    match = re.search(r"\bM(\d+)\b", str(reading.get("name", "")))
    if not match or int(match[1]) < 5:
        return
    ratio = reading["tflops"] / max(reading["tflops_float32"], 1e-9)
    words = f"16-bit multiplication is {ratio:.1f} times as fast as 32-bit"
    if ratio >= _MATRIX_RATIO:
        yield ok("matrix-units", f"the matrix units of the {reading['name']} are in use: {words}")
        return
    try:
        system = f" on macOS {output_of('sw_vers', '-productVersion').strip()}"
    except CannotRead:
        system = ""
    yield found(
        "warning", "matrix-units", f"MLX{system} does not use the matrix units of the {reading['name']}: {words}"
    )
