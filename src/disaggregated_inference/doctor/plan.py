"""What should run on a machine: the servers of the cluster file that are this machine's."""

import json
import socket
from collections.abc import Iterable

import msgspec

from disaggregated_inference.cluster import ClusterConfig, Server, split_address
from disaggregated_inference.cluster.deploy import kv_port_of
from disaggregated_inference.defaults import KV_PORT
from disaggregated_inference.doctor.path_probe import local_addresses

_ENGINES = {"prefill": "torch", "decode": "mlx", "both": "mlx"}  # the defaults of `disagg serve`


class ExpectedServer(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    role: str
    model: str
    engine: str
    host: str
    port: int
    kv_addresses: tuple[str, ...] = ()  # HOST or HOST:PORT
    kv_port: int = KV_PORT
    context_window: int | None = None

    @property
    def kv_hosts(self) -> list[tuple[str, int]]:
        """Where decode nodes fetch KV, in the order of preference."""
        if self.role == "decode":
            return []
        return [split_address(address, self.kv_port) for address in self.kv_addresses] or [(self.host, self.kv_port)]

    @property
    def ports(self) -> list[int]:
        return list(dict.fromkeys([self.port, *(port for _, port in self.kv_hosts)]))


class ExpectedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """Everything may be empty: then the doctor looks at the machine alone."""

    machine: str = ""
    servers: tuple[ExpectedServer, ...] = ()
    gateway_port: int = 0
    identity: str = ""  # folder of this machine's certificate
    secrets: str = ""  # folder of tokens and keys that a deployment put there
    source: str = ""  # the cluster file on this machine
    warnings: tuple[str, ...] = ()  # of the cluster file

    @property
    def engines(self) -> list[str]:
        return list(dict.fromkeys(server.engine for server in self.servers))

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)


def planned(config: ClusterConfig, server: Server) -> ExpectedServer:
    """`model` is what `disagg serve --model` gets on the machine."""
    source = server.source
    return ExpectedServer(
        name=server.name,
        role=server.role,
        model=source.path or source.hf or source.ollama or config.resolve_model(server.model),
        engine=server.engine or _ENGINES[server.role],
        host=server.host,
        port=server.port,
        kv_addresses=server.kv_addresses,
        kv_port=kv_port_of(server),
        context_window=config.options_of(server.model).context_window,
    )


def plan_of_this_machine(config: ClusterConfig) -> ExpectedMachine:
    """The servers whose host is an address or the name of this machine."""
    here = {*local_addresses(), socket.gethostname().lower(), "localhost"}
    servers = [planned(config, server) for server in config.servers if _resolved(server.host) & here]
    return ExpectedMachine(
        servers=tuple(servers), identity=config.identity, source=config.source, warnings=config.warnings
    )


def read_plan(text: str) -> ExpectedMachine:
    return msgspec.convert(json.loads(text), ExpectedMachine)


def _resolved(host: str) -> set[str]:
    try:
        found: Iterable[str] = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        found = ()
    return {host.lower(), *found}
