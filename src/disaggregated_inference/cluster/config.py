"""The cluster file: which servers there are, which models they hold, how requests are treated.

JSON or TOML; `disagg config example` prints one. It is read once and checked as a whole: what is wrong is an error with
its place and a remedy, what is merely odd (a key nobody knows) a warning.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from disaggregated_inference.cluster.reader import Reader, did_you_mean, is_address, is_host, parse, shown, spoken
from disaggregated_inference.errors import BadRequest, ConfigError, ModelNotFound

PLACES = ("cluster.json", "cluster.toml", "disaggregated_inference/config_current.json")
PORTS = {"prefill": 8000, "decode": 8001, "both": 8001}  # as `disagg serve` has them

Role = Literal["prefill", "decode", "both"]
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]  # these upper bounds keep infinity out
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as the file has it; `model` may be an alias, see `ClusterConfig.resolve_model`."""

    host: _Text
    port: _Port
    model: _Text
    name: str
    role: Role
    engine: str = ""
    token: str = ""
    kv_addresses: tuple[str, ...] = ()  # HOST or HOST:PORT, best first
    power_w: _Amount | None = None
    price_per_hour: _Amount | None = None
    tls: bool = False

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{spoken(self.host, self.port)}"

    @property
    def roles(self) -> tuple[str, ...]:
        return ("prefill", "decode") if self.role == "both" else (self.role,)

    def __repr__(self) -> str:
        """Ends in logs and traces, so there is no token in it."""
        return f"Server({self.name!r}, {self.role}, {self.url}, {self.model!r})"


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the way from one server to another before it is measured."""

    prefill: str
    decode: str
    gbps: Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    aliases: tuple[str, ...] = ()
    context_window: _Tokens | None = None
    defaults: dict[str, Any] = {}  # of requests: temperature, max_tokens, ...
    prefill_timeout_s: _Seconds | None = None
    decode_timeout_s: _Seconds | None = None


class Policies(msgspec.Struct, frozen=True, kw_only=True):
    prefill_timeout_s: _Seconds = 60.0
    decode_timeout_s: _Seconds = 180.0
    retries: _Count = 1
    fallback: bool = True  # the decode node may read the prompt itself after a failure
    local: Literal["auto", "never", "always"] = "auto"  # when it may do so by choice
    queue: _Count = 256  # requests that may wait
    poll_s: _Seconds = 1.0
    health_timeout_s: _Seconds = 1.0
    stuck_s: _Seconds = 30.0
    history: _Count = 1000
    history_file: str = ""  # SQLite
    electricity_price_per_kwh: _Amount | None = None


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    prefill_servers: tuple[Server, ...] = ()
    decode_servers: tuple[Server, ...] = ()
    models: dict[str, ModelOptions] = {}
    links: tuple[Link, ...] = ()
    policies: Policies = Policies()
    token: str = ""  # of servers without one of their own, who have it by now
    source: str = ""
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"ClusterConfig({self.source!r}, {list(self.servers)!r})"

    @property
    def servers(self) -> tuple[Server, ...]:
        return self.prefill_servers + self.decode_servers

    @cached_property  # every request asks, several times
    def names(self) -> tuple[str, ...]:
        """The models that servers hold, in the file's order."""
        spellings = self._spellings
        return tuple(dict.fromkeys(spellings[bare_name(server.model)] for server in self.servers))

    @cached_property
    def _spellings(self) -> dict[str, str]:
        """Every way to write a model's name, and the name."""
        table = {alias: name for name, options in self.models.items() for alias in (name, *options.aliases)}
        return {name: name for name in (bare_name(server.model) for server in self.servers)} | table

    def resolve_model(self, name: str | None = None) -> str:
        """A model's own name. `name` is it or an alias; else, in any case, a part of one or more than one."""
        wanted, names = bare_name(name or ""), self.names
        if not wanted and len(names) == 1:
            return names[0]
        if (exact := self._spellings.get(wanted, "")) in names:
            return exact
        found = self._alike(wanted.casefold()) if wanted else ()
        if len(found) == 1:
            return found[0]
        raise ModelNotFound(_how_to_choose(wanted, found, names))

    def _alike(self, wanted: str) -> tuple[str, ...]:
        served = self.names
        spelled = [(text.casefold(), name) for text, name in self._spellings.items() if name in served]
        same = [name for text, name in spelled if text == wanted]
        return tuple(dict.fromkeys(same or [name for text, name in spelled if text in wanted or wanted in text]))

    def servers_of(self, model: str | None = None) -> tuple[Server, ...]:
        spellings, wanted = self._spellings, self.resolve_model(model)
        return tuple(server for server in self.servers if spellings[bare_name(server.model)] == wanted)

    def options_of(self, model: str | None = None) -> ModelOptions:
        return self.models.get(self.resolve_model(model), ModelOptions())


