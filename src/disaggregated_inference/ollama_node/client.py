"""The HTTP API of a running Ollama, typed, with its errors as ours.

Ollama is not an engine like the others: it neither exports nor imports KV, and shows no token ids. A node in front of
it sends text and gets text. The shapes are those of Ollama 0.9.3, recorded, and of its source of August 2026;
tests/ollama_node has both.
"""

import errno
import ipaddress
import os
import re
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from disaggregated_inference.api import LoadedModel
from disaggregated_inference.errors import (
    BadRequest,
    Cancelled,
    ContextTooLong,
    DisaggError,
    EngineFailed,
    EngineUnavailable,
    NodeBusy,
)
from disaggregated_inference.timeouts import OllamaTimeouts

Kind = TypeVar("Kind", bound=msgspec.Struct)

PORT = 11434
_MAX_LINE_BYTES = 16 << 20
_PATHS = ("/", "./", "../", "~")  # how file paths start; no model name starts like this
_NOT_SERVED = (400, 404, 405, 501)  # every Ollama shows its version to everyone
HONOURS_TRUNCATE = (0, 12, 6)  # since this version, `truncate: false` refuses a prompt that does not fit
COUNTS_ALL = (0, 4, 0)  # before this version, cached tokens were not counted, and a count of 0 was left out

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_UNIT, _NUMBER = "(?:ns|us|µs|μs|ms|s|m|h)", r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_MAX_S = 9.2e9  # what Go's nanoseconds can hold

# Ollama's error texts: its API has no codes, and it sends status 500 for some bad requests.
_TOO_LONG = re.compile(
    r"context (length|size)|exceeds the available context|prompt is (longer|too long)", re.IGNORECASE
)
_NO_MODEL = re.compile(r"\bmodel\b.* not found", re.IGNORECASE)
_BAD_REQUEST = re.compile(
    r"invalid (format|JSON schema|option)|must be of type|does not support|grammar", re.IGNORECASE
)


class StorageDetails(msgspec.Struct, frozen=True):
    format: str = ""
    quantization_level: str = ""


class ModelDetails(msgspec.Struct, frozen=True):
    """The part of `/api/show` that is used here."""

    model_info: dict[str, Any] = {}
    parameters: str = ""  # of the Modelfile, one per line: `stop                           "<|im_end|>"`
    capabilities: tuple[str, ...] | None = None  # None: an old version
    details: StorageDetails = StorageDetails()

    @property
    def architecture(self) -> str:
        return str(self.model_info.get("general.architecture", ""))

    @property
    def parameter_count(self) -> int:
        return int(self.model_info.get("general.parameter_count") or 0)

    @property
    def window(self) -> int:
        """The model's context window; 0: unknown. Ollama may load it with less: see `num_ctx`."""
        return int(self.model_info.get(f"{self.architecture}.context_length") or 0)

    @property
    def stops(self) -> list[str]:
        """The stop strings of the Modelfile: stop strings of a request would replace them."""
        found = re.findall(r"^stop\s+(.+?)\s*$", self.parameters, re.MULTILINE)
        return [_unquoted(text) for text in found]

    def lacks(self, capability: str) -> bool:
        return self.capabilities is not None and capability not in self.capabilities


class _Ps(msgspec.Struct, frozen=True):
    """`/api/ps` and `/api/tags`. In the latter, `size` is that on disk."""

    models: list[LoadedModel] | None = None


class _Version(msgspec.Struct, frozen=True):
    version: str = ""


class ChatText(msgspec.Struct, frozen=True):
    content: str | None = ""
    thinking: str | None = ""
    tool_calls: list[dict[str, Any]] | None = None


class GenerateChunk(msgspec.Struct, frozen=True):
    """One line of `/api/generate` or `/api/chat`. Ollama leaves out counts of 0: None may mean 0."""

    response: str | None = ""
    thinking: str | None = ""
    message: ChatText = ChatText()
    done: bool = False
    done_reason: str | None = ""
    total_duration: int = 0  # nanoseconds
    load_duration: int = 0
    prompt_eval_count: int | None = None  # with cached tokens; old versions leave it out if all were cached
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    error: Any = None
    status: int = 0


_decoder = msgspec.json.Decoder(GenerateChunk)


