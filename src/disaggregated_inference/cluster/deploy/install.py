"""Everything that a deploy puts on one machine before anything there changes: environment, model, secrets, release."""

import hashlib
import json
import shlex
from pathlib import Path
from typing import NamedTuple

import msgspec

from disaggregated_inference.cluster.deploy.memory_fit import FitStep
from disaggregated_inference.cluster.deploy.model_source import model_step
from disaggregated_inference.cluster.deploy.plan import (
    MachinePlan,
    expand,
    extras_of,
    node_token_path,
    services_of,
)
from disaggregated_inference.cluster.deploy.release import Release
from disaggregated_inference.cluster.deploy.secret_files import secret_environment, secret_files
from disaggregated_inference.cluster.deploy.steps import CommandStep, FilesStep, RemoteFile, Step
from disaggregated_inference.cluster.deploy.target import MachineTarget
from disaggregated_inference.cluster.deploy.wheel import Wheel
from disaggregated_inference.cluster.inventory import OLDEST_PYTHON
from disaggregated_inference.cluster.services import SUPERVISOR, supervise
from disaggregated_inference.errors import DeployRefused
from disaggregated_inference.timeouts import DeployTimeouts

_NEEDED_BYTES = {"torch": 8 << 30, "mlx": 1 << 30}  # of packages; the rest is small
_SMALL_BYTES = 300 << 20
_NO_INDEX = ("No matching distribution", "NewConnectionError", "name resolution", "error sending request")
_UV_PYTHON = "3.12"  # uv fetches it where no Python is new enough


class Package(NamedTuple):
    """What is deployed to every machine."""

    wheel: Wheel
    constraints: str


class Installation(NamedTuple):
    steps: tuple[Step, ...]
    secrets: Step  # which comes last: services that start again by themselves would read it
    release: Release
    needed_bytes: int


def plan_installation(target: MachineTarget, package: Package, timeouts: DeployTimeouts) -> Installation:
    plan, place = target.plan, target.place
    python = _python(target)
    environment = _environment_id(target, package, python)
    folder = f"{place.folder}/environments/{environment}"
    release = _release(target, package, environment, timeouts)
    steps = [
        FilesStep("wheel and lock file", _package_files(folder, package, plan.machine.constraints)),
        _environment_step(target, package, folder, python, timeouts),
        FilesStep("secret variables", secret_environment(plan, place)),
        *(model_step(server, target, f"{folder}/venv/bin", timeouts) for server in plan.servers),
        FitStep(plan, target.config, target.inventory, place, f"{folder}/venv/bin/python"),
        FilesStep("release", _release_files(target, release)),
        _link_environment(release.folder(place), environment),
    ]
    needed = _SMALL_BYTES + sum(_NEEDED_BYTES.get(extra, 0) for extra in extras_of(plan))
    secrets = FilesStep("secrets", secret_files(plan, target.config, place))
    return Installation(tuple(steps), secrets, release, needed)


def _python(target: MachineTarget) -> str:
    wanted, inventory = target.plan.machine.python, target.inventory
    if python := inventory.python:
        return expand(wanted, target.place) if wanted else python
    found = f" (found: {', '.join(line.split()[0] for line in inventory.pythons)})" if inventory.pythons else ""
    if inventory.uv and not wanted:
        return _UV_PYTHON
    oldest = ".".join(map(str, OLDEST_PYTHON))
    if wanted:
        raise DeployRefused(target.plan.name, f"{wanted} is no Python {oldest} or newer{found}: correct `python`")
    install = "brew install python@3.12" if inventory.is_mac else "apt install python3.12 python3.12-venv"
    raise DeployRefused(
        target.plan.name,
        f"no Python {oldest} or newer{found}: `{install}`, or install uv there, or name one as"
        f" `python` of [machines.{target.plan.name}]",
    )


def _environment_id(target: MachineTarget, package: Package, python: str) -> str:
    machine = target.plan.machine
    facts = [package.wheel.digest, python, *extras_of(target.plan), *machine.pip_args, str(machine.constraints)]
    facts += [package.constraints, str(_needs_hub(target.plan))]
    return f"{package.wheel.version}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:10]}"


def _needs_hub(plan: MachinePlan) -> bool:
    return any(server.source.hf for server in plan.servers)


def _package_files(folder: str, package: Package, constraints: bool) -> list[RemoteFile]:
    text = package.constraints if constraints else ""
    return [
        RemoteFile(f"{folder}/{package.wheel.name}", package.wheel.content, 0o644),
        RemoteFile(f"{folder}/constraints.txt", text.encode(), 0o644),
    ]


