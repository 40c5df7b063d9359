"""The nodes of a chaos run: each behind lines that can be disturbed, and with a process if the run started it."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from disaggregated_inference.api import NodeStatus
from disaggregated_inference.chaos.keys import ChaosKeys
from disaggregated_inference.chaos.line import DisturbedLine
from disaggregated_inference.chaos.settings import ChaosSettings
from disaggregated_inference.cluster import ClusterConfig, Server
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.identity import Identity, open_identity
from disaggregated_inference.local_nodes import LocalNode, ask, node_status

# A garbled line flips a bit about once in so many bytes: a few requests on it live, others do not.
_HTTP_SPACING, _KV_SPACING = 3_000, 60_000
_PROFILE, _INSTANT = "custom:prefill=20000,decode=400,answer=120", "instant:answer=120"
_MEMORY = ("--kv-memory", "64M", "--prefix-memory", "8M", "--lease", "10", "--drain", "2")
_REAL_MEMORY = ("--dtype", "float32", "--kv-memory", "512M", "--prefix-memory", "64M", "--lease", "10", "--drain", "2")
_DISK_SIZE = "4M"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ChaosNode:
    """`process`: None if this run did not start it; then only its lines are disturbed. `lines` are none where the run
    has no faults. A node that was started again has another port: its lines follow."""

    def __init__(
        self,
        entry: dict[str, Any],
        role: str,
        start: Callable[[], LocalNode] | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.entry, self.role, self._start = entry, role, start
        self.tls: ssl.SSLContext | None = identity.client_context if identity else None
        self.name: str = entry["name"]
        self.process = start() if start else None
        self.http: DisturbedLine | None = None
        self.kv: list[DisturbedLine] = []
        self.starts = 1

    @property
    def roles(self) -> tuple[str, ...]:
        return ("prefill", "decode") if self.role == "both" else (self.role,)

    @property
    def lines(self) -> list[DisturbedLine]:
        return [*([self.http] if self.http else []), *self.kv]

    @property
    def address(self) -> tuple[str, int]:
        """Without the line."""
        if self.process:
            return "127.0.0.1", int(self.process.url.rpartition(":")[2])
        return self.entry["host"], self.entry["port"]

    @property
    def url(self) -> str:
        host, port = self.address
        return f"{'https' if self.entry.get('tls') else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    def status(self) -> NodeStatus:
        return node_status(self.url, self.entry.get("token", ""), tls=self.tls)

    def metrics(self) -> str:
        """Empty if the node does not answer."""
        try:
            return ask(self.url + "/metrics", self.entry.get("token", ""), tls=self.tls).decode()
        except OSError:
            return ""

    def left(self) -> list[str]:
        """What the node still holds for requests; the prefix cache stays."""
        try:
            status = self.status()
        except OSError as error:
            return [f"{self.name} does not answer: {error}"]
        held = {
            "open requests": status.waiting + status.queue.waiting + status.slots.used,
            "tickets": status.tickets,
            "bytes of KV memory": status.kv.total_reserved_bytes,
            "integrity faults": status.integrity_faults,
        }
        return [f"{self.name}: {count} {name}" for name, count in held.items() if count]

    def kv_addresses(self) -> list[tuple[str, int]]:
        """Of the config, else as the node says."""
        listed = self.entry.get("kv_addresses") or self.status().kv_addresses
        pairs = [text.rpartition(":") for text in listed]
        return [(host.strip("[]"), int(port)) for host, _, port in pairs]

    def connect(self, seed: int) -> None:
        """Put a line in front of every address, once the node is ready."""
        self.http = DisturbedLine(f"HTTP to {self.name}", self.address, seed, _HTTP_SPACING)
        if self.role != "decode":
            addresses = enumerate(self.kv_addresses())
            self.kv = [
                DisturbedLine(f"KV of {self.name}", where, seed + 1 + at, _KV_SPACING) for at, where in addresses
            ]

    def restart(self) -> None:
        """Waits until the node is ready."""
        assert self._start
        self.process = self._start()
        self.process.ready()
        self.starts += 1
        if self.http:
            self.http.target = self.address
        for line, address in zip(self.kv, self.kv_addresses() if self.kv else (), strict=False):
            line.target = address

    @property
    def server(self) -> dict[str, Any]:
        """The entry of the cluster file that leads through the lines."""
        if not self.lines:
            return self.entry | ({"port": self.address[1]} if self.process else {})
        reached = {"host": "127.0.0.1", "port": self.http.address[1]} if self.http else {}
        kv = [f"127.0.0.1:{line.address[1]}" for line in self.kv]
        return self.entry | reached | ({"kv_addresses": kv} if kv else {})

    def close(self) -> None:
        for line in self.lines:
            line.close()


def own_nodes(settings: ChaosSettings, folder: Path, keys: ChaosKeys | None) -> list[ChaosNode]:
    """Two prefill nodes and two decode nodes."""
    model = model_of(settings)
    engines = dict(zip(("prefill", "decode"), settings.engines, strict=True))

    def start(name: str, role: str) -> Callable[[], LocalNode]:
        engine = engines[role]
        timing = ("--profile", _PROFILE if settings.faults else _INSTANT) if engine == "simulated" else ()
        memory = _MEMORY if engine == "simulated" else _REAL_MEMORY
        disk = ("--prefix-disk", str(folder / name), "--prefix-disk-size", _DISK_SIZE)
        secured = ("--identity", str(keys.folder_of(name))) if keys else ()
        return lambda: LocalNode(role, engine, "--model", model, *timing, *memory, *disk, *secured, name=name)

    roles = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
    entry = {"host": "127.0.0.1", "port": 1, "model": model, "tls": keys is not None}
    client = keys.client if keys else None
    return [ChaosNode(entry | {"name": name}, role, start(name, role), client) for name, role in roles.items()]


def model_of(settings: ChaosSettings) -> str:
    is_simulated = "simulated" in settings.engines
    if is_simulated and set(settings.engines) != {"simulated"}:
        raise BadRequest("--engine: simulated nodes move no real KV; give simulated alone, or real engines")
    return settings.model or ("simulated:tiny" if is_simulated else "smollm2")


def given_nodes(config: ClusterConfig, settings: ChaosSettings) -> list[ChaosNode]:
    """The nodes of a cluster file, which others have started."""
    servers = config.servers_of(settings.model or None)
    for server in servers:
        _require_loopback(server, settings.any_host)
    identity = open_identity(config.identity, environ={})
    return [ChaosNode(_entry(server), server.role, identity=identity) for server in servers]


def _entry(server: Server) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(server).items() if value not in (None, "", [])}


def _require_loopback(server: Server, any_host: bool) -> None:
    hosts = [server.host, *(text.rpartition(":")[0].strip("[]") for text in server.kv_addresses)]
    for host in hosts:
        if not any_host and host not in _LOOPBACK and not host.startswith("127."):
            raise BadRequest(
                f"{server.name} is at {host}, not on this machine: chaos disturbs requests; add --any-host to allow it"
            )
