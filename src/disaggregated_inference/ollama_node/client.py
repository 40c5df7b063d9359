"""A running Ollama, by its HTTP API: typed, and its many ways of saying no made ours.

Not an engine as the others are: its cache cannot be read or written from outside, and its tokens have no ids here. So
there is no `load`: a node in front of it (`nodes/ollama.py`) sends text and gets text. The shapes are those of Ollama
0.9.3, recorded, and of its source of August 2026; tests/test_ollama.py holds both.
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

from disaggregated_inference.errors import (
    BadRequest,
    Cancelled,
    ContextTooLong,
    DisaggError,
    EngineFailed,
    EngineUnavailable,
    NodeBusy,
)

Kind = TypeVar("Kind", bound=msgspec.Struct)

PORT = 11434
_DIAL_S = 3.0
_SMALL_S = 5.0  # for questions that cost it nothing
_LONGEST_LINE_BYTES = 16 << 20
_PATHS = ("/", "./", "../", "~")  # as the shell's users write them; no model's name begins so
_NOT_SERVED = (400, 404, 405, 501)  # every Ollama has a version to tell, to anyone
HONOURS_TRUNCATE = (0, 12, 6)  # from here on `truncate: false` is an error for a prompt that does not fit, not ignored

COUNTS_ALL = (0, 4, 0)  # before it, tokens that it held already were not counted, and a count of nothing was left out

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_UNIT, _NUMBER = "(?:ns|us|µs|μs|ms|s|m|h)", r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_LONGEST_S = 9.2e9  # what Go's nanoseconds hold

# Its words where a prompt is too long, and where a request is wrong although the status says that the server is.
_TOO_LONG = re.compile(
    r"context (length|size)|exceeds the available context|prompt is (longer|too long)", re.IGNORECASE
)
_NO_MODEL = re.compile(r"\bmodel\b.* not found", re.IGNORECASE)
_OUR_FAULT = re.compile(r"invalid (format|JSON schema|option)|must be of type|does not support|grammar", re.IGNORECASE)


class ModelDetails(msgspec.Struct, frozen=True):
    """Of `/api/show`, what is used here."""

    model_info: dict[str, Any] = {}
    parameters: str = ""  # of the Modelfile, a line each: `stop                           "<|im_end|>"`
    capabilities: tuple[str, ...] | None = None  # None: a version that does not say

    @property
    def architecture(self) -> str:
        return str(self.model_info.get("general.architecture", ""))

    @property
    def parameter_count(self) -> int:
        return int(self.model_info.get("general.parameter_count") or 0)

    @property
    def window(self) -> int:
        """What the model was made for; 0 where its file does not say. What is loaded may be less: see `num_ctx`."""
        return int(self.model_info.get(f"{self.architecture}.context_length") or 0)

    @property
    def stops(self) -> list[str]:
        """Those of the Modelfile: a request that names some of its own would replace them."""
        found = re.findall(r"^stop\s+(.+?)\s*$", self.parameters, re.MULTILINE)
        return [_unquoted(text) for text in found]

    def lacks(self, capability: str) -> bool:
        return self.capabilities is not None and capability not in self.capabilities


class LoadedModel(msgspec.Struct, frozen=True):
    """A model in memory, of `/api/ps`."""

    name: str = ""
    model: str = ""
    size: int = 0
    size_vram: int = 0
    digest: str = ""
    expires_at: str = ""
    context_length: int = 0  # 0: a version that does not say


class _Ps(msgspec.Struct, frozen=True):
    models: list[LoadedModel] | None = None


class _Version(msgspec.Struct, frozen=True):
    version: str = ""


class ChatText(msgspec.Struct, frozen=True):
    content: str | None = ""
    thinking: str | None = ""
    tool_calls: list[dict[str, Any]] | None = None


class GenerateChunk(msgspec.Struct, frozen=True):
    """One line of `/api/generate` or `/api/chat`. Counts of nothing are left out: None is 0 or not said."""

    response: str | None = ""
    thinking: str | None = ""
    message: ChatText = ChatText()
    done: bool = False
    done_reason: str | None = ""
    total_duration: int = 0  # nanoseconds
    load_duration: int = 0
    prompt_eval_count: int | None = None  # those it held already included; left out by old versions that held all
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    error: Any = None
    status: int = 0


_lines = msgspec.json.Decoder(GenerateChunk)


class OllamaClient:
    """One model of one server. `window` is for its refusals: whoever sends `num_ctx` sets it."""

    def __init__(self, host: str, model: str) -> None:
        model = model.removeprefix("disaggregated:")  # as clients may name it
        _require_name(model)
        self.url, self.model, self.window = base_url(host), model, 0
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session:
            await self._session.close()
            self._session = None

    async def version(self) -> str:
        """Also how an Ollama is known from whatever else may listen there."""
        found = (await self._small(_Version, "GET", "/api/version")).version
        if not found:
            raise self._no_ollama("it has no version")
        return found

    async def show(self) -> ModelDetails:
        return await self._small(ModelDetails, "POST", "/api/show", {"model": self.model})

    async def running(self) -> LoadedModel | None:
        """The model, if it is in memory."""
        found = (await self._small(_Ps, "GET", "/api/ps")).models or []
        return next((each for each in found if full_name(each.model or each.name) == full_name(self.model)), None)

    async def load(self, body: dict[str, Any]) -> None:
        """Into memory, or with `keep_alive` 0 out of it: a request without a prompt. However long it takes."""
        async for _ in self.lines("/api/generate", {"model": self.model} | body):
            pass

    async def lines(self, path: str, body: dict[str, Any]) -> AsyncGenerator[GenerateChunk, None]:
        """An answer as it comes, up to and with the line that is `done`. Closing it closes the connection, and that is
        how Ollama is told to stop."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_DIAL_S)
        try:
            async with self._client.post(self.url + path, data=_encoded(body), timeout=timeout) as response:
                if response.status != 200:
                    raise self.refusal(response.status, await response.read())
                async for line in self._split(response):
                    yield line
                    if line.done:
                        return
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            raise self._away(error) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._broke_off() from error
        raise self._broke_off()

    async def _split(self, response: aiohttp.ClientResponse) -> AsyncGenerator[GenerateChunk, None]:
        rest = b""
        async for data in response.content.iter_any():
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _LONGEST_LINE_BYTES:
                raise EngineFailed(f"Ollama sent a line of more than {_LONGEST_LINE_BYTES} bytes")
            for line in lines:
                if line.strip():
                    yield self._read(line)
        if rest.strip():  # a document, or a line that nobody finished
            yield self._read(rest)

    def _read(self, line: bytes) -> GenerateChunk:
        try:
            found = _lines.decode(line)
        except msgspec.DecodeError as error:
            raise EngineFailed(f"Ollama said something that cannot be read: {line[:200]!r}") from error
        if found.error:
            raise self.refusal(found.status or 500, line)
        return found

    async def _small(self, kind: type[Kind], method: str, path: str, body: dict[str, Any] | None = None) -> Kind:
        timeout = aiohttp.ClientTimeout(total=_SMALL_S, sock_connect=_DIAL_S)
        data = None if body is None else _encoded(body)
        try:
            async with self._client.request(method, self.url + path, data=data, timeout=timeout) as response:
                content = await response.read()
        except aiohttp.ClientResponseError as error:
            raise self._no_ollama("it does not speak HTTP") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._away(error) from error
        if path == "/api/version" and response.status in _NOT_SERVED:
            raise self._no_ollama(f"it answers {path} with HTTP {response.status}")
        if response.status != 200:
            raise self.refusal(response.status, content)
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError as error:
            raise self._no_ollama(f"its answer to {path} cannot be read") from error

    @property
    def _client(self) -> aiohttp.ClientSession:
        """Made on the event loop that uses it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), headers={"Content-Type": "application/json"}
            )
        return self._session

    def _away(self, error: Exception) -> EngineUnavailable:
        return EngineUnavailable(
            f"Ollama at {self.url} does not answer ({_reason(error)}): start it with `ollama serve`"
        )

    def _no_ollama(self, why: str) -> EngineUnavailable:
        return EngineUnavailable(
            f"what listens at {self.url} is no Ollama ({why}): give Ollama's address with --ollama-host"
        )

    def _broke_off(self) -> EngineFailed:
        return EngineFailed(f"Ollama at {self.url} broke off in the middle of its answer")

    def refusal(self, status: int, body: bytes) -> DisaggError:
        """By whose fault it is: the request's, the model's or the server's."""
        words = _words(body)
        if status == 404 and not body.lstrip().startswith(b"{"):  # a page of whatever is in between
            return self._no_ollama("it answers with HTTP 404")
        if status == 404 and _NO_MODEL.search(words):
            return self.missing()
        if _TOO_LONG.search(words):
            return ContextTooLong(self.window + 1, self.window, "at least ")
        if status == 503:
            return NodeBusy(f"Ollama is busy: {words}")
        if status == 499:
            return Cancelled("Ollama took the request for cancelled")
        if status == 403:
            return EngineUnavailable(f"Ollama at {self.url} refuses this host: set OLLAMA_ORIGINS or OLLAMA_HOST there")
        if status == 400 or _OUR_FAULT.search(words):
            return BadRequest(f"Ollama refuses this: {words}")
        return EngineFailed(f"Ollama failed: {words} (HTTP {status})")

    def missing(self) -> EngineUnavailable:
        return EngineUnavailable(
            f"Ollama at {self.url} has no model {self.model}: run `ollama pull {self.model}` there"
        )


