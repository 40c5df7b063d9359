"""The minimal OpenAI endpoint in front of one node: a starlette app that rewrites the node's events.

No plan, failover, health checks, record, keys, keep-alive or tokenizer: the comparison shows the cost of all these.
Like the gateway, it rewrites and sends everything that has arrived in one go.
`python -m disaggregated_inference.bench.relay NODE_URL` prints its port. With a second URL, of a prefill node, it hands
each prompt over, as the gateway does: two POSTs instead of one.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from disaggregated_inference.api import StartLine

_DONE = b"data: [DONE]\n\n"
_JSON = {"Content-Type": "application/json"}
_SAMPLING = ("max_tokens", "ignore_eos", "temperature")


def relay_app(node_url: str, prefill_url: str = "") -> Starlette:
    @asynccontextmanager
    async def session(app: Starlette) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as app.state.session:
            yield

    async def chat(request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        session = request.app.state.session
        relayed = _relayed(session, node_url, prefill_url, body)
        return StreamingResponse(relayed, media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])], lifespan=session)


async def _relayed(
    session: aiohttp.ClientSession, node_url: str, prefill_url: str, body: dict[str, Any]
) -> AsyncIterator[bytes]:
    name = body["messages"][-1]["content"].partition(":")[0]  # the one field that every proxy passes on unchanged
    headers, head = _JSON | {"X-Request-Id": name}, _chunk_head(name, body["model"])
    path, request = "/generate", {name: body[name] for name in _SAMPLING if name in body} | {"stream": True}
    if prefill_url:
        path, request["context"] = "/decode", await _prefill(session, prefill_url, body["messages"], headers)
    else:
        request["messages"] = body["messages"]
    content = msgspec.json.encode(request)
    async with session.post(node_url + path, data=content, headers=headers) as response:
        response.raise_for_status()
        async for lines in event_lines(response):
            yield b"".join(_chunk(head, line) for line in lines)


async def _prefill(
    session: aiohttp.ClientSession, url: str, messages: list[dict[str, Any]], headers: dict[str, str]
) -> str:
    content = msgspec.json.encode({"messages": messages, "wait": False})
    async with session.post(url + "/prefill", data=content, headers=headers) as response:
        response.raise_for_status()
        context: str = msgspec.json.decode(await response.read())["context"]
        return context


async def event_lines(response: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
    """All events that have arrived in one go, without comments."""
    rest = b""
    while data := await response.content.readany():
        *lines, rest = (rest + data).split(b"\n\n")
        if events := [line for line in lines if line.startswith(b"data: ")]:
            yield events


def _chunk_head(name: str, model: str) -> bytes:
    head = {"id": f"chatcmpl-{name}", "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
    return b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['


def _chunk(head: bytes, line: bytes) -> bytes:
    event = msgspec.json.decode(line[6:])
    if "token" not in event:
        return _DONE if "done" in event else line + b"\n\n"
    delta = {"role": "assistant", "content": event["text"]}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": event.get("finish_reason")}
    return head + msgspec.json.encode(choice) + b"]}\n\n"


class _RelayServer(uvicorn.Server):
    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        port = self.servers[0].sockets[0].getsockname()[1]
        sys.stdout.write(msgspec.json.encode(StartLine(event="ready", port=port)).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    settings = uvicorn.Config(relay_app(*sys.argv[1:]), port=0, log_level="warning", access_log=False)
    asyncio.run(_RelayServer(settings).serve())
