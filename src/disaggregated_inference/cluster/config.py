"""The cluster file: servers, models, links and policies.

JSON or TOML; `disagg config example` prints one. Errors name the place in the file and what to write there. Harmless
mistakes, such as an unknown key, are warnings.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from disaggregated_inference.api import KVSecurity, LocalPrefill, Role
from disaggregated_inference.cluster.bearer_token import read_token
from disaggregated_inference.cluster.machine_checks import require_machines
from disaggregated_inference.cluster.machines import ClusterMachine, GatewayService, ModelSource
from disaggregated_inference.cluster.model_match import ModelMatch, bare_name, find_model
from disaggregated_inference.cluster.reader import (
    Reader,
    did_you_mean,
    is_address,
    is_host,
    join_address,
    quote,
    read_file,
)
from disaggregated_inference.defaults import PORTS
from disaggregated_inference.errors import ConfigError

PLACES = ("cluster.json", "cluster.toml", "disaggregated_inference/config_current.json")
PrefixSharing = Literal["key", "group", "shared"]


def _one_of(kind: Any) -> str:
    *others, last = map(quote, get_args(kind))
    return f"{', '.join(others)} or {last}"


# The descriptions complete the sentence "expected ...". The upper bounds exclude infinity.
_Role = Annotated[Role, Meta(description=_one_of(Role))]
_Local = Annotated[LocalPrefill, Meta(description=_one_of(LocalPrefill))]
_PrefixSharing = Annotated[PrefixSharing, Meta(description=_one_of(PrefixSharing))]
_Security = Annotated[KVSecurity, Meta(description=_one_of(KVSecurity))]
_Flag = Annotated[bool, Meta(description="true or false")]
_Text = Annotated[str, Meta(description="a string")]
_Host = Annotated[str, Meta(min_length=1, description='a host name or address, such as "169.254.150.103"')]
_Port = Annotated[int, Meta(ge=1, le=65535, description="a port from 1 to 65535, such as 8001")]
_Address = Annotated[str, Meta(description='HOST or HOST:PORT, such as "192.168.100.1:9000"')]
_Addresses = Annotated[tuple[_Address, ...], Meta(description='a list such as ["10.0.0.1", "192.168.100.1:9000"]')]
_Model = Annotated[str, Meta(min_length=1, description='the name of a model, such as "qwen"')]
_Aliases = Annotated[tuple[_Model, ...], Meta(description='a list such as ["qwen"]')]
_Prompt = Annotated[str, Meta(min_length=1, description="a text, such as a system prompt")]
_Prompts = Annotated[tuple[_Prompt, ...], Meta(description='a list such as ["You are a helpful assistant."]')]
_Defaults = Annotated[dict[str, Any], Meta(description='an object such as {"temperature": 0.2}')]
_Secret = Annotated[str, Meta(description='a string, or "${NAME}" for an environment variable')]
_Tokens = Annotated[int, Meta(ge=1, le=10**9, description="a number of tokens, such as 32768")]
_Count = Annotated[int, Meta(ge=0, le=10**9, description="an integer >= 0")]
_Seconds = Annotated[float, Meta(gt=0, le=1e9, description="a number of seconds > 0")]
_Watts = Annotated[float, Meta(ge=0, le=1e9, description="watts, such as 240")]
_Price = Annotated[float, Meta(ge=0, le=1e9, description="a number >= 0, such as 0.25")]
_Years = Annotated[float, Meta(gt=0, le=100, description="a number of years > 0, such as 4")]
_Gbps = Annotated[float, Meta(gt=0, le=1e6, description="gigabits per second, such as 10")]
_Options = Annotated[tuple[str, ...], Meta(description='a list such as ["--kv-memory", "8G"]')]
_PrefillServer = Annotated[str, Meta(description="the name of a prefill server")]
_DecodeServer = Annotated[str, Meta(description="the name of a decode server")]


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """One node. Only `host` and `model` are required."""

    host: _Host  # the host name or address where other machines reach the node
    port: _Port  # the node's HTTP port; default: 8000 for prefill servers, else 8001
    model: _Model  # the model of the node: a name, or an alias from `models`
    name: _Text  # the node's name in status, metrics and logs; default: HOST:PORT
    role: _Role  # what the node does; default: from the list that the server is in
    engine: _Text = ""  # the engine that status shows until the node reports its own
    token: _Secret = ""  # the node's bearer token; default: the cluster's token
    token_file: _Text = ""  # file with the node's token, in place of `token`
    kv_addresses: _Addresses = ()  # addresses for KV transfers, fastest link first; default: those of the node
    power_w: _Watts | None = None  # the machine's power draw under load, for the energy of requests without a meter
    idle_power_w: _Watts | None = None  # the machine's power draw without load, for the comparison with one machine
    price_per_hour: _Price | None = None  # the price of an hour of the machine; default: from `price`
    price: _Price | None = None  # what the machine cost, for cost per request
    lifetime_years: _Years = 4.0  # the years over which `price` is spread
    tls: _Flag | None = None  # whether the node is reached by HTTPS; default: true if the cluster has an identity
    machine: _Text = ""  # the machine that `disagg cluster` starts it on; default: the one with its `host`
    source: ModelSource = ModelSource()  # where that machine has the model from
    arguments: _Options = ()  # further options of `disagg serve` there

    @property
    def address(self) -> str:
        """host:port"""
        return join_address(self.host, self.port)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.address}"

    @property
    def roles(self) -> tuple[str, ...]:
        return ("prefill", "decode") if self.role == "both" else (self.role,)

    def __repr__(self) -> str:
        """Without the token: reprs end up in logs."""
        return f"Server({self.name!r}, {self.role}, {self.url}, {self.model!r})"


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """Expected bandwidth between two servers, used until it is measured, and how their KV transfers are secured."""

    prefill: _PrefillServer  # the end of the link that sends KV
    decode: _DecodeServer  # the end of the link that receives KV
    gbps: _Gbps | None = None  # the bandwidth that the router expects until it is measured
    security: _Security | None = None  # one of the prefill node's `--kv-security`; default: the first of them


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one model. The key is the model's name; requests may use it, an alias, or a part of either."""

    aliases: _Aliases = ()  # other names of the model, in requests and in servers' `model`
    context_window: _Tokens | None = None  # the most tokens of prompt and completion together; default: the model's
    defaults: _Defaults = {}  # options of requests that do not set them, such as temperature and max_tokens
    shared_prompts: _Prompts = ()  # system prompts whose cached prefixes all API keys share; the rest stays apart
    prefill_timeout_s: _Seconds | None = None  # time limit for the prefill of a request; default: that of `policies`
    decode_timeout_s: _Seconds | None = None  # time limit for the decode of a request; default: that of `policies`


