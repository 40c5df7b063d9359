"""From a cluster file to what runs where: one `MachinePlan` for each machine."""

import hashlib
import re
from collections.abc import Sequence

import msgspec

from disaggregated_inference.cluster.config import ClusterConfig, Server
from disaggregated_inference.cluster.inventory import Inventory
from disaggregated_inference.cluster.machines import ClusterMachine
from disaggregated_inference.cluster.reader import did_you_mean, join_address, quote, split_address
from disaggregated_inference.cluster.services import Place, Service
from disaggregated_inference.cluster.ssh import LOCAL, SshTarget
from disaggregated_inference.defaults import KV_PORT
from disaggregated_inference.errors import ConfigError
from disaggregated_inference.timeouts import DeployTimeouts

GATEWAY = "disagg-gateway"
_EXTRAS = {"torch": "torch", "mlx": "mlx", "llamacpp": "llamacpp"}
_WITHOUT_EXTRA = ("simulated", "ollama", "vllm")
_PREFILL_ENGINE, _DECODE_ENGINE = "torch", "mlx"  # the defaults of `disagg serve`


class MachinePlan(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    machine: ClusterMachine
    servers: tuple[Server, ...] = ()
    has_gateway: bool = False

    @property
    def target(self) -> str:
        return self.machine.ssh or self.name

    @property
    def models(self) -> frozenset[str]:
        return frozenset(server.model for server in self.servers)


def plan_machines(config: ClusterConfig, only: Sequence[str] = ()) -> tuple[MachinePlan, ...]:
    """In the order of the file. `only`: names of machines."""
    found = dict(config.machines)
    placed: dict[str, list[Server]] = {name: [] for name in found}
    for server in config.servers:
        name = server.machine or _machine_at(server, config)
        found.setdefault(name, ClusterMachine(ssh=name))
        placed.setdefault(name, []).append(server)
    for name in only:
        if name not in found:
            hint = did_you_mean(name, found) or f"; there are {', '.join(found)}"
            raise ConfigError(f"no machine has the name {quote(name)}{hint}")
        if not placed[name] and config.gateway.machine != name:
            raise ConfigError(f'nothing runs on {name}: write `machine = "{name}"` at a server, or at [gateway]')
    return tuple(
        MachinePlan(name=name, machine=machine, servers=tuple(placed[name]), has_gateway=config.gateway.machine == name)
        for name, machine in found.items()
        if (not only or name in only) and (placed[name] or config.gateway.machine == name)
    )


def _machine_at(server: Server, config: ClusterConfig) -> str:
    """Without [machines], the host itself is one. With them, a host that is in none would be a machine twice."""
    for name, machine in config.machines.items():
        target = machine.ssh or name
        if name == server.host or (target != LOCAL and SshTarget.parse(target).host == server.host):
            return name
    if config.machines:
        names = ", ".join(config.machines)
        raise ConfigError(f"{server.name}: no machine has the address {server.host}: write its `machine`, of {names}")
    return server.host


def engine_of(server: Server) -> str:
    return server.engine or (_PREFILL_ENGINE if server.role == "prefill" else _DECODE_ENGINE)


def extras_of(plan: MachinePlan) -> tuple[str, ...]:
    if plan.machine.extras is not None:
        return plan.machine.extras
    return tuple(sorted({_EXTRAS[engine] for server in plan.servers if (engine := engine_of(server)) in _EXTRAS}))


def place_of(plan: MachinePlan, inventory: Inventory) -> Place:
    folder = plan.machine.folder
    absolute = f"{inventory.home}/{folder[2:]}" if folder.startswith("~/") else folder.rstrip("/")
    return Place(inventory.home, absolute, inventory.user, inventory.uid)


def model_argument(server: Server, config: ClusterConfig, place: Place) -> str:
    """What `disagg serve --model` gets on the machine."""
    source = server.source
    if source.path:
        return expand(source.path, place)
    return source.hf or source.ollama or config.resolve_model(server.model)


def expand(path: str, place: Place) -> str:
    return f"{place.home}/{path[2:]}" if path.startswith("~/") else path


def service_name(server: Server) -> str:
    return "disagg-" + (re.sub(r"[^a-z0-9]+", "-", server.name.lower()).strip("-") or "node")


def _kv_security(server: Server, config: ClusterConfig) -> list[str]:
    """What the links of this node say, behind the mode of the other links."""
    ends = [link for link in config.links if server.name in (link.prefill, link.decode)]
    modes = [link.security for link in ends if link.security]
    default = "tls" if uses_identity(config) else "plain"
    return ["--kv-security", ",".join(dict.fromkeys([default, *modes]))] if modes else []


def _node_service(
    server: Server, plan: MachinePlan, config: ClusterConfig, place: Place, timeouts: DeployTimeouts
) -> Service:
    model = model_argument(server, config, place)
    arguments = ["serve", "--role", server.role, "--model", model, "--host", server.host, "--port", str(server.port)]
    arguments += ["--engine", server.engine] if server.engine else []
    for address in server.kv_addresses if server.role != "decode" else ():
        arguments += ["--kv-address", address]
    arguments += _kv_security(server, config)
    arguments += ["--trusted-link", config.trusted_link] if config.trusted_link else []
    arguments += ["--drain", str(timeouts.drain_s), "--log-level", "info", *server.arguments]
    name = service_name(server)
    environment = dict(plan.machine.environment)
    environment |= {"DISAGG_TOKEN_FILE": token_path(name, place)} if server.token else {}
    environment |= {"DISAGG_IDENTITY": f"{place.secrets}/identity"} if uses_identity(config) else {}
    title = f"{server.name} ({server.role}, {server.model})"
    return Service(
        name=name,
        title=title,
        arguments=tuple(arguments),
        environment=environment,
        environment_file=place.secret_environment if plan.machine.secrets else "",
        url=server.url,
        listens=listen_addresses(server),
        node=server.name,
        role=server.role,
        model=server.model,
    )


def _gateway_service(plan: MachinePlan, config: ClusterConfig, place: Place, timeouts: DeployTimeouts) -> Service:
    settings = config.gateway
    file = f"{place.current}/cluster.json"
    arguments = ["gateway", "--config", file, "--host", settings.host, "--port", str(settings.port)]
    arguments += ["--keys", f"{place.secrets}/gateway-keys.json"] if settings.keys else []
    arguments += ["--drain", str(timeouts.drain_s), "--log-level", "info", *settings.arguments]
    environment = dict(plan.machine.environment)
    environment |= {"DISAGG_IDENTITY": f"{place.secrets}/identity"} if uses_identity(config) else {}
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    scheme = "https" if "--tls-cert" in settings.arguments else "http"
    url = f"{scheme}://{join_address(host, settings.port)}"
    listens = ((settings.host, settings.port),)
    return Service(
        name=GATEWAY, title="gateway", arguments=tuple(arguments), environment=environment, url=url, listens=listens
    )


def services_of(
    plan: MachinePlan, config: ClusterConfig, place: Place, timeouts: DeployTimeouts = DeployTimeouts()
) -> tuple[Service, ...]:
    nodes = [_node_service(server, plan, config, place, timeouts) for server in plan.servers]
    services = (*nodes, *([_gateway_service(plan, config, place, timeouts)] if plan.has_gateway else ()))
    names = [service.name for service in services]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"two servers would be the service {', '.join(twice)}: give them names that differ")
    return services


