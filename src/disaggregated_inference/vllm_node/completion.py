"""The requests that make vLLM compute prompts: one token, greedy, with the ticket in `kv_transfer_params`. The token
itself is not used: the decode node samples from the logits that the connector exports."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import aiohttp
import msgspec

from disaggregated_inference.errors import (
    BadRequest,
    DisaggError,
    EngineFailed,
    EngineUnavailable,
    KVMemoryFull,
)
from disaggregated_inference.timeouts import VllmBorderTimeouts
from disaggregated_inference.vllm_connector.messages import TICKET_PARAM

Address = tuple[str, str]  # URL and API key; empty: none


class Completions:
    """One event loop on a thread of its own. `address` is asked for every request: a restarted vLLM has another port.
    `model` is vLLM's name of it."""

    def __init__(
        self, address: Callable[[], Address], model: str, timeouts: VllmBorderTimeouts = VllmBorderTimeouts()
    ) -> None:
        self._address, self.model, self._timeouts = address, model, timeouts
        self._loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-http", daemon=True)
        self._thread.start()

    def start(self, ticket: str, tokens: Sequence[int], salt: str = "") -> "Future[None]":
        """Done when vLLM has answered. Cancelling the future closes the connection, and vLLM ends the request."""
        return asyncio.run_coroutine_threadsafe(self._post(self.body(ticket, tokens, salt)), self._loop)

    def body(self, ticket: str, tokens: Sequence[int], salt: str = "") -> dict[str, Any]:
        """`salt` keeps callers' prefixes apart in vLLM's prefix cache. Without a ticket, vLLM exports nothing."""
        extra: dict[str, Any] = {"kv_transfer_params": {TICKET_PARAM: ticket}} if ticket else {}
        extra |= {"cache_salt": salt} if salt else {}
        return {
            "model": self.model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "detokenize": False,
        } | extra

    async def _post(self, body: dict[str, Any]) -> None:
        url, key = self._address()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            async with self._open_session().post(
                url.rstrip("/") + "/v1/completions", data=msgspec.json.encode(body), headers=headers
            ) as response:
                content = await response.read()
        except aiohttp.ClientConnectorError as error:
            raise EngineUnavailable(f"vLLM does not answer at {url}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineFailed(f"vLLM closed the connection without an answer: {error}") from error
        if response.status != 200:
            raise _refusal(response.status, content)

    def _open_session(self) -> aiohttp.ClientSession:
        """On the loop's thread. No limit of connections: admission limits the prompts."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.dial_s)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self._session

    def close(self) -> None:
        async def end() -> None:
            if self._session:
                await self._session.close()
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join()
        self._loop.close()


def _refusal(status: int, body: bytes) -> DisaggError:
    reason = _reason_in(body)
    if status in (400, 422):
        return BadRequest(f"vLLM refuses the prompt: {reason}")
    if "memory" in reason.lower():
        return KVMemoryFull(f"vLLM has no memory for the prompt: {reason}")
    return EngineFailed(f"vLLM failed: {reason} (HTTP {status})")


def _reason_in(body: bytes) -> str:
    """vLLM sends `{"error": {"message": ...}}`."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:1000]
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace") or "no reason given"
