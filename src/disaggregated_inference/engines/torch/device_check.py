"""Whether torch computes on the GPU, and how fast. The doctor runs this file alone, which takes a third of the time.

Prints one line of JSON. While the GPU multiplies, nvidia-smi reads its clock: an idle GPU says nothing about a cap, and
nothing else shows one that was set with `nvidia-smi --lock-gpu-clocks`.
"""

import json
import subprocess
import time

import torch

_SIZE, _SECONDS = 4096, 1.0
_CLOCKS = "clocks.sm,clocks.max.sm,clocks_throttle_reasons.active,temperature.gpu,power.limit,power.default_limit"


def check() -> dict[str, object]:
    if not torch.cuda.is_available():
        return {"device": "cpu", "build": torch.version.cuda or "CPU only"}
    about = torch.cuda.get_device_properties(0)
    return {
        "device": "cuda",
        "name": about.name,
        "capability": f"{about.major}.{about.minor}",
        "memory_bytes": about.total_memory,
        "build": torch.version.cuda,
        **_multiply(),
    }


def _multiply() -> dict[str, object]:
    left = torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        left @ left
    torch.cuda.synchronize()
    began, rounds, clocks = time.perf_counter(), 0, ""
    while time.perf_counter() - began < _SECONDS:
        for _ in range(50):
            left @ left
        if not clocks and time.perf_counter() - began > _SECONDS / 2:  # a power cap needs a moment
            clocks = _clocks()
        torch.cuda.synchronize()
        rounds += 50
    return {"tflops": 2 * _SIZE**3 * rounds / (time.perf_counter() - began) / 1e12, "clocks": clocks}


def _clocks() -> str:
    """A line of CSV; empty without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    print(json.dumps(check()))
