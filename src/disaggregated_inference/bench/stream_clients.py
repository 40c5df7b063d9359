"""Clients that stream from an OpenAI endpoint, and a tap that records when the tokens leave the node."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import aiohttp
import msgspec

from disaggregated_inference.errors import DisaggError

_TOKEN = b'"token":'
_ID = b"x-request-id: "
_READ_BYTES = 1 << 16

Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Stream:
    """One streamed completion. It is parsed after all have ended, so that parsing delays no client."""

    def __init__(self, number: int, tokens: int) -> None:
        self.number, self.max_tokens, self._received = number, tokens, list[tuple[float, bytes]]()
        self.name = f"bench-{number}"
        self.text, self.token_at = "", list[float]()

    async def follow(self, session: aiohttp.ClientSession, url: str, model: str) -> "Stream":
        headers = {"X-Request-Id": self.name, "Content-Type": "application/json"}
        data = msgspec.json.encode(self._body(model))
        async with session.post(f"{url}/v1/chat/completions", data=data, headers=headers) as response:
            if response.status != 200:
                raise DisaggError(f"{url}: {response.status} {(await response.text())[:300]}")
            while data := await response.content.readany():
                self._received.append((time.perf_counter(), data))
        return self

    def _body(self, model: str) -> dict[str, Any]:
        text = f"{self.name}: what is this number, where does it appear in nature, and what do people make of it?"
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages, "max_tokens": self.max_tokens}
        return body | {"temperature": 0, "stream": True}

    @property
    def tokens(self) -> int:
        return len(self.token_at)

    @property
    def has_started(self) -> bool:
        """Whether a token has arrived; keep-alive comments do not count."""
        return any(b'"content":"[' in data for _, data in self._received)

    def parse(self, complete: bool = True) -> "Stream":
        """Fill in text and token times. Every token of a simulated model begins with a bracket."""
        rest, ended = b"", False
        for at, data in self._received:
            *lines, rest = (rest + data).split(b"\n\n")
            for line in lines:
                ended = ended or line == b"data: [DONE]"
                if line.startswith(b"data: {"):
                    self._take(at, msgspec.json.decode(line[6:]))
        if complete and not (ended and self.tokens == self.max_tokens):
            end = "" if ended else ", without the end of the stream"
            raise DisaggError(f"{self.tokens} of {self.max_tokens} tokens arrived{end}")
        self._received.clear()
        return self

    def _take(self, at: float, event: dict[str, Any]) -> None:
        if "error" in event:
            raise DisaggError(str(event["error"]))
        for choice in event["choices"]:
            text = choice["delta"].get("content") or ""
            self.text += text
            self.token_at += [at] * text.count("[")


def new_session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)


class Tap:
    """A TCP proxy in front of a node. It records when the tokens of each request pass."""

    def __init__(self, port: int) -> None:
        self._node_port, self.port = port, 0
        self.token_at: dict[str, list[float]] = defaultdict(list)
        self._open: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Tap"]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._proxy(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _proxy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError):
            node_reader, node_writer = await asyncio.open_connection("127.0.0.1", self._node_port)
            current = [""]  # id of the request that the connection is serving
            forward = asyncio.create_task(self._forward((reader, node_writer), current))
            try:
                await self._back((node_reader, writer), current)
            finally:
                forward.cancel()
                node_writer.close()

    async def _forward(self, pipe: Pipe, current: list[str]) -> None:
        with suppress(ConnectionError):
            while data := await pipe[0].read(_READ_BYTES):
                _, found, after = data.lower().partition(_ID)
                if found:
                    current[0] = after.partition(b"\r\n")[0].decode()
                pipe[1].write(data)
        pipe[1].close()

    async def _back(self, pipe: Pipe, current: list[str]) -> None:
        tail = b""  # an event may arrive in two parts; the second one counts
        while data := await pipe[0].read(_READ_BYTES):
            now, text = time.perf_counter(), tail + data
            pipe[1].write(data)
            if count := text.count(_TOKEN):
                self.token_at[current[0]] += [now] * count
            tail = text[-len(_TOKEN) + 1 :]
