"""The HTTP API of a running vLLM: prompts and answers as token ids, its errors as ours.

The shapes are those of vLLM 0.25 to 0.32: `return_token_ids` brings the ids of each piece of a stream, and
`return_tokens_as_token_ids` names the tokens of logprobs `token_id:42`.
"""

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
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

_MAX_EVENT_BYTES = 16 << 20
_TOO_LARGE = re.compile(r"KV cache|out of memory|cache blocks", re.IGNORECASE)


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


class VllmAddress(NamedTuple):
    """Where vLLM listens: a restarted one has another port."""

    url: str
    key: str = ""


_decoder = msgspec.json.Decoder(CompletionPiece)


class VllmClient:
    """`address` is asked for every request."""

    def __init__(self, address: Callable[[], VllmAddress], timeouts: VllmTimeouts = VllmTimeouts()) -> None:
        self._address, self._timeouts = address, timeouts

    async def version(self) -> str:
        return (await self._get(_VllmVersion, "/version")).version

    async def models(self) -> list[ServedModel]:
        return (await self._get(_Models, "/v1/models")).data

    async def complete(self, body: dict[str, Any]) -> AsyncGenerator[CompletionPiece, None]:
        """A stream of pieces; the first one is empty and says that vLLM has taken the request. Closing the generator
        closes the connection, which makes vLLM end the request."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.dial_s)
        url, headers = self._request("/v1/completions")
        try:
            data = msgspec.json.encode(body)
            async with (
                _session() as session,
                session.post(url, data=data, headers=headers, timeout=timeout) as response,
            ):
                if response.status != 200:
                    raise refusal(response.status, await response.read())
                yield CompletionPiece()
                async for piece in _pieces(response):
                    yield piece
        except aiohttp.ClientConnectorError as error:
            raise EngineUnavailable(f"vLLM does not answer at {url}: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineFailed("vLLM closed the connection in the middle of its response") from error

    async def _get(self, kind: type[Kind], path: str) -> Kind:
        url, headers = self._request(path)
        timeout = aiohttp.ClientTimeout(total=self._timeouts.small_request_s, sock_connect=self._timeouts.dial_s)
        try:
            async with _session() as session, session.get(url, headers=headers, timeout=timeout) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnavailable(f"vLLM does not answer at {url}: {error or type(error).__name__}") from error
        if response.status != 200:
            raise refusal(response.status, content)
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError as error:
            raise EngineUnavailable(f"the server at {url} is no vLLM: its response cannot be decoded") from error

    def _request(self, path: str) -> tuple[str, dict[str, str]]:
        url, key = self._address()
        return url.rstrip("/") + path, {"Authorization": f"Bearer {key}"} if key else {}


def _session() -> aiohttp.ClientSession:
    """For one request: which event loop asks is not known, and loopback is near."""
    headers = {"Content-Type": "application/json"}
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), headers=headers)


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
                yield _decode(line[6:])
    raise EngineFailed("vLLM closed the connection in the middle of its response")


def _decode(line: bytes) -> CompletionPiece:
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
        return EngineUnavailable("vLLM refuses this node's key: set VLLM_API_KEY to the key of that vLLM")
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