class Policies(msgspec.Struct, frozen=True, kw_only=True):
    """How the orchestrator treats requests and nodes."""

    prefill_timeout_s: _Seconds = 60.0  # time limit for the prefill of a request
    decode_timeout_s: _Seconds = 180.0  # time limit for the decode of a request
    retries: _Count = 1  # how many further attempts follow a failed one
    fallback: _Flag = True  # whether the decode node may prefill a prompt itself after a failure
    local: _Local = "auto"  # when the decode node prefills by choice; "auto" is when that is faster
    queue: _Count = 256  # the most requests that wait; further ones are refused
    poll_s: _Seconds = 1.0  # time between two status polls of a node
    health_timeout_s: _Seconds = 1.0  # time limit for one status poll
    stuck_s: _Seconds = 30.0  # a node whose engine makes no progress for this long is taken out of use
    history: _Count = 1000  # how many finished requests are kept in memory
    history_file: _Text = ""  # SQLite file that keeps more finished requests, and keeps them over restarts
    history_rows: _Count = 0  # the most requests in that file; 0 means a hundred times `history`
    history_days: _Count = 0  # how many days that file keeps a request; 0 means any age
    electricity_price_per_kwh: _Price | None = None  # the price of electricity, for cost per request
    strict_models: _Flag = False  # whether a node that names its model otherwise gets no requests
    prefix_sharing: _PrefixSharing = "key"  # which API keys share cached prefixes: none, those of a group, all


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The keys of the file. At least one server is required."""

    prefill_servers: tuple[Server, ...] = ()  # nodes that prefill prompts
    decode_servers: tuple[Server, ...] = ()  # nodes that generate completions
    models: dict[str, ModelOptions] = {}  # names and options of models
    links: tuple[Link, ...] = ()  # expected bandwidths between servers
    policies: Policies = Policies()  # how requests and nodes are treated
    token: _Secret = ""  # the token of servers without one of their own; default: DISAGG_TOKEN, see [Tokens](#tokens)
    token_file: _Text = ""  # file with that token, in place of `token`
    identity: _Text = ""  # folder of the certificate that nodes know this program by; default: DISAGG_IDENTITY
    machines: dict[str, ClusterMachine] = {}  # machines that `disagg cluster` deploys to
    gateway: GatewayService = GatewayService()  # the gateway that it runs
    trusted_link: _Text = ""  # why nodes need no certificates, in words, for `--trusted-link` of the nodes it starts


_NO_OPTIONS = ModelOptions()


class ClusterConfig(ClusterFile, frozen=True, kw_only=True, dict=True):
    """A checked cluster file. Every server has its token, name, port and role."""

    source: str = ""  # path of the file
    warnings: tuple[str, ...] = ()  # harmless mistakes in the file

    def __repr__(self) -> str:
        return f"ClusterConfig({self.source!r}, {list(self.servers)!r})"

    @property
    def servers(self) -> tuple[Server, ...]:
        return self.prefill_servers + self.decode_servers

    @cached_property  # used several times per request
    def names(self) -> tuple[str, ...]:
        """The models of the servers, in the order of the file."""
        spellings = self._spellings
        return tuple(dict.fromkeys(spellings[bare_name(server.model)] for server in self.servers))

    @cached_property
    def _spellings(self) -> dict[str, str]:
        """Maps every name and alias to the model's name."""
        table = {alias: name for name, options in self.models.items() for alias in (name, *options.aliases)}
        return {name: name for name in (bare_name(server.model) for server in self.servers)} | table

    def resolve_model(self, name: str | None = None) -> str:
        """The name of a model for its name, alias, or an unambiguous part of either in any case."""
        return self.match_model(name).name

    def match_model(self, name: str | None = None, among: Sequence[str] | None = None) -> ModelMatch:
        """The same, and how the name fits. `among`: only these models exist."""
        names = self.names if among is None else among
        if isinstance(name, str) and (exact := self._spellings.get(name, "")) in names:
            return ModelMatch(exact)
        wanted = bare_name(name or "")
        if not wanted and len(names) == 1:
            return ModelMatch(names[0])
        if (exact := self._spellings.get(wanted, "")) in names:
            return ModelMatch(exact)
        spellings = {text: model for text, model in self._spellings.items() if model in names}
        return find_model(wanted, spellings, names)

    def spellings_of(self, model: str) -> tuple[str, ...]:
        """The model's name in the file, and every alias."""
        return tuple(text for text, name in self._spellings.items() if name == model)

    def servers_of(self, model: str | None = None) -> tuple[Server, ...]:
        spellings, wanted = self._spellings, self.resolve_model(model)
        return tuple(server for server in self.servers if spellings[bare_name(server.model)] == wanted)

    def options_of(self, model: str | None = None) -> ModelOptions:
        name = model if model in self.names else self.resolve_model(model)
        return self.models.get(name, _NO_OPTIONS)