class OllamaClient:
    """One model of one server. `window` is the `num_ctx` of its requests; error messages show it."""

    def __init__(self, host: str, model: str, timeouts: OllamaTimeouts = OllamaTimeouts()) -> None:
        model = model.removeprefix("disaggregated:")  # some clients add it
        _require_name(model)
        self.url, self.model, self.window, self._timeouts = base_url(host), model, 0, timeouts
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session:
            await self._session.close()
            self._session = None

    async def version(self) -> str:
        """This also shows whether an Ollama listens there, or another program."""
        found = (await self._call(_Version, "GET", "/api/version")).version
        if not found:
            raise self._not_ollama("it has no version")
        return found

    async def show(self) -> ModelDetails:
        return await self._call(ModelDetails, "POST", "/api/show", {"model": self.model})

    async def size_bytes(self) -> int:
        """Of the model's files; 0: unknown."""
        found = await self._listed("/api/tags")
        return found.size if found else 0

    async def running(self) -> LoadedModel | None:
        """The model, if it is in memory."""
        return await self._listed("/api/ps")

    async def _listed(self, path: str) -> LoadedModel | None:
        found = (await self._call(_Ps, "GET", path)).models or []
        return next((each for each in found if full_name(each.model or each.name) == full_name(self.model)), None)

    async def load(self, body: dict[str, Any]) -> None:
        """Load the model, or unload it with `keep_alive` 0: a request without a prompt. There is no time limit."""
        async for _ in self.stream("/api/generate", {"model": self.model} | body):
            pass

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[GenerateChunk, None]:
        """The response up to the chunk that is `done`. Closing the generator closes the connection, which makes Ollama
        stop."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.dial_s)
        try:
            async with self._client.post(self.url + path, data=msgspec.json.encode(body), timeout=timeout) as response:
                if response.status != 200:
                    raise self.refusal(response.status, await response.read())
                async for chunk in self._chunks(response):
                    yield chunk
                    if chunk.done:
                        return
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            raise self._unreachable(error) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._cut_short() from error
        raise self._cut_short()

    async def _chunks(self, response: aiohttp.ClientResponse) -> AsyncGenerator[GenerateChunk, None]:
        rest = b""
        async for data in response.content.iter_any():
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                raise EngineFailed(f"Ollama sent a line of more than {_MAX_LINE_BYTES} bytes")
            for line in lines:
                if line.strip():
                    yield self._decode(line)
        if rest.strip():  # a single document, or an unfinished line
            yield self._decode(rest)

    def _decode(self, line: bytes) -> GenerateChunk:
        try:
            found = _decoder.decode(line)
        except msgspec.DecodeError as error:
            raise EngineFailed(f"Ollama sent a line that cannot be decoded: {line[:200]!r}") from error
        if found.error:
            raise self.refusal(found.status or 500, line)
        return found

    async def _call(self, kind: type[Kind], method: str, path: str, body: dict[str, Any] | None = None) -> Kind:
        timeout = aiohttp.ClientTimeout(total=self._timeouts.small_request_s, sock_connect=self._timeouts.dial_s)
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._client.request(method, self.url + path, data=data, timeout=timeout) as response:
                content = await response.read()
        except aiohttp.ClientResponseError as error:
            raise self._not_ollama("it does not speak HTTP") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error
        if path == "/api/version" and response.status in _NOT_SERVED:
            raise self._not_ollama(f"it answers {path} with HTTP {response.status}")
        if response.status != 200:
            raise self.refusal(response.status, content)
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError as error:
            raise self._not_ollama(f"its response to {path} cannot be decoded") from error

    @property
    def _client(self) -> aiohttp.ClientSession:
        """Created on the event loop that uses it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), headers={"Content-Type": "application/json"}
            )
        return self._session

    def _unreachable(self, error: Exception) -> EngineUnavailable:
        return EngineUnavailable(
            f"Ollama at {self.url} does not answer ({_reason(error)}): start it with `ollama serve`"
        )

    def _not_ollama(self, why: str) -> EngineUnavailable:
        return EngineUnavailable(
            f"the server at {self.url} is not an Ollama ({why}): give Ollama's address with --ollama-host"
        )

    def _cut_short(self) -> EngineFailed:
        return EngineFailed(f"Ollama at {self.url} closed the connection in the middle of its response")

    def refusal(self, status: int, body: bytes) -> DisaggError:
        """The error for this response: a fault of the request, the model or the server."""
        reason = _reason_in(body)
        if status == 404 and not body.lstrip().startswith(b"{"):  # a page of a proxy
            return self._not_ollama("it answers with HTTP 404")
        if status == 404 and _NO_MODEL.search(reason):
            return self.missing()
        if _TOO_LONG.search(reason):
            return ContextTooLong(self.window + 1, self.window, "at least ")
        if status == 503:
            return NodeBusy(f"Ollama is busy: {reason}")
        if status == 499:
            return Cancelled("Ollama cancelled the request")
        if status == 403:
            return EngineUnavailable(f"Ollama at {self.url} refuses this host: set OLLAMA_ORIGINS or OLLAMA_HOST there")
        if status == 400 or _BAD_REQUEST.search(reason):
            return BadRequest(f"Ollama refuses the request: {reason}")
        return EngineFailed(f"Ollama failed: {reason} (HTTP {status})")

    def missing(self) -> EngineUnavailable:
        return EngineUnavailable(
            f"Ollama at {self.url} has no model {self.model}: run `ollama pull {self.model}` there"
        )


