"""From an attached vLLM to the prefill role of a node."""

import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial

from disaggregated_inference.kv_transfer import Address
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node import KVMemory, PrefillJob, PrefillNode, Scheduler, Trust
from disaggregated_inference.timeouts import VllmBorderTimeouts
from disaggregated_inference.vllm_node.connector_server import ConnectorServer
from disaggregated_inference.vllm_node.engine import VllmEngine
from disaggregated_inference.vllm_node.prefill import VllmPrefill
from disaggregated_inference.vllm_node.prefill_requests import Completions
from disaggregated_inference.vllm_node.staging import Staging

log = logging.getLogger(__name__)

_MEASURED_TOKENS = (64, 512)


class VllmPrefillNode(PrefillNode):
    """The prefill role over a vLLM. A vLLM that comes back after it was gone counts as a restarted node: decode nodes
    check it again."""

    def __init__(
        self,
        border: ConnectorServer,
        completions: Completions,
        kv_memory: KVMemory,
        kv_addresses: Sequence[Address],
        lease_s: float,
        trust: Trust,
        timeouts: VllmBorderTimeouts,
    ) -> None:
        self.border, self._completions = border, completions
        prefill = partial(VllmPrefill, border, completions, timeouts)
        super().__init__(kv_memory, kv_addresses, lease_s=lease_s, trust=trust, chunked_prefill=prefill)
        assert isinstance(self.chunked_prefill, VllmPrefill)
        self.chunked_prefill.on_lost = self._renew_epoch

    @property
    def stalled_s(self) -> float:
        """How long vLLM has made no progress with prompts that it has."""
        assert isinstance(self.chunked_prefill, VllmPrefill)
        return self.chunked_prefill.stalled_s

    def trouble(self) -> str:
        """Why no prompt can be computed now; empty when all is well."""
        return self.border.trouble()

    def measure(self) -> None:
        """So that the router plans the first requests with real rates. Each length runs twice, since the first use of a
        shape is slow, and with other tokens, since vLLM keeps prefixes."""
        for turn, length in enumerate(length for length in _MEASURED_TOKENS for _ in range(2)):
            if length <= self.engine.spec.context_window:
                job = PrefillJob([(turn + 7 * place) % self.engine.spec.vocabulary for place in range(length)])
                self.chunked_prefill.compute_canary(job).exception()
                self.scheduler.call(partial(self.chunked_prefill.cancel, job))

    def _renew_epoch(self) -> None:
        self.epoch = self.kv_server.epoch = secrets.token_hex(8)
        self.kv_server.canary = None

    def close(self, drain_s: float = 0.0) -> None:
        super().close(drain_s)
        self._completions.close()
        self.border.close()


def open_vllm_prefill(
    model: ModelFiles,
    border: ConnectorServer,
    staging: Staging,
    completions: Completions,
    *,
    kv_addresses: Sequence[Address] = (("127.0.0.1", 0),),
    queue: int = 256,
    lease_s: float = 60.0,
    attach_s: float = 600.0,
    stopped: Callable[[], str] = lambda: "",
    begin: Callable[[str], None] = lambda step: None,
    trust: Trust = Trust(),
    timeouts: VllmBorderTimeouts = VllmBorderTimeouts(),
) -> VllmPrefillNode:
    """Waits until vLLM has attached. `stopped` may say why it will never attach. The node closes `completions`."""
    engine = border.wait_attached(attach_s, stopped, begin)
    scheduler = Scheduler(lambda: VllmEngine(model, engine.dtype, staging, engine.scheduler.max_tokens))
    try:
        kv_memory = KVMemory(scheduler, prefix_bytes=0, max_waiting=queue)
        node = VllmPrefillNode(border, completions, kv_memory, kv_addresses, lease_s, trust, timeouts)
    except BaseException:
        scheduler.stop()
        raise
    node.compute_canary()
    node.measure()
    return node