def load_config(
    source: str | Path | dict[str, Any] | None = None, environ: Mapping[str, str] = os.environ, token_file: str = ""
) -> ClusterConfig:
    """Read a file or a dict. Without `source`: the file in `DISAGG_CONFIG`, else the first that exists of `PLACES`. A
    server without a token of its own gets that of `token_file`, else the file's `token`, else that of the
    environment."""
    if source is not None and not isinstance(source, str | Path):
        return _ClusterReader("", environ, token_file).cluster(source)
    if source == "":
        raise ConfigError("the path of the cluster file is empty; give a path, or none to use the default places")
    if source is None and (source := find_config(environ)) is None:
        places = f"DISAGG_CONFIG is not set, and there is no {', '.join(PLACES)}"
        raise ConfigError(
            f"no cluster file: {places}; create one with `disagg config example > cluster.json`, with"
            " `disagg cluster init` from the machines, or for the cluster of `disagg up` with `disagg config example"
            " --local > cluster.json`"
        )
    path = Path(os.path.expanduser(source))
    return _ClusterReader(str(path), environ, token_file).cluster(read_file(path))


def find_config(environ: Mapping[str, str] = os.environ) -> str | None:
    """The file that `load_config` reads without a source. `DISAGG_CONFIG` counts also if its file is missing."""
    return environ.get("DISAGG_CONFIG") or next(filter(os.path.isfile, PLACES), None)


