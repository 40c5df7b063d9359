"""The HTTP API of a running vLLM: prompts and answers as token ids, its errors as ours.

The shapes are those of vLLM 0.25 to 0.32: `return_token_ids` brings the ids of each piece of a stream, and
`return_tokens_as_token_ids` names the tokens of logprobs `token_id:42`.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec

from disaggregated_inference.errors import (
    BadRequest,
    DisaggError,
    EngineFailed,
    EngineUnavailable,
    KVMemoryFull,
    ModelNotFound,
)
from disaggregated_inference.timeouts import VllmTimeouts

Kind = TypeVar("Kind")

UNIX = "unix:"  # begins the address of a vLLM that listens at a Unix socket
_NO_HOST = "http://localhost"  # of requests to one
_MAX_EVENT_BYTES = 16 << 20
_TOO_LARGE = re.compile(r"KV cache|out of memory|cache blocks", re.IGNORECASE)


class NoVllm(EngineUnavailable):
    """The server there is another one."""


class KeyRefused(EngineUnavailable):
    """vLLM wants another key."""


class TokenLogprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class ChoicePiece(msgspec.Struct, frozen=True):
    """The next tokens of one choice."""

    index: int = 0
    token_ids: list[int] | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class VllmUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: CachedTokens | None = None


class CompletionPiece(msgspec.Struct, frozen=True):
    """One event of `/v1/completions`; the last one has the usage and no choice."""

    choices: list[ChoicePiece] = []
    usage: VllmUsage | None = None
    error: Any = None


class _VllmVersion(msgspec.Struct, frozen=True):
    version: str


class ServedModel(msgspec.Struct, frozen=True):
    """Of `/v1/models`."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[ServedModel] = []


