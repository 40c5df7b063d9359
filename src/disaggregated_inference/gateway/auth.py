"""API keys: who may call, which models, how often."""

import hashlib
import hmac
import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from disaggregated_inference.cluster import ClusterConfig, ModelOptions, bare_name
from disaggregated_inference.errors import BadRequest, NotForThisKey, RateLimited, Unauthorized
from disaggregated_inference.gateway.key_file import HOW, Key, read_keys
from disaggregated_inference.http import is_loopback, request_id

log = logging.getLogger(__name__)

# Health checks, and what is the same for every cluster.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/openapi.json"})

Describe = Callable[[HTTPConnection, Exception], Response]


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a key. No models means all models."""

    name: str = "anyone"
    models: tuple[str, ...] = ()
    per_minute: float | None = None
    known: bool = True  # False: a caller without a key at a gateway that has keys

    def may_use(self, model: str) -> bool:
        """`model` is the name in the cluster config."""
        return not self.models or model in self.models

    def require_all(self) -> None:
        """For paths that show the whole cluster: all models, and the machines that serve them."""
        if self.models:
            raise NotForThisKey(
                f"the key {self.name!r} is limited to {', '.join(self.models)}; this path shows all models"
            )

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


class Bucket:
    """A token bucket: `per_minute` requests a minute, in a burst if need be. One for each key in the file."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._size, self._per_s, self._clock = max(1.0, per_minute), per_minute / 60, clock
        self._left, self._updated_at = self._size, clock()

    def take(self) -> float:
        """Take one. Returns the seconds to wait for it; 0: it was taken."""
        now = self._clock()
        self._left = min(self._size, self._left + (now - self._updated_at) * self._per_s)
        self._updated_at = now
        if self._left < 1:
            return (1 - self._left) / self._per_s
        self._left -= 1
        return 0.0


class Keys:
    """The keys of a gateway. Without any key, everyone may call."""

    def __init__(self, keys: Iterable[Key] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._callers: dict[bytes, tuple[Caller, Bucket | None]] = {}
        self._replace(tuple(keys))

    @classmethod
    def load(cls, path: str | Path | None) -> "Keys":
        return cls(read_keys(path))

    def reload(self, path: str | Path | None) -> None:
        """An error in the file is raised, and the old keys stay. A key that stays keeps its bucket."""
        self._replace(read_keys(path))

    def _replace(self, keys: tuple[Key, ...]) -> None:
        new: dict[bytes, tuple[Caller, Bucket | None]] = {}
        for key in keys:
            caller = Caller(name=key.name, models=key.models or (), per_minute=key.per_minute)
            bucket = Bucket(key.per_minute, self._clock) if key.per_minute else None
            before = self._callers.get(key.digest)
            new[key.digest] = before if before and before[0] == caller else (caller, bucket)
        self._callers = new

    def __len__(self) -> int:
        return len(self._callers)

    def caller(self, keys: Iterable[bytes]) -> Caller:
        """The caller that one of these keys belongs to."""
        if not self._callers:
            return Caller()
        digests = [hashlib.sha256(key).digest() for key in keys]
        found: list[Caller] = []
        for known, (caller, _) in self._callers.items():  # always all: the time it takes must not tell anything
            found += [caller for digest in digests if hmac.compare_digest(digest, known)]
        if not found:
            raise Unauthorized("missing or unknown API key: send Authorization: Bearer KEY, or x-api-key: KEY")
        return found[0]

    def count(self, caller: Caller) -> None:
        """Count a request against the limit of its key."""
        bucket = next((bucket for known, bucket in self._callers.values() if known == caller), None)
        if bucket and (wait_s := bucket.take()):
            limit = f"the key {caller.name!r} is limited to {caller.per_minute:g} requests a minute"
            raise RateLimited(limit, math.ceil(wait_s), caller.name)


class AuthMiddleware:
    """Finds the caller of every request and puts it into `scope["state"]["caller"]`. `describe` turns an error into a
    response, in the shape of the request's API."""

    def __init__(self, app: ASGIApp, keys: Keys, describe: Describe) -> None:
        self._app, self._keys, self._describe = app, keys, describe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            caller = self._admit(scope)
        except (Unauthorized, RateLimited) as error:
            return await self._refuse(scope, error)(scope, receive, send)
        scope["state"] = dict(scope.get("state") or {}) | {"caller": caller}
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> Caller:
        try:
            caller = self._keys.caller(_keys_in(scope))
        except Unauthorized:
            if scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
                return Caller(name="unknown", known=False)
            raise
        if scope["method"] == "POST":  # only generation is limited, not lists and metrics
            self._keys.count(caller)
        return caller.among(scope["app"].state.core.config)

    def _refuse(self, scope: Scope, error: Unauthorized | RateLimited) -> Response:
        """The log has the name of a key, never the key."""
        connection = HTTPConnection(scope)
        id = request_id(connection)
        caller = {"caller": error.caller} if isinstance(error, RateLimited) else {}
        extra = {"path": scope["path"], "code": error.code, "request_id": id}
        log.warning("refused: %s", error, extra=extra | caller)
        scope["app"].state.metrics.refused(error)
        return self._describe(connection, error)


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