def uses_identity(config: ClusterConfig) -> bool:
    return any(server.tls for server in config.servers)


def token_path(service: str, place: Place) -> str:
    return f"{place.secrets}/{service}.token"


def node_token_path(server: str, place: Place) -> str:
    """Where the gateway finds the token of a node. Two names may have the same letters."""
    letters = re.sub(r"[^a-z0-9]+", "-", server.lower()).strip("-")
    return f"{place.secrets}/nodes/{letters}-{hashlib.sha256(server.encode()).hexdigest()[:6]}.token"


def listen_addresses(server: Server) -> tuple[tuple[str, int], ...]:
    """Where a node listens: HTTP, then KV."""
    http = (server.host, server.port)
    if server.role == "decode" or engine_of(server) == "ollama":
        return (http,)
    kv = [split_address(address, kv_port_of(server)) for address in server.kv_addresses or (server.host,)]
    return (http, *((host, port) for host, port in kv if port))


def kv_port_of(server: Server) -> int:
    """Of the node's arguments, else the default of `disagg serve`; 0: any free port."""
    words = " ".join(server.arguments).replace("=", " ").split()
    given = words[words.index("--kv-port") + 1 :][:1] if "--kv-port" in words else []
    return int(given[0]) if given and given[0].isdigit() else KV_PORT
