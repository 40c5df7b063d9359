"""API keys: who may call, which models, how often."""

import hashlib
import hmac
import logging
from collections.abc import Callable, Container, Iterable
from pathlib import Path

import msgspec
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from disaggregated_inference.api import RequestRecord
from disaggregated_inference.cluster import ClusterConfig, ModelOptions, PrefixSharing, bare_name
from disaggregated_inference.errors import (
    BadRequest,
    DisaggError,
    ForeignSite,
    NotForThisKey,
    RateLimited,
    Unauthorized,
)
from disaggregated_inference.gateway.budgets import Budget
from disaggregated_inference.gateway.dashboard import is_dashboard
from disaggregated_inference.gateway.key_file import HOW, Key, read_keys
from disaggregated_inference.http import is_loopback, request_id, require_own_site

log = logging.getLogger(__name__)

# Health checks, and what is the same for every cluster.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/openapi.json", "/dashboard"})

_OTHER_SITES = "allow it with --cors http://NAME:PORT, or use keys (--keys)"

Describe = Callable[[HTTPConnection, Exception], Response]


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a key. No models means all models."""

    name: str = "anyone"
    models: tuple[str, ...] = ()
    owner: str = ""  # hash of the key; empty where no keys are needed
    group: str = ""
    operator: bool = False
    known: bool = True  # False: a caller without a key at a gateway that has keys

    def may_use(self, model: str) -> bool:
        """`model` is the name in the cluster config."""
        return not self.models or model in self.models

    @property
    def only_own(self) -> str | None:
        """The name whose requests alone this caller sees; None: those of all, where no keys are needed or the key is
        an operator's."""
        return None if self.sees_all else self.name

    @property
    def sees_all(self) -> bool:
        return self.operator or not self.owner

    def require_all(self) -> None:
        """For paths that show the whole cluster: all models, and the machines that serve them."""
        if self.models:
            raise NotForThisKey(
                f"the key {self.name!r} is limited to {', '.join(self.models)}; this path shows all models"
            )

    def cache_salt(self, sharing: PrefixSharing, wish: str | None = None) -> str | None:
        """Callers with the same salt share cached prefixes. `wish`: the client's own salt. It separates further, and
        never joins what is apart. A hash: nodes need not know who asks."""
        whose = self._namespace(sharing)
        return hashlib.sha256(msgspec.json.encode((whose, wish))).hexdigest() if whose or wish else None

    def _namespace(self, sharing: PrefixSharing) -> tuple[str, str] | None:
        if sharing == "shared" or not self.owner:
            return None
        return ("group", self.group) if sharing == "group" and self.group else ("key", self.owner)

    def among(self, config: ClusterConfig) -> "Caller":
        """The caller with the names that its models have in the config. Only names and aliases count, never a part of
        one. An unknown model stays in the list: an empty list would allow every model."""
        if not self.models:
            return self
        return msgspec.structs.replace(self, models=tuple(_config_name(model, config) for model in self.models))


def _config_name(model: str, config: ClusterConfig) -> str:
    wanted = bare_name(model).casefold()
    for name in config.names:
        spellings = (name, *config.models.get(name, ModelOptions()).aliases)
        if wanted in [spelling.casefold() for spelling in spellings]:
            return name
    return model


