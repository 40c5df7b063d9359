"""Tokens, keys and certificates of a machine, as files that only its user may read."""

import os
from collections.abc import Mapping
from pathlib import Path

from disaggregated_inference.cluster.config import ClusterConfig
from disaggregated_inference.cluster.deploy.plan import (
    MachinePlan,
    node_token_path,
    service_name,
    token_path,
    uses_identity,
)
from disaggregated_inference.cluster.deploy.steps import RemoteFile
from disaggregated_inference.cluster.reader import split_address
from disaggregated_inference.cluster.services import Place
from disaggregated_inference.errors import ConfigError, MachineMisconfigured
from disaggregated_inference.models import default_home

_IDENTITY = ("ca.pem", "revoked.pem", "node.pem", "node.key")


def secret_files(plan: MachinePlan, config: ClusterConfig, place: Place) -> list[RemoteFile]:
    files = [
        RemoteFile(token_path(service_name(server), place), server.token.encode() + b"\n", is_secret=True)
        for server in plan.servers
        if server.token
    ]
    for server in config.servers if plan.has_gateway else ():
        if server.token:
            path = node_token_path(server.name, place)
            files.append(RemoteFile(path, server.token.encode() + b"\n", is_secret=True))
    if uses_identity(config):
        folder = identity_folder(plan)
        files += [
            RemoteFile(f"{place.secrets}/identity/{name}", _read(folder / name, plan), is_secret=True)
            for name in _IDENTITY
        ]
    if plan.has_gateway and config.gateway.keys:
        keys = Path(config.gateway.keys).expanduser()
        try:
            files.append(RemoteFile(f"{place.secrets}/gateway-keys.json", keys.read_bytes(), is_secret=True))
        except OSError as error:
            remedy = "make it with `disagg gateway key NAME --file FILE`"
            raise ConfigError(f"gateway.keys: {keys} cannot be read: {error.strerror}; {remedy}") from None
    return files


def secret_environment(plan: MachinePlan, place: Place, environ: Mapping[str, str] = os.environ) -> list[RemoteFile]:
    """The variables that `secrets` of the machine names, with their values from here."""
    secrets = plan.machine.secrets
    lines = [f"{name}='{_secret(plan.name, name, source, environ)}'\n" for name, source in secrets.items()]
    return [RemoteFile(place.secret_environment, "".join(lines).encode(), is_secret=True)] if lines else []


def _secret(machine: str, name: str, source: str, environ: Mapping[str, str]) -> str:
    """No message repeats it."""
    place = f"machines.{machine}.secrets.{name}"
    if source.startswith("$"):
        value = environ.get(source[2:-1], "")
        if not value:
            raise ConfigError(f"{place}: {source[2:-1]} is not set in the environment; export {source[2:-1]}=... first")
    else:
        try:
            value = Path(source).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{place}: {source} cannot be read: {getattr(error, 'strerror', error)}") from None
    if not value or not value.isprintable() or "'" in value or "\\" in value:
        raise ConfigError(f"{place}: write one line of printable characters, without quotes and backslashes")
    return value


def identity_folder(plan: MachinePlan) -> Path:
    """Where `disagg cluster keys issue` put the machine's key."""
    named = plan.machine.identity
    return Path(named).expanduser() if named else default_home() / "keys" / plan.name.lower()


def _read(path: Path, plan: MachinePlan) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        hosts = dict.fromkeys(host for server in plan.servers for host in _hosts(server.host, server.kv_addresses))
        options = "".join(f" --host {host}" for host in hosts)
        remedy = f"`disagg cluster keys issue {plan.name.lower()}{options}`, or name the folder as `identity`"
        raise MachineMisconfigured(plan.name, f"no key for this machine ({path}: {error.strerror}): {remedy}") from None


def _hosts(host: str, kv_addresses: tuple[str, ...]) -> list[str]:
    return [host, *(split_address(address, 0)[0] for address in kv_addresses)]