def base_url(host: str) -> str:
    """As `OLLAMA_HOST` may be written: with or without a scheme and a port. Where it listens everywhere, it is here."""
    text = host.strip() or "localhost"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        name, port = parts.hostname, parts.port
    except ValueError:
        name, port = None, None
    if not name or parts.scheme not in ("http", "https") or parts.path.strip("/") or not _is_host(name):
        raise BadRequest(f"{host!r} is no address of an Ollama: give one such as http://localhost:{PORT}")
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(name, name)
    return f"{parts.scheme}://{f'[{name}]' if ':' in name else name}:{port or PORT}"


def _is_host(name: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return bool(re.fullmatch(r"[\w.-]+", name))


def keep_alive_of(text: str) -> float | str:
    """As Ollama has it: a number of seconds, or a duration as Go writes it; less than none is for ever."""
    if re.fullmatch(rf"[-+]?{_NUMBER}", text) and abs(float(text)) <= _LONGEST_S:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    parts = re.findall(rf"({_NUMBER})({_UNIT})", text)
    if re.fullmatch(rf"[-+]?({_NUMBER}{_UNIT})+", text) and sum(float(n) * _UNITS_S[u] for n, u in parts) <= _LONGEST_S:
        return text
    raise BadRequest(
        f"--keep-alive {text!r} is no duration: give one such as 30m, 1h30m, 90 (seconds) or -1 (for ever)"
    )


def full_name(model: str) -> str:
    """`smollm2` is `smollm2:latest`."""
    return model if ":" in model.rpartition("/")[2] else f"{model}:latest"


def _require_name(model: str) -> None:
    """Not a file. A tag may well end in `.gguf`: of `hf.co/...` it is a file there."""
    is_tag = ":" in model.rpartition("/")[2]
    if (model.lower().endswith(".gguf") and not is_tag) or model.startswith(_PATHS) or Path(model).is_file():
        raise BadRequest(
            f"{model} is a file, and Ollama has models by name: write a Modelfile with `FROM {model}`, run"
            " `ollama create NAME -f Modelfile`, and give --model NAME; or serve the file with --engine llamacpp"
        )


def version_of(text: str) -> tuple[int, ...]:
    """Of `0.12.6-rc1` the numbers. One that nobody can read is taken for an old one."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0, 0, 0)


def _encoded(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body)


def _unquoted(text: str) -> str:
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(text, type=str)
    return text.strip('"')


def _words(body: bytes) -> str:
    """Mostly `{"error": "..."}`; a proxy in between may say anything."""
    with suppress(msgspec.DecodeError, KeyError, TypeError):
        told = msgspec.json.decode(body)["error"]
        if isinstance(told, dict):  # as others say it, a gateway in between for one
            told = told.get("message") or told.get("code") or "no reason given"
        return str(told or "no reason given").replace("registry.ollama.ai/library/", "")
    return body[:200].decode(errors="replace").strip() or "no reason given"


def _reason(error: Exception) -> str:
    cause = getattr(error, "os_error", None) or error  # aiohttp's own words name sockets and sessions
    if isinstance(cause, OSError) and cause.errno and cause.errno in errno.errorcode:  # and so do asyncio's
        return os.strerror(cause.errno)
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
