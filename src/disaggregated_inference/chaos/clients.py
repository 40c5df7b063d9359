"""Clients: the orchestrator in this process, and OpenAI's API of the gateway."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import aiohttp
import msgspec

from disaggregated_inference.api import ClusterStatus
from disaggregated_inference.chaos.answers import ChaosAnswer
from disaggregated_inference.chaos.workload import ChaosRequest
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.orchestrator import Delta, DisaggregatedInference

_JSON = {"Content-Type": "application/json"}
_LINE_BYTES = 1 << 22  # the longest event

Leaves = Callable[[ChaosAnswer], bool]  # whether the client leaves now


class RequestFailed(DisaggError):
    """An error that a client got from the gateway."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self._code = code

    @property
    def code(self) -> str:
        return self._code


class ChaosClients:
    """`ask` fills the answer while it comes, so that a caller that cancels it sees what had come."""

    def __init__(self, core: DisaggregatedInference, gateway_url: str, timeout_s: float) -> None:
        self.core, self._url, self._timeout_s = core, gateway_url, timeout_s
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(timeout_s + 60), read_bufsize=_LINE_BYTES
        )

    async def close(self) -> None:
        await self._session.close()

    async def gateway_nodes(self) -> dict[str, bool]:
        """Whether the gateway may use each node."""
        async with self._session.get(f"{self._url}/cluster") as response:
            status = msgspec.json.decode(await response.read(), type=ClusterStatus)
        return {node.name: node.usable for node in status.nodes}

    async def gateway_metrics(self) -> str:
        async with self._session.get(f"{self._url}/metrics") as response:
            return await response.text()

    async def ask(self, request: ChaosRequest, request_id: str, answer: ChaosAnswer, leaves: Leaves) -> None:
        """Returns early if the client left."""
        if request.way == "library":
            return await self._ask_library(request, request_id, answer, leaves)
        return await self._ask_gateway(request, request_id, answer, leaves)

    async def _ask_library(self, request: ChaosRequest, name: str, answer: ChaosAnswer, leaves: Leaves) -> None:
        options: Any = request.options | {"request_id": name, "timeout": self._timeout_s}
        if not request.stream:
            whole = await self.core.generate(request.prompt, **options)
            return _take_whole(answer, whole)
        async with aclosing(self.core.stream(request.prompt, **options)) as deltas:
            async for delta in deltas:
                _take_delta(answer, delta)
                if leaves(answer):
                    return None
        return None

    async def _ask_gateway(self, request: ChaosRequest, name: str, answer: ChaosAnswer, leaves: Leaves) -> None:
        path, body = _openai(request)
        headers = _JSON | {"X-Request-Id": name}
        async with self._session.post(self._url + path, data=msgspec.json.encode(body), headers=headers) as response:
            if response.status != 200:
                raise _failure(await response.read())
            if not request.stream:
                return _take_body(answer, await response.json())
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    return None
                if line.startswith(b"data: "):
                    _take_event(answer, msgspec.json.decode(line[6:]))
                    if leaves(answer):
                        return None
        raise RequestFailed("stream_ended", "the stream ended without [DONE]")


async def wait_for(condition: Callable[[], Awaitable[bool]], seconds: float, poll_s: float = 0.2) -> bool:
    """Whether the condition became true in time."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not await condition():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(poll_s)
    return True


def _openai(request: ChaosRequest) -> tuple[str, dict[str, Any]]:
    body = request.options | {"stream": request.stream, "include_metrics": True}
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    if request.way == "completions":
        return "/v1/completions", body | {"prompt": request.prompt}
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": request.prompt}]}


def _take_whole(answer: ChaosAnswer, whole: dict[str, Any]) -> None:
    for found in whole.get("choices") or [whole | {"text": whole["response"], "index": 0}]:
        choice = answer.choice(found["index"])
        choice.text, choice.tokens, choice.finish_reason = found["text"], found["tokens"], found["finish_reason"]
        choice.logprobs = [each["logprob"] for each in found.get("logprobs", [])]
    _take_record(answer, whole)


def _take_delta(answer: ChaosAnswer, delta: Delta) -> None:
    if delta.metrics is not None:
        return _take_record(answer, delta.metrics)
    choice = answer.choice(delta.choice)
    choice.text += delta.text
    if delta.token is not None:
        choice.tokens.append(delta.token)
    if delta.logprob is not None:
        choice.logprobs.append(delta.logprob)
    choice.finish_reason = delta.finish_reason or choice.finish_reason
    return None


def _take_record(answer: ChaosAnswer, record: dict[str, Any]) -> None:
    answer.prompt_tokens, answer.completion_tokens = record["prompt_tokens"], record["completion_tokens"]
    answer.failovers = record["failovers"]


def _take_body(answer: ChaosAnswer, body: dict[str, Any]) -> None:
    for found in body["choices"]:
        choice = answer.choice(found["index"])
        choice.text = found["message"]["content"] if "message" in found else found["text"]
        choice.finish_reason = found["finish_reason"]
        choice.logprobs = _logprobs(found.get("logprobs"))
    _take_usage(answer, body)


def _take_event(answer: ChaosAnswer, event: dict[str, Any]) -> None:
    if "error" in event:
        raise _failed(event["error"])
    for found in event["choices"]:
        choice = answer.choice(found["index"])
        choice.text += (found["delta"].get("content") if "delta" in found else found["text"]) or ""
        choice.finish_reason = found["finish_reason"] or choice.finish_reason
        choice.logprobs += _logprobs(found.get("logprobs"))
    if event.get("usage"):
        _take_usage(answer, event)


def _take_usage(answer: ChaosAnswer, body: dict[str, Any]) -> None:
    answer.prompt_tokens, answer.completion_tokens = (
        body["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    )
    answer.failovers = body["disagg"]["failovers"]


def _logprobs(found: dict[str, Any] | None) -> list[float]:
    if not found:
        return []
    if "content" in found:
        return [each["logprob"] for each in found["content"]]
    return list(found["token_logprobs"])


def _failure(body: bytes) -> RequestFailed:
    try:
        return _failed(msgspec.json.decode(body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return RequestFailed("not_json", body[:200].decode("utf-8", "replace"))


def _failed(error: dict[str, Any]) -> RequestFailed:
    return RequestFailed(str(error.get("code") or error.get("type") or "error"), str(error.get("message")))