def bare_name(model: Any) -> str:
    """Programs name models as `disaggregated:qwen3-coder:30b`."""
    if not isinstance(model, str):
        raise BadRequest(f"model: expected a name, got {shown(model)}")
    return model.strip().removeprefix("disaggregated:").strip()


def _how_to_choose(wanted: str, found: Sequence[str], names: Sequence[str]) -> str:
    known = f"the cluster has {', '.join(names)}"
    if not wanted:
        return f"name a model; {known}"
    if found:
        return f"{shown(wanted)} may be {' or '.join(found)}: write the whole name; {known}"
    return f"no model {shown(wanted)}; {known}"


def load_config(
    source: str | Path | dict[str, Any] | None = None, environ: Mapping[str, str] = os.environ
) -> ClusterConfig:
    """The cluster in a file, in a dict, or (None) in the file that `DISAGG_CONFIG` names, or the first of `PLACES`."""
    if source is not None and not isinstance(source, str | Path):
        return _ClusterReader("", environ).cluster(source)
    if source == "":
        raise ConfigError("the path of the cluster file is empty; name one, or give none to have it looked for")
    path = Path(os.path.expanduser(_find(environ) if source is None else source))
    return _ClusterReader(str(path), environ).cluster(parse(path))


def _find(environ: Mapping[str, str]) -> str:
    if named := environ.get("DISAGG_CONFIG"):
        return named
    for place in PLACES:
        if os.path.isfile(place):
            return place
    looked = f"DISAGG_CONFIG is not set, and there is no {', '.join(PLACES)}"
    raise ConfigError(f"no cluster file: {looked}; make one with `disagg config example > cluster.json`")


