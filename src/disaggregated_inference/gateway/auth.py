"""Who may call, with which models, how often."""

import hashlib
import hmac
import ipaddress
import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from disaggregated_inference.cluster.config import ClusterConfig, ModelOptions, bare_name
from disaggregated_inference.errors import BadRequest, DisaggError, NotForThisKey, RateLimited, Unauthorized
from disaggregated_inference.gateway.key_file import HOW, Key, read_keys
from disaggregated_inference.http.request_id import request_id_of

log = logging.getLogger(__name__)

# What is looked at to see whether anyone is there, and what the same gateway says everywhere, of whichever cluster.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/openapi.json"})

Describe = Callable[[str, Exception, str], Response]


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Whoever holds a key. No models: all of them."""

    name: str = "anyone"
    models: tuple[str, ...] = ()
    per_minute: float | None = None
    known: bool = True  # not so: someone without a key, where others have one

    def may_use(self, model: str) -> bool:
        """`model` is the cluster's own name of it."""
        return not self.models or model in self.models

    def require_all(self) -> None:
        """For what shows the whole cluster: other models, and the machines that have them."""
        if self.models:
            raise NotForThisKey(f"the key {self.name!r} is for {', '.join(self.models)} alone, and this shows them all")

    def among(self, config: ClusterConfig) -> "Caller":
        """With the cluster's own names for the models in the list. By name or alias alone: what may be used is not
        guessed from a part of a name. One that is not there stays as it is, or an empty list would allow everything."""
        if not self.models:
            return self
        return msgspec.structs.replace(self, models=tuple(_own_name(model, config) for model in self.models))


def _own_name(model: str, config: ClusterConfig) -> str:
    wanted = bare_name(model).casefold()
    for name in config.names:
        spellings = (name, *config.models.get(name, ModelOptions()).aliases)
        if wanted in [spelling.casefold() for spelling in spellings]:
            return name
    return model


class Bucket:
    """So many a minute, all of them at once if need be. One for each key in the file: there are only so many."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._per_s, self._clock = max(1.0, per_minute), per_minute / 60, clock
        self._left, self._at = self._most, clock()

    def take(self) -> float:
        """Seconds until there is one; 0: it is taken."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / self._per_s
        self._left -= 1
        return 0.0


class Keys:
    """Those that a gateway knows. None: everyone may call."""

    def __init__(self, keys: Iterable[Key] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[bytes, tuple[Caller, Bucket | None]] = {}
        self._take(tuple(keys))

    @classmethod
    def load(cls, path: str | Path | None) -> "Keys":
        return cls(read_keys(path))

    def reload(self, path: str | Path | None) -> None:
        """What is wrong with the file is raised, and the old keys stay. Whoever still has one has used what it used."""
        self._take(read_keys(path))

    def _take(self, keys: tuple[Key, ...]) -> None:
        old, fresh = self._known, {}
        for key in keys:
            caller, before = _caller(key), old.get(key.digest)
            fresh[key.digest] = before if before and before[0] == caller else (caller, self._bucket(key))
        self._known = fresh

    def _bucket(self, key: Key) -> Bucket | None:
        return Bucket(key.per_minute, self._clock) if key.per_minute else None

    def __len__(self) -> int:
        return len(self._known)

    def caller(self, given: Iterable[bytes]) -> Caller:
        """Whose key is among those given."""
        if not self._known:
            return Caller()
        digests = [hashlib.sha256(key).digest() for key in given]
        found: list[Caller] = []
        for known, (caller, _) in self._known.items():  # all of them, always: how long it takes tells nobody anything
            found += [caller for digest in digests if hmac.compare_digest(digest, known)]
        if not found:
            how = "this key is not known" if digests else "a key is needed: Authorization: Bearer ..., or x-api-key"
            raise Unauthorized(how)
        return found[0]

    def count(self, caller: Caller) -> None:
        """One more request of theirs."""
        bucket = next((bucket for known, bucket in self._known.values() if known == caller), None)
        if bucket and (wait_s := bucket.take()):
            limit = f"{caller.per_minute:g} requests a minute are what the key {caller.name!r} is for"
            raise RateLimited(limit, math.ceil(wait_s), caller.name)


def _caller(key: Key) -> Caller:
    return Caller(name=key.name, models=key.models or (), per_minute=key.per_minute)


class AuthMiddleware:
    """Before everything else: who is it? `scope["state"]["caller"]` says so from here on. `describe` makes a response
    of an error, in the shape of the API that has the path."""

    def __init__(self, app: ASGIApp, keys: Keys, describe: Describe) -> None:
        self._app, self._keys, self._describe = app, keys, describe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            caller = self._admitted(scope)
        except (Unauthorized, RateLimited) as error:
            return await self._refusal(scope, error)(scope, receive, send)
        scope["state"] = dict(scope.get("state") or {}) | {"caller": caller}
        await self._app(scope, receive, send)

    def _admitted(self, scope: Scope) -> Caller:
        if scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            return self._anyone(scope)
        caller = self._keys.caller(_given(scope))
        if scope["method"] == "POST":  # what makes someone work; looking at lists and numbers does not
            self._keys.count(caller)
        return caller.among(scope["app"].state.core.config)

    def _anyone(self, scope: Scope) -> Caller:
        try:
            return self._keys.caller(_given(scope)).among(scope["app"].state.core.config)
        except Unauthorized:
            return Caller(name="stranger", known=False)

    def _refusal(self, scope: Scope, error: Unauthorized | RateLimited) -> Response:
        name = request_id_of(Request(scope))
        self._note(scope, error, name)
        response = self._describe(scope["path"], error, name)
        if isinstance(error, RateLimited):
            response.headers.setdefault("Retry-After", str(error.retry_after_s))
        else:
            response.headers.setdefault("WWW-Authenticate", "Bearer")
        return response

    def _note(self, scope: Scope, error: DisaggError, request_id: str) -> None:
        """Whose key it was, never the key."""
        whose = {"caller": error.caller} if isinstance(error, RateLimited) else {}
        more = {"path": scope["path"], "code": error.code, "request_id": request_id}
        log.warning("refused: %s", error, extra=more | whose)
        scope["app"].state.metrics.refused(error)


def _given(scope: Scope) -> list[bytes]:
    """Where the APIs have it: OpenAI and Ollama as a bearer, Anthropic as x-api-key, Azure as api-key. All that are
    there: a proxy may have put its own beside it."""
    found: list[bytes] = []
    for name, value in scope["headers"]:
        scheme, _, token = value.partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer":
            found.append(token.strip())
        elif name in (b"x-api-key", b"api-key"):
            found.append(value.strip())
    return [key for key in found if key][:4]


def require_keys(host: str, keys: Keys, insecure: bool) -> None:
    """Whoever reaches the gateway has the whole cluster work for them."""
    if not (len(keys) or insecure or _is_loopback(host)):
        raise BadRequest(
            f"refusing to listen on {host} without keys: give --keys FILE ({HOW}), or --insecure if you mean it"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