def base_url(host: str) -> str:
    """The forms of `OLLAMA_HOST`: with or without scheme and port. A wildcard address means this machine."""
    text = host.strip() or "localhost"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        name, port = parts.hostname, parts.port
    except ValueError:
        name, port = None, None
    if not name or parts.scheme not in ("http", "https") or parts.path.strip("/") or not _is_host(name):
        raise BadRequest(f"{host!r} is not an address of an Ollama: give one such as http://localhost:{PORT}")
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(name, name)
    return f"{parts.scheme}://{f'[{name}]' if ':' in name else name}:{port or PORT}"


def _is_host(name: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return bool(re.fullmatch(r"[\w.-]+", name))


def keep_alive_of(text: str) -> float | str:
    """A number of seconds, or a duration as Go writes it; negative means for ever."""
    if re.fullmatch(rf"[-+]?{_NUMBER}", text) and abs(float(text)) <= _MAX_S:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    parts = re.findall(rf"({_NUMBER})({_UNIT})", text)
    if re.fullmatch(rf"[-+]?({_NUMBER}{_UNIT})+", text) and sum(float(n) * _UNITS_S[u] for n, u in parts) <= _MAX_S:
        return text
    raise BadRequest(
        f"--keep-alive {text!r} is not a duration: give one such as 30m, 1h30m, 90 (seconds) or -1 (for ever)"
    )


def full_name(model: str) -> str:
    """`smollm2` is `smollm2:latest`."""
    return model if ":" in model.rpartition("/")[2] else f"{model}:latest"


def _require_name(model: str) -> None:
    """Refuse files. A tag may end in `.gguf`: in `hf.co/...` it names a file there."""
    is_tag = ":" in model.rpartition("/")[2]
    if (model.lower().endswith(".gguf") and not is_tag) or model.startswith(_PATHS) or Path(model).is_file():
        raise BadRequest(
            f"{model} is a file, but Ollama knows models by name: write a Modelfile with `FROM {model}`, run"
            " `ollama create NAME -f Modelfile`, and give --model NAME; or serve the file with --engine llamacpp"
        )


def version_of(text: str) -> tuple[int, ...]:
    """The numbers of `0.12.6-rc1`. An unreadable version counts as an old one."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0, 0, 0)


def _unquoted(text: str) -> str:
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(text, type=str)
    return text.strip('"')


def _reason_in(body: bytes) -> str:
    """Ollama sends `{"error": "..."}`; a proxy may send anything."""
    with suppress(msgspec.DecodeError, KeyError, TypeError):
        error = msgspec.json.decode(body)["error"]
        if isinstance(error, dict):  # the shape of other APIs, such as a gateway's
            error = error.get("message") or error.get("code") or "no reason given"
        return str(error or "no reason given").replace("registry.ollama.ai/library/", "")
    return body[:200].decode(errors="replace").strip() or "no reason given"


def _reason(error: Exception) -> str:
    cause = getattr(error, "os_error", None) or error  # aiohttp's text names sockets and sessions
    if isinstance(cause, OSError) and cause.errno and cause.errno in errno.errorcode:  # and so does asyncio's
        return os.strerror(cause.errno)
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
