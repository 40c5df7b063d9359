"""What the types of a cluster file cannot say about its machines: references, and sources that contradict."""

import re
from collections.abc import Sequence
from typing import Protocol

from disaggregated_inference.cluster.machines import ClusterMachine, GatewayService, ModelSource
from disaggregated_inference.cluster.reader import Reader, did_you_mean, quote
from disaggregated_inference.cluster.ssh import LOCAL, SshTarget
from disaggregated_inference.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_FOLDER = re.compile(r"[\w ./~+@-]+")  # what systemd, launchd and shells take alike
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ELSEWHERE = re.compile(r"\$\{\w+\}|(/|~/).+")
_LOGIN = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_SECRET = re.compile(r"TOKEN$|SECRET|PASSWORD")


class _Placed(Protocol):
    @property
    def machine(self) -> str: ...
    @property
    def source(self) -> ModelSource: ...


class _WithMachines(Protocol):
    @property
    def machines(self) -> dict[str, ClusterMachine]: ...
    @property
    def gateway(self) -> GatewayService: ...
    @property
    def prefill_servers(self) -> Sequence[_Placed]: ...
    @property
    def decode_servers(self) -> Sequence[_Placed]: ...


def require_machines(reader: Reader, config: _WithMachines) -> None:
    for name, machine in config.machines.items():
        _require_machine(reader, f"machines.{name}", name, machine)
    for role in ("prefill", "decode"):
        servers: Sequence[_Placed] = getattr(config, f"{role}_servers")
        for index, server in enumerate(servers):
            place = f"{role}_servers[{index}]"
            _require_known(reader, f"{place}.machine", server.machine, config)
            _require_source(reader, f"{place}.source", server.source, config)
    _require_known(reader, "gateway.machine", config.gateway.machine, config)


def _require_machine(reader: Reader, place: str, name: str, machine: ClusterMachine) -> None:
    if not _NAME.fullmatch(name):
        raise reader.error(place, "use letters, digits and dashes in the name of a machine, such as spark-1")
    if machine.ssh not in ("", LOCAL):
        try:
            SshTarget.parse(machine.ssh)
        except ConfigError as error:
            raise reader.error(f"{place}.ssh", str(error)) from None
    if not machine.folder.startswith(("/", "~/")):
        raise reader.error(f"{place}.folder", f"write an absolute folder or ~/..., got {quote(machine.folder)}")
    if not _FOLDER.fullmatch(machine.folder):
        raise reader.error(f"{place}.folder", f"use letters, digits, spaces and /._-+@, got {quote(machine.folder)}")
    if any(_LOGIN.search(word) for word in machine.pip_args):
        remedy = "a password must not be on a command line: write it into pip.conf or ~/.netrc of the machine"
        raise reader.error(f"{place}.pip_args", remedy)
    for variable in machine.environment:
        if not _VARIABLE.fullmatch(variable):
            raise reader.error(f"{place}.environment", f"{quote(variable)} is no name of a variable")
        if _SECRET.search(variable):
            remedy = "secrets are no part of a service's file: write it under `secrets`; the token is copied by itself"
            raise reader.error(f"{place}.environment.{variable}", remedy)
    for variable, source in machine.secrets.items():
        if not _VARIABLE.fullmatch(variable):
            raise reader.error(f"{place}.secrets", f"{quote(variable)} is no name of a variable")
        if not _ELSEWHERE.fullmatch(source):
            remedy = "the secret itself must not be in this file: write ${NAME} of your environment, or a file"
            raise reader.error(f"{place}.secrets.{variable}", remedy)


def _require_known(reader: Reader, place: str, name: str, config: _WithMachines) -> None:
    if name and name not in config.machines:
        hint = did_you_mean(name, config.machines) or f"; there are {', '.join(config.machines) or 'none'}"
        raise reader.error(place, f"no machine has the name {quote(name)}{hint}")


def _require_source(reader: Reader, place: str, source: ModelSource, config: _WithMachines) -> None:
    if len(source.ways) > 1:
        raise reader.error(place, f"choose one of {' and '.join(source.ways)}")
    if (source.command or source.rsync) and not source.path.startswith(("/", "~/")):
        raise reader.error(f"{place}.path", f"write where {source.ways[0]} puts the model, such as ~/models/qwen")
    if source.path and not source.path.startswith(("/", "~/")):
        raise reader.error(f"{place}.path", f"write an absolute path or ~/..., got {quote(source.path)}")
    if source.rsync:
        machine, colon, path = source.rsync.partition(":")
        if not colon or not path:
            raise reader.error(f"{place}.rsync", f"write MACHINE:PATH, got {quote(source.rsync)}")
        _require_known(reader, f"{place}.rsync", machine, config)