def _environment_step(
    target: MachineTarget, package: Package, folder: str, python: str, timeouts: DeployTimeouts
) -> CommandStep:
    """The marker `complete` comes last: an environment without it is made again."""
    plan, uv = target.plan, target.inventory.uv
    extras = f"[{','.join(extras_of(plan))}]" if extras_of(plan) else ""
    wanted = [f"{folder}/{package.wheel.name}{extras}", *(["huggingface_hub"] if _needs_hub(plan) else [])]
    own = f"{folder}/venv/bin/python"
    options = ["--constraint", f"{folder}/constraints.txt", *plan.machine.pip_args, *wanted]
    if uv:
        make = [uv, "venv", "--quiet", "--python", python, f"{folder}/venv"]
        install = [uv, "pip", "install", "--quiet", "--python", own, *options]
        freeze = [uv, "pip", "freeze", "--python", own]
    else:
        make = [python, "-m", "venv", f"{folder}/venv"]
        install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options]
        freeze = [own, "-m", "pip", "freeze", "--disable-pip-version-check"]
    script = f"""rm -rf {shlex.quote(folder)}/venv {shlex.quote(folder)}/complete &&
{shlex.join(make)} &&
{shlex.join(install)} &&
{shlex.join(freeze)} > {shlex.quote(f"{folder}/lock.txt")} &&
touch {shlex.quote(f"{folder}/complete")}"""
    check = f"test -e {shlex.quote(f'{folder}/complete')} && test -x {shlex.quote(own)}"
    title = f"environment ({'uv' if uv else 'venv'}, {', '.join(extras_of(plan)) or 'no engine'})"
    return CommandStep(title, script, check, timeouts.install_s, install_remedy)


def install_remedy(stderr: str) -> str:
    if "ensurepip" in stderr:
        return "install the package python3-venv there (`apt install python3-venv`), or uv"
    if any(words in stderr for words in _NO_INDEX):
        return 'the machine reaches no package index: give it one by `pip_args`, such as ["--index-url", "URL"]'
    if "No space left" in stderr:
        return "the disk is full: free some space there, then deploy again"
    return ""


def _release(target: MachineTarget, package: Package, environment: str, timeouts: DeployTimeouts) -> Release:
    services = services_of(target.plan, target.config, target.place, timeouts)
    settings = _cluster_file(target) if target.plan.has_gateway else b""
    return Release(
        version=f"{package.wheel.version}-{package.wheel.digest[:6]}",
        environment=environment,
        kind=target.manager.kind,
        services=services,
        settings=hashlib.sha256(settings).hexdigest()[:16] if settings else "",
    ).named()


def _release_files(target: MachineTarget, release: Release) -> list[RemoteFile]:
    folder = release.folder(target.place)
    services = [target.manager.file(service) for service in release.services]
    files = [RemoteFile(f"{folder}/services/{file.name}", file.content.encode()) for file in services]
    if target.plan.has_gateway:
        files.append(RemoteFile(f"{folder}/cluster.json", _cluster_file(target)))
    files.append(RemoteFile(f"{folder}/{SUPERVISOR}", Path(supervise.__file__).read_bytes()))
    return [*files, RemoteFile(f"{folder}/release.json", msgspec.json.encode(release))]


def _cluster_file(target: MachineTarget) -> bytes:
    """The cluster file for the gateway: checked, and without what only a deploy needs. Its tokens are in files, which
    are no part of a release: after a rollback the gateway still has those of the nodes."""
    data = msgspec.to_builtins(target.config)
    for key in ("machines", "gateway", "trusted_link", "source", "warnings", "identity"):
        data.pop(key, None)
    data["token"] = data["token_file"] = ""
    for server in [*data["prefill_servers"], *data["decode_servers"]]:
        for key in ("machine", "source", "arguments"):
            server.pop(key, None)
        has_token = bool(server.pop("token"))
        server["token_file"] = node_token_path(server["name"], target.place) if has_token else ""
    return msgspec.json.format(msgspec.json.encode(data), indent=1)


def _link_environment(release: str, environment: str) -> CommandStep:
    goal, link = f"../../environments/{environment}/venv", shlex.quote(f"{release}/venv")
    check = f'test "$(readlink {link})" = {goal}'
    return CommandStep("environment of the release", f"ln -sfn {goal} {link}", check)


def require_disk(target: MachineTarget, installation: Installation, is_installed: bool) -> None:
    """A disk that fills up half-way leaves a mess: say it before."""
    free, needed = target.inventory.free_disk_bytes, installation.needed_bytes
    if not is_installed and free and free < needed:
        raise DeployRefused(
            target.plan.name,
            f"{free / 1e9:.1f} GB are free in {target.place.folder}, and the packages need about {needed / 1e9:.1f} GB:"
            f" free some space, or set `folder` of [machines.{target.plan.name}] to another disk",
        )
