"""Clients that read streams of an OpenAI endpoint, and a tap that sees the same tokens leave the node."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import aiohttp
import msgspec

from disaggregated_inference.errors import DisaggError

_TOKEN = b'data: {"token"'
_ID = b"x-request-id: "
_READ_BYTES = 1 << 16

Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Stream:
    """One answer: what came, and when. It is looked at when all are over, so that looking delays nobody."""

    def __init__(self, number: int, tokens: int) -> None:
        self.number, self.asked, self.came = number, tokens, list[tuple[float, bytes]]()
        self.name = f"bench-{number}"
        self.started, self.text, self.token_at = 0.0, "", list[float]()

    async def follow(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self.started = time.perf_counter()
        headers = {"X-Request-Id": self.name, "Content-Type": "application/json"}
        data = msgspec.json.encode(self._body(model))
        async with session.post(f"{url}/v1/chat/completions", data=data, headers=headers) as response:
            if response.status != 200:
                raise DisaggError(f"{url}: {response.status} {(await response.text())[:300]}")
            while some := await response.content.readany():
                self.came.append((time.perf_counter(), some))

    def _body(self, model: str) -> dict[str, Any]:
        said = f"{self.name}: what is this number, where does it appear in nature, and what do people make of it?"
        asked = {"messages": [{"role": "user", "content": said}], "max_tokens": self.asked}
        return asked | {"model": model, "temperature": 0, "stream": True}

    @property
    def tokens(self) -> int:
        return len(self.token_at)

    @property
    def has_begun(self) -> bool:
        """With a token: what keeps a connection alive is none."""
        return any(b'"content":"[' in data for _, data in self.came)

    def read(self, whole: bool = True) -> "Stream":
        """What came becomes text; every word of a simulated model begins with a bracket, and is one token."""
        rest, ended = b"", False
        for at, data in self.came:
            *lines, rest = (rest + data).split(b"\n\n")
            for line in lines:
                ended = ended or line == b"data: [DONE]"
                if line.startswith(b"data: {"):
                    self._take(at, msgspec.json.decode(line[6:]))
        if whole and not (ended and self.tokens == self.asked):
            raise DisaggError(f"{self.tokens} of {self.asked} tokens came, the end {'too' if ended else 'did not'}")
        self.came.clear()
        return self

    def _take(self, at: float, event: dict[str, Any]) -> None:
        if "error" in event:
            raise DisaggError(str(event["error"]))
        for choice in event["choices"]:
            text = choice["delta"].get("content") or ""
            self.text += text
            self.token_at += [at] * text.count("[")


def clients() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)


async def closed_loop(streams: Iterable[Stream], at_once: int, url: str, model: str) -> list[Stream]:
    """So many clients, each with the next one as soon as its last is over."""
    waiting, done = iter(streams), list[Stream]()

    async def client(session: aiohttp.ClientSession) -> None:
        for stream in waiting:
            await stream.follow(session, url, model)
            done.append(stream)

    async with clients() as session:
        await asyncio.gather(*(client(session) for _ in range(at_once)))
    return done


class Tap:
    """Before a node: bytes go through as they are, and when each request's tokens did is kept."""

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
        task = asyncio.create_task(self._both_ways(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _both_ways(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError):
            node_reader, node_writer = await asyncio.open_connection("127.0.0.1", self._node_port)
            asked = [""]  # whose request the connection is at
            there = asyncio.create_task(self._there((reader, node_writer), asked))
            try:
                await self._back((node_reader, writer), asked)
            finally:
                there.cancel()
                node_writer.close()

    async def _there(self, pipe: Pipe, asked: list[str]) -> None:
        with suppress(ConnectionError):
            while data := await pipe[0].read(_READ_BYTES):
                _, found, after = data.lower().partition(_ID)
                if found:
                    asked[0] = after.partition(b"\r\n")[0].decode()
                pipe[1].write(data)
        pipe[1].close()

    async def _back(self, pipe: Pipe, asked: list[str]) -> None:
        tail = b""  # an event may come in two pieces; its time is that of the second
        while data := await pipe[0].read(_READ_BYTES):
            now, seen = time.perf_counter(), tail + data
            pipe[1].write(data)
            if count := seen.count(_TOKEN):
                self.token_at[asked[0]] += [now] * count
            tail = seen[-len(_TOKEN) + 1 :]