class Keys:
    """The keys of a gateway. Without any key, everyone may call."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._callers: dict[bytes, Caller] = {}
        self._budgets: dict[str, Budget] = {}
        self._replace(tuple(keys))

    @classmethod
    def load(cls, path: str | Path | None) -> "Keys":
        return cls(read_keys(path))

    def reload(self, path: str | Path | None) -> None:
        """An error in the file is raised, and the old keys stay. A name that stays keeps what it has used."""
        self._replace(read_keys(path))

    def _replace(self, keys: tuple[Key, ...]) -> None:
        self._callers = {key.digest: _caller(key) for key in keys}
        self._budgets = {key.name: self._budgets.get(key.name) or Budget(key) for key in keys}
        for key in keys:
            self._budgets[key.name].limit_by(key)

    def __len__(self) -> int:
        return len(self._callers)

    @property
    def names(self) -> Container[str]:
        return self._budgets

    def caller(self, keys: Iterable[bytes]) -> Caller:
        """The caller that one of these keys belongs to."""
        if not self._callers:
            return Caller()
        digests = [hashlib.sha256(key).digest() for key in keys]
        found: list[Caller] = []
        for known, caller in self._callers.items():  # always all: the time it takes must not tell anything
            found += [caller for digest in digests if hmac.compare_digest(digest, known)]
        if not found:
            raise Unauthorized("missing or unknown API key: send Authorization: Bearer KEY, or x-api-key: KEY")
        return found[0]

    def has(self, caller: Caller) -> bool:
        """Whether this caller of all models would be the same one now: keys may have been reloaded since."""
        return self._callers.get(bytes.fromhex(caller.owner)) == caller if self._callers else not caller.owner

    def budget(self, name: str) -> Budget | None:
        return self._budgets.get(name)

    def ended(self, record: RequestRecord) -> None:
        """Count the tokens of a request."""
        if record.is_charged and (budget := self.budget(record.caller)):
            budget.spend(record.total_tokens)


def _caller(key: Key) -> Caller:
    models, group = key.models or (), key.group or ""
    return Caller(name=key.name, models=models, owner=key.digest.hex(), group=group, operator=key.operator)


class AuthMiddleware:
    """Finds the caller of every request and puts it into `scope["state"]["caller"]`. `describe` turns an error into a
    response, in the shape of the request's API. `origins`: other sites whose pages may call without a key, where the
    gateway has none."""

    def __init__(self, app: ASGIApp, keys: Keys, describe: Describe, origins: tuple[str, ...] = ()) -> None:
        self._app, self._keys, self._describe, self._origins = app, keys, describe, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            caller = self._admit(scope)
            budget = self._begin(scope, caller)
        except (Unauthorized, RateLimited, ForeignSite) as error:
            return await self._refuse(scope, error)(scope, receive, send)
        scope["state"] = dict(scope.get("state") or {}) | {"caller": caller}
        if budget is None:
            return await self._app(scope, receive, send)
        try:
            await self._app(scope, receive, _with_limits(send, budget))
        finally:
            budget.end()

    def _begin(self, scope: Scope, caller: Caller) -> Budget | None:
        """Only generation is limited, not lists and metrics."""
        budget = self._keys.budget(caller.name) if scope["method"] == "POST" else None
        if budget:
            budget.begin()
        return budget

    def _admit(self, scope: Scope) -> Caller:
        if not len(self._keys) and scope["path"] != "/health":
            require_own_site(scope, _OTHER_SITES, self._origins)
        try:
            caller = self._keys.caller(_keys_in(scope))
        except Unauthorized:
            if _is_open(scope["path"]) and scope["method"] in ("GET", "HEAD"):
                return Caller(name="unknown", known=False)
            raise
        return caller.among(scope["app"].state.core.config)

    def _refuse(self, scope: Scope, error: DisaggError) -> Response:
        """The log has the name of a key, never the key."""
        connection = HTTPConnection(scope)
        id = request_id(connection)
        caller = {"caller": error.caller} if isinstance(error, RateLimited) else {}
        extra = {"path": scope["path"], "code": error.code, "request_id": id}
        log.warning("refused: %s", error, extra=extra | caller)
        scope["app"].state.metrics.refused(error, caller.get("caller", ""))
        response = self._describe(connection, error)
        if budget := self._keys.budget(caller.get("caller", "")):
            response.headers.update(budget.headers())
        return response


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or is_dashboard(path)


def _with_limits(send: Send, budget: Budget) -> Send:
    """With headers that say what is left."""

    async def with_limits(message: Message) -> None:
        if message["type"] == "http.response.start":
            limits = [(name.encode(), value.encode()) for name, value in budget.headers().items()]
            message = {**message, "headers": [*message.get("headers", ()), *limits]}
        await send(message)

    return with_limits


def _keys_in(scope: Scope) -> list[bytes]:
    """OpenAI and Ollama send a bearer token, Anthropic x-api-key, Azure api-key. All are taken: a proxy may have added
    its own."""
    found: list[bytes] = []
    for name, value in scope["headers"]:
        scheme, _, token = value.partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer":
            found.append(token.strip())
        elif name in (b"x-api-key", b"api-key"):
            found.append(value.strip())
    return [key for key in found if key][:4]


def require_keys(host: str, keys: Keys, insecure: bool) -> None:
    """Everyone who reaches an open gateway can use the whole cluster."""
    if not (len(keys) or insecure or is_loopback(host)):
        raise BadRequest(
            f"refusing to listen on {host} without keys: give --keys FILE ({HOW}), or --insecure if you mean it"
        )
