"""Python, and the versions of the engines' packages."""

import json
import platform
import sys
import urllib.request
from collections.abc import Iterator

from disaggregated_inference.doctor.commands import output_of
from disaggregated_inference.doctor.findings import CannotRead, Finding, found, ok
from disaggregated_inference.doctor.plan import ExpectedMachine
from disaggregated_inference.engines import ENGINES, EnginePackage, engine_packages
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.timeouts import DoctorTimeouts

OLDEST_PYTHON = (3, 11)
REAL_ENGINES = tuple(name for name in ENGINES if name != "simulated")


def check_python(plan: ExpectedMachine) -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        yield found("error", "python-version", f"this is Python {version}; 3.11 or newer is needed")
    elif platform.system() == "Darwin" and _is_translated():
        yield found("error", "python-version", f"Python {version} is for Intel and runs under Rosetta; MLX needs arm64")
    else:
        yield ok("python-version", f"Python {version} for {platform.machine()}")


def _is_translated() -> bool:
    try:
        return output_of("sysctl", "-n", "sysctl.proc_translated").strip() == "1"
    except CannotRead:  # Intel Macs do not have the value
        return False


def check_engines(plan: ExpectedMachine) -> Iterator[Finding]:
    """Those that servers of this machine need; without servers, those that are installed."""
    for engine in REAL_ENGINES:
        packages = engine_packages(engine)
        is_there = not plan.servers and all(package.installed for package in packages)
        if engine in plan.engines or is_there:
            yield from _engine(engine, packages)
    if "ollama" in plan.engines:
        yield _ollama()
    if "vllm" in plan.engines:
        yield _vllm()
    if not plan.servers and not installed_engines():
        yield found("warning", "engine-version", "no engine is installed: only simulated nodes and the gateway can run")


def _ollama(url: str = "http://127.0.0.1:11434/api/version", timeouts: DoctorTimeouts = DoctorTimeouts()) -> Finding:
    try:
        with urllib.request.urlopen(url, timeout=timeouts.connect_s) as response:
            return ok("engine-version", f"engine ollama: Ollama {json.load(response)['version']} answers")
    except (OSError, ValueError, KeyError) as error:
        what = f"engine ollama: no Ollama answers at {url}: {getattr(error, 'reason', error)}"
        return found("error", "engine-version", what, "ollama serve")


def _vllm() -> Finding:
    """It has an environment of its own: which one, only the options of its node say for sure."""
    from disaggregated_inference.vllm_node import find_python, probe

    try:
        build = probe(find_python(""))
    except DisaggError as error:
        return found("warning", "engine-version", f"engine vllm: {error}, or set DISAGG_VLLM_PYTHON to it")
    return ok("engine-version", f"engine vllm: vLLM {build.version}, torch {build.torch}, Python {build.python}")


def installed_engines() -> list[str]:
    return [name for name in REAL_ENGINES if all(package.installed for package in engine_packages(name))]


def _engine(engine: str, packages: list[EnginePackage]) -> Iterator[Finding]:
    untested = [package for package in packages if not package.is_tested]
    for package in untested:
        what = (
            f"{package.name} {package.installed} was not tested" if package.installed else f"{package.name} is missing"
        )
        mend = f"pip install 'disaggregated-inference[{engine}]'"
        yield found("error", "engine-version", f"engine {engine}: {what}; tested: {package.tested}", mend)
    if not untested:
        listed = ", ".join(f"{package.name} {package.installed}" for package in packages)
        yield ok("engine-version", f"engine {engine}: {listed}")