class _ClusterReader(Reader):
    """Reads a cluster file and checks what the types cannot: names, duplicates and references."""

    def __init__(self, file: str, environ: Mapping[str, str], token_file: str) -> None:
        super().__init__(file, environ)
        self._token_file = token_file

    def cluster(self, raw: Any) -> ClusterConfig:
        if not isinstance(raw, dict):
            raise self.error("", f'expected an object with "prefill_servers" and "decode_servers", got {quote(raw)}')
        self.require_plain_data(raw)
        file = self.struct(ClusterFile, raw | _with_defaults(raw, "prefill") | _with_defaults(raw, "decode"), "")
        token, identity = self._token(file), file.identity or self.environ.get("DISAGG_IDENTITY", "")
        prefill = {
            place: self._server(item, "prefill", place, token, identity)
            for place, item in _items(file, "prefill_servers")
        }
        decode = {
            place: self._server(item, "decode", place, token, identity)
            for place, item in _items(file, "decode_servers")
        }
        self._require_distinct(prefill | decode)
        self._require_links(file, [*prefill.values(), *decode.values()])
        config = ClusterConfig(
            prefill_servers=tuple(prefill.values()),
            decode_servers=tuple(decode.values()),
            models=self._models(file),
            links=file.links,
            policies=file.policies,
            token=token,
            identity=identity,
            machines=file.machines,
            gateway=file.gateway,
            trusted_link=file.trusted_link,
            source=self.file,
        )
        require_machines(self, config)
        self._warn_unserved(config)
        return msgspec.structs.replace(config, warnings=tuple(self.warnings))

    def _token(self, file: ClusterFile) -> str:
        """The environment is not read if the file has a token: a fault there must not matter."""
        own = self.secret(file.token, "token", file.token_file)
        return own if own and not self._token_file else read_token(file=self._token_file, environ=self.environ)

    def _server(self, server: Server, role: Role, place: str, cluster_token: str, identity: str) -> Server:
        if role not in server.roles:
            raise self.error(f"{place}.role", f'this is the list of {role} servers; move it, or set "role": "both"')
        if not bare_name(server.model):
            raise self.invalid(f"{place}.model", _Model, server.model)
        for index, address in enumerate(server.kv_addresses):
            if not is_address(address):
                raise self.invalid(f"{place}.kv_addresses[{index}]", _Address, address)
        host = self._host(server.host, f"{place}.host")
        token = self.secret(server.token, f"{place}.token", server.token_file) or cluster_token
        name = server.name.strip() or join_address(host, server.port)
        tls = bool(identity) if server.tls is None else server.tls
        return msgspec.structs.replace(server, host=host, token=token, token_file="", name=name, tls=tls)

    def _host(self, text: str, place: str) -> str:
        host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        if not is_host(host):
            raise self.invalid(place, _Host, text)
        if host in ("0.0.0.0", "::"):
            self.warn(place, f"{host} is an address to listen on; write the address where others reach the server")
        return host

    def _require_distinct(self, servers: dict[str, Server]) -> None:
        if not servers:
            raise self.error("", "no servers; list some under prefill_servers and decode_servers")
        taken: dict[tuple[str, ...], str] = {}
        for place, server in servers.items():
            address = join_address(server.host.casefold(), server.port)
            for role in server.roles:
                if (first := taken.setdefault((role, address), place)) != place:
                    raise self.error(place, f"{address} is already in {first}; list each {role} server once")
            if (first := taken.setdefault((server.name,), place)) != place:
                is_same = join_address(servers[first].host.casefold(), servers[first].port) == address
                remedy = 'list it once, with "role": "both"' if is_same else "give each server a different name"
                raise self.error(f"{place}.name", f"{quote(server.name)} is already the name of {first}; {remedy}")

    def _models(self, file: ClusterFile) -> dict[str, ModelOptions]:
        models: dict[str, ModelOptions] = {}
        taken: dict[str, str] = {}  # names and aliases, and their places
        for key, options in file.models.items():
            place, name = f"models.{key}", bare_name(str(key))
            aliases = tuple(dict.fromkeys(map(bare_name, options.aliases)))
            for spelling in dict.fromkeys((name, *aliases)):
                if not spelling:
                    raise self.error(place, "a model's name or alias is empty; write one, or remove it")
                if (first := taken.setdefault(spelling, place)) != place:
                    raise self.error(place, f"{quote(spelling)} is already a name in {first}; use each name once")
            models[name] = msgspec.structs.replace(options, aliases=aliases)
        return models

    def _require_links(self, file: ClusterFile, servers: Sequence[Server]) -> None:
        taken: set[tuple[str, str]] = set()
        for place, link in _items(file, "links"):
            self._require_server(link.prefill, "prefill", servers, place)
            self._require_server(link.decode, "decode", servers, place)
            if (link.prefill, link.decode) in taken:
                raise self.error(place, f"{link.prefill} to {link.decode} is listed twice; remove one of the two")
            taken.add((link.prefill, link.decode))

    def _require_server(self, name: str, role: str, servers: Sequence[Server], place: str) -> None:
        names = [server.name for server in servers if role in server.roles]
        if name not in names:
            hint = did_you_mean(name, names) or f"; there are {', '.join(names) or 'none'}"
            raise self.error(f"{place}.{role}", f"no {role} server has the name {quote(name)}{hint}")

    def _warn_unserved(self, config: ClusterConfig) -> None:
        for name in config.names:
            if not any("decode" in server.roles for server in config.servers_of(name)):
                remedy = 'add one, or list the model\'s other name under "aliases" in "models"'
                self.warn(
                    "decode_servers", f"no decode server has the model {quote(name)} of a prefill server; {remedy}"
                )
        for name in config.models:
            if name not in config.names:
                self.warn(
                    f"models.{name}", 'no server has this model; if servers use another name, add it to "aliases"'
                )


def _with_defaults(raw: dict[str, Any], role: Role) -> dict[str, Any]:
    """The list of servers of a role, with the defaults that depend on the role."""
    key = f"{role}_servers"
    if not isinstance(servers := raw.get(key, []), list | tuple):
        return {key: servers}
    ports = [PORTS["both" if isinstance(item, dict) and item.get("role") == "both" else role] for item in servers]
    defaults = [{"name": "", "role": role, "port": port} for port in ports]
    filled = zip(defaults, servers, strict=True)
    return {key: [default | item if isinstance(item, dict) else item for default, item in filled]}


def _items(file: ClusterFile, key: str) -> Iterator[tuple[str, Any]]:
    """The items of a list, each with its place in the file."""
    return ((f"{key}[{index}]", item) for index, item in enumerate(getattr(file, key)))