class _ClusterReader(Reader):
    default_token = ""

    def cluster(self, raw: Any) -> ClusterConfig:
        self.require_plain(raw)
        self.warn_unknown(raw, ClusterConfig.__struct_fields__[:-2], "")
        self.default_token = self.secret(raw.get("token", ""), "token")
        prefill, decode = self._servers(raw, "prefill"), self._servers(raw, "decode")
        self._require_distinct(prefill | decode)
        config = ClusterConfig(
            prefill_servers=tuple(prefill.values()),
            decode_servers=tuple(decode.values()),
            models=self._models(raw),
            links=self._links(raw, [*prefill.values(), *decode.values()]),
            policies=self.struct(Policies, raw.get("policies", {}), "policies"),
            token=self.default_token,
            source=self.file,
        )
        self._warn_unserved(config)
        return msgspec.structs.replace(config, warnings=tuple(self.warnings))

    def _servers(self, raw: dict[str, Any], role: Role) -> dict[str, Server]:
        """By their places."""
        return {place: self._server(item, role, place) for place, item in self.items(raw, f"{role}_servers")}

    def _server(self, raw: Any, role: Role, place: str) -> Server:
        is_both = isinstance(raw, dict) and raw.get("role") == "both"
        found = self.struct(Server, raw, place, name="", role=role, port=PORTS["both" if is_both else role])
        if role not in found.roles:
            raise self.error(f"{place}.role", f'this list is of {role} servers; move it, or write "both"')
        if not bare_name(found.model):
            raise self.wrong(f"{place}.model", "a model", found.model, "model")
        self._require_addresses(found.kv_addresses, f"{place}.kv_addresses")
        host = self._host(found.host, f"{place}.host")
        token = self.secret(found.token, f"{place}.token") or self.default_token
        name = found.name.strip() or spoken(host, found.port)
        return msgspec.structs.replace(found, host=host, token=token, name=name)

    def _require_addresses(self, addresses: Iterable[str], place: str) -> None:
        for index, address in enumerate(addresses):
            if not is_address(address):
                raise self.wrong(f"{place}[{index}]", "HOST or HOST:PORT", address, "kv_addresses")

    def _host(self, text: str, place: str) -> str:
        host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        if not is_host(host):
            raise self.wrong(place, "a host name or address", text, "host")
        if host in ("0.0.0.0", "::"):
            self.warn(place, f"{host} is where a server listens; write the address at which others reach it")
        return host

    def _require_distinct(self, servers: dict[str, Server]) -> None:
        if not servers:
            raise self.error("", "no servers; list some under prefill_servers and decode_servers")
        taken: dict[tuple[str, ...], str] = {}
        for place, server in servers.items():
            address = spoken(server.host.casefold(), server.port)
            for role in server.roles:
                if (first := taken.setdefault((role, address), place)) != place:
                    raise self.error(place, f"{address} is {first} already; list each {role} server once")
            if (first := taken.setdefault((server.name,), place)) != place:
                is_same = spoken(servers[first].host.casefold(), servers[first].port) == address
                how = 'list it once, with "role": "both"' if is_same else "give each server a name of its own"
                raise self.error(f"{place}.name", f"{shown(server.name)} is {first} already; {how}")

    def _models(self, raw: dict[str, Any]) -> dict[str, ModelOptions]:
        models = raw.get("models", {})
        if not isinstance(models, dict):
            raise self.wrong("models", "an object", models)
        found: dict[str, ModelOptions] = {}
        taken: dict[str, str] = {}  # spellings, and where they stand
        for key, item in models.items():
            place, name = f"models.{key}", bare_name(str(key))
            options = self.struct(ModelOptions, item, place)
            aliases = tuple(dict.fromkeys(map(bare_name, options.aliases)))
            for spelling in dict.fromkeys((name, *aliases)):
                self._take(spelling, taken, place)
            found[name] = msgspec.structs.replace(options, aliases=aliases)
        return found

    def _take(self, spelling: str, taken: dict[str, str], place: str) -> None:
        if not spelling:
            raise self.error(place, "a model's name or alias is empty; write one, or leave it out")
        if (first := taken.setdefault(spelling, place)) != place:
            raise self.error(place, f"{shown(spelling)} stands at {first} already; a name can mean one model only")

    def _links(self, raw: dict[str, Any], servers: Sequence[Server]) -> tuple[Link, ...]:
        found: dict[tuple[str, str], Link] = {}
        for place, item in self.items(raw, "links"):
            link = self.struct(Link, item, place)
            self._require_named(link.prefill, "prefill", servers, place)
            self._require_named(link.decode, "decode", servers, place)
            if found.setdefault((link.prefill, link.decode), link) is not link:
                raise self.error(place, f"{link.prefill} to {link.decode} stands there already; keep one of them")
        return tuple(found.values())

    def _require_named(self, name: str, role: str, servers: Sequence[Server], place: str) -> None:
        names = [server.name for server in servers if role in server.roles]
        if name not in names:
            hint = did_you_mean(name, names) or f"; there are {', '.join(names) or 'none'}"
            raise self.error(f"{place}.{role}", f"no {role} server has the name {shown(name)}{hint}")

    def _warn_unserved(self, config: ClusterConfig) -> None:
        for name in config.names:
            if not any("decode" in server.roles for server in config.servers_of(name)):
                how = 'add one, or unite names that mean one model with "aliases" under "models"'
                self.warn("decode_servers", f"none has the model {shown(name)}, which prefill servers have; {how}")
        for name in config.models:
            if name not in config.names:
                self.warn(f"models.{name}", 'no server has it; if they call it otherwise, say so under "aliases"')
