"""The requests that make vLLM compute prompts: one token, greedy, with the ticket in `kv_transfer_params`. The token
itself is not used: the decode node samples from the logits that the connector exports."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from disaggregated_inference.timeouts import VllmTimeouts
from disaggregated_inference.vllm_connector.messages import TICKET_PARAM
from disaggregated_inference.vllm_node.client import Computed, VllmAddress, VllmClient


class Completions:
    """One event loop on a thread of its own, and one client that keeps its connections. `address` and `model`, vLLM's
    name of it, are asked for every request: a restarted vLLM may have others."""

    def __init__(
        self, address: Callable[[], VllmAddress], model: Callable[[], str], timeouts: VllmTimeouts = VllmTimeouts()
    ) -> None:
        self.model = model
        self._client = VllmClient(address, timeouts, keep=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-http", daemon=True)
        self._thread.start()

    def start(self, ticket: str, tokens: Sequence[int], salt: str = "") -> "Future[Computed]":
        """Done when vLLM has answered. Cancelling the future closes the connection, and vLLM ends the request. `salt`
        keeps callers' prefixes apart in vLLM's prefix cache. Without a ticket, vLLM exports nothing."""
        body = prompt_body(self.model(), tokens, {TICKET_PARAM: ticket} if ticket else {})
        body |= {"cache_salt": salt} if salt else {}
        return asyncio.run_coroutine_threadsafe(self._client.compute(body), self._loop)

    def close(self) -> None:
        async def end() -> None:
            await self._client.close()
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join()
        self._loop.close()


def prompt_body(model: str, tokens: Sequence[int], for_connector: dict[str, Any]) -> dict[str, Any]:
    """Of a request that computes a prompt."""
    body = {
        "model": model,
        "prompt": list(tokens),
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
    }
    return body | ({"kv_transfer_params": for_connector} if for_connector else {})