class _Finished(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class Computed(msgspec.Struct, frozen=True):
    """The answer to a prompt whose KV was exported. The connector may add its own words."""

    choices: tuple[_Finished, ...] = ()
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def aborted(self) -> bool:
        """vLLM ended the request by itself, or someone asked it to: its answer is one like any other, with HTTP 200."""
        return any(choice.finish_reason == "abort" for choice in self.choices)


class VllmAddress(NamedTuple):
    """Where vLLM listens, `http://HOST:PORT` or `unix:PATH`: a restarted one has another."""

    url: str
    key: str = ""

    @property
    def socket(self) -> str:
        """The path of its Unix socket; empty: it has a port."""
        return self.url.removeprefix(UNIX) if self.url.startswith(UNIX) else ""


_decoder = msgspec.json.Decoder(CompletionPiece)


class VllmClient:
    """`address` is asked for every request. Connections are kept for the next request where `keep` says so: then all
    requests come from one event loop, which closes the client at its end."""

    def __init__(
        self, address: Callable[[], VllmAddress], timeouts: VllmTimeouts = VllmTimeouts(), keep: bool = False
    ) -> None:
        self._address, self._timeouts, self._keep = address, timeouts, keep
        self._kept: tuple[str, aiohttp.ClientSession] | None = None  # and the address that it is for

    async def version(self) -> str:
        return (await self._get(_VllmVersion, "/version")).version

    async def models(self) -> list[ServedModel]:
        return (await self._get(_Models, "/v1/models")).data

    async def is_healthy(self) -> bool:
        """vLLM has loaded its model, and its engine lives."""
        try:
            async with self._request("GET", "/health", self._timeouts.health_s) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def compute(self, body: dict[str, Any]) -> Computed:
        """A completion in one piece."""
        async with self._completion(body) as response:
            return _decode(Computed, await response.read(), EngineUnavailable("its response cannot be decoded"))

    async def complete(self, body: dict[str, Any]) -> AsyncGenerator[CompletionPiece, None]:
        """A stream of pieces; the first one is empty and says that vLLM has taken the request. Closing the generator
        closes the connection, which makes vLLM end the request."""
        async with self._completion(body) as response:
            yield CompletionPiece()
            async for piece in _pieces(response):
                yield piece

    async def close(self) -> None:
        if self._kept:
            await self._kept[1].close()

    @asynccontextmanager
    async def _completion(self, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """There is no limit of time: admission and deadlines limit requests."""
        try:
            async with self._request("POST", "/v1/completions", None, msgspec.json.encode(body)) as response:
                if response.status != 200:
                    raise refusal(response.status, await response.read())
                yield response
        except aiohttp.ClientConnectorError as error:
            raise EngineUnavailable(f"vLLM does not answer at {self._address().url}: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineFailed("vLLM closed the connection in the middle of its response") from error

    async def _get(self, kind: type[Kind], path: str) -> Kind:
        try:
            async with self._request("GET", path, self._timeouts.small_request_s) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            url = self._address().url
            raise EngineUnavailable(f"vLLM does not answer at {url}: {error or type(error).__name__}") from error
        problem = f"the server at {self._address().url} is no vLLM"
        if response.status == 404:
            raise NoVllm(f"{problem}: it has no {path}")
        if response.status != 200:
            raise refusal(response.status, content)
        return _decode(kind, content, NoVllm(f"{problem}: its {path} cannot be decoded"))

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, limit_s: float | None, data: bytes | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        address = self._address()
        base = _NO_HOST if address.socket else address.url.rstrip("/")
        headers = {"Authorization": f"Bearer {address.key}"} if address.key else {}
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=self._timeouts.dial_s)
        async with (
            self._session(address) as session,
            session.request(method, base + path, data=data, headers=headers, timeout=timeout) as response,
        ):
            yield response

    @asynccontextmanager
    async def _session(self, address: VllmAddress) -> AsyncIterator[aiohttp.ClientSession]:
        if not self._keep:
            async with _open_session(address, force_close=True) as session:
                yield session
            return
        if not self._kept or self._kept[0] != address.url:
            ended = self._kept  # with the vLLM that it was for
            self._kept = address.url, _open_session(address, keepalive_timeout=self._timeouts.idle_connection_s)
            if ended:
                await ended[1].close()
        yield self._kept[1]


def _open_session(address: VllmAddress, **options: Any) -> aiohttp.ClientSession:
    """No limit of connections."""
    connector: aiohttp.BaseConnector
    if address.socket:
        connector = aiohttp.UnixConnector(address.socket, limit=0, **options)
    else:
        connector = aiohttp.TCPConnector(limit=0, **options)
    return aiohttp.ClientSession(connector=connector, headers={"Content-Type": "application/json"})


def _decode(kind: type[Kind], content: bytes, problem: EngineUnavailable) -> Kind:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise problem from error


async def _pieces(response: aiohttp.ClientResponse) -> AsyncGenerator[CompletionPiece, None]:
    rest = b""
    async for data in response.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _MAX_EVENT_BYTES:
            raise EngineFailed(f"vLLM sent a line of more than {_MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.strip() == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                yield _decode_piece(line[6:])
    raise EngineFailed("vLLM closed the connection in the middle of its response")


def _decode_piece(line: bytes) -> CompletionPiece:
    try:
        piece = _decoder.decode(line)
    except msgspec.DecodeError as error:
        raise EngineFailed(f"vLLM sent an event that cannot be decoded: {line[:200]!r}") from error
    if piece.error:
        raise refusal(_status_in(piece.error), line)
    return piece


def refusal(status: int, body: bytes) -> DisaggError:
    """The error for this response: a fault of the request, of the key or of vLLM."""
    reason = _reason_in(body)
    if status == 404:
        return ModelNotFound(f"vLLM does not serve this model: {reason}")
    if status in (400, 422):
        return BadRequest(f"vLLM refuses the request: {reason}")
    if status in (401, 403):
        return KeyRefused("vLLM refuses this node's key: set VLLM_API_KEY to the key of that vLLM")
    if _TOO_LARGE.search(reason):
        return KVMemoryFull(f"vLLM has no memory for the request: {reason}")
    return EngineFailed(f"vLLM failed: {reason} (HTTP {status})")


def _status_in(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


def _reason_in(body: bytes) -> str:
    """vLLM sends `{"error": {"message": ...}}`; a proxy may send anything."""
    with suppress(msgspec.DecodeError, KeyError, TypeError):
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:1000]
    return body[:200].decode(errors="replace").strip() or "no reason given"
