"""Why the connector inside vLLM is not attached. Its socket is what does not work, so it is asked through vLLM's own
HTTP API: vLLM's response carries what the connector has to say (`kv_transfer_params`)."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from disaggregated_inference.errors import DisaggError
from disaggregated_inference.timeouts import VllmTimeouts
from disaggregated_inference.vllm_connector.messages import PROTOCOL, QUESTION_PARAM, STATE_PARAM, LinkState
from disaggregated_inference.vllm_node.client import Computed, VllmClient
from disaggregated_inference.vllm_node.connector_server import ConnectorServer
from disaggregated_inference.vllm_node.prefill_requests import prompt_body


class ConnectorWatch:
    """Asks while vLLM serves and is not attached. `model` gives vLLM's name of it, `advice` is what such a vLLM must be
    started with."""

    def __init__(
        self,
        border: ConnectorServer,
        client: VllmClient,
        model: Callable[[], str],
        is_ready: Callable[[], bool],
        advice: str = "",
        timeouts: VllmTimeouts = VllmTimeouts(),
    ) -> None:
        self._border, self._client, self._model = border, client, model
        self._is_ready, self._advice, self._timeouts = is_ready, advice, timeouts
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="vllm-connector", daemon=True).start()

    def close(self) -> None:
        self._closing.set()

    def _watch(self) -> None:
        while not self._closing.wait(self._timeouts.unattached_s):
            if self._is_ready() and self._border.trouble() and (why := self._ask()):
                self._border.explain(why)

    def _ask(self) -> str:
        """Empty: nothing more is known."""
        try:
            answer = asyncio.run(asyncio.wait_for(self._question(), self._timeouts.probe_s))
        except (DisaggError, TimeoutError):
            return ""  # the health check of vLLM tells of that
        return explanation(answer, self._border.path, self._advice)

    async def _question(self) -> Computed:
        return await self._client.compute(prompt_body(self._model(), [0], {QUESTION_PARAM: True}))


def explanation(answer: Computed, path: Path, advice: str) -> str:
    """In words for the user. `path` is the socket where the node listens."""
    if not (told := (answer.kv_transfer_params or {}).get(STATE_PARAM)):
        return f"this vLLM runs without the connector of this version. Start it with: {advice}"
    try:
        state = msgspec.convert(told, LinkState)
    except msgspec.ValidationError:
        state = None
    if not state or state.protocol != PROTOCOL:
        return "the connector inside vLLM is of another version: install the same disaggregated-inference for both"
    if not state.trouble:
        return ""
    if state.socket != str(path):
        where = f"looks for its node at {state.socket}, and this node listens at {path}"
        return f"the connector inside vLLM {where}: start this node with --vllm-socket {state.socket} ({state.trouble})"
    return f"the connector inside vLLM cannot reach this node at {path}: {state.trouble}"
