"""A logits processor that changes nothing: it copies the logits after a prompt's last token to the node, so that the
decode node samples the first token and no model computes any prompt token twice. vLLM has two model runners with two
interfaces; this class keeps both."""

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from disaggregated_inference.vllm_connector import current_worker, parent_watch
from disaggregated_inference.vllm_connector.scheduler import ticket_of

_Bases: tuple[type, ...]
try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor

    _Bases = (LogitsProcessor, SlotProcessor)
except ImportError:  # older than 0.32: with a logits processor, vLLM takes its first model runner
    _Bases = (LogitsProcessor,)


class FirstToken(*_Bases):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, *_: Any) -> None:
        parent_watch.watch()  # before the weights are loaded; the connector comes after them
        self._tickets: dict[int, str] = {}  # by row of the batch, or by request slot

    def is_argmax_invariant(self) -> bool:
        """It is. But vLLM skips such processors where all requests are greedy."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Rows of the batch have moved."""
        if not batch_update:
            return
        for row in batch_update.removed:
            self._tickets.pop(row, None)
        for row, params, *_ in batch_update.added:
            self._put(row, ticket_of(params))
        for source, target, direction in batch_update.moved:
            moved, replaced = self._tickets.pop(source, ""), self._tickets.pop(target, "")
            self._put(target, moved)
            if direction is MoveDirectionality.SWAP:
                self._put(source, replaced)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """A request got a slot."""
        self._put(req_idx, ticket_of(sampling_params))
        return req_idx in self._tickets

    def apply(self, logits: torch.Tensor, context: Any = None) -> torch.Tensor:
        worker = current_worker.worker
        if worker and worker.ending:
            slots = context.idx_mapping_np.tolist() if context else range(len(logits))
            for row, slot in enumerate(slots):
                if (ticket := self._tickets.get(slot, "")) in worker.ending:
                    worker.export_logits(ticket, logits[row])
        return logits

    def _put(self, row: int, ticket: str) -> None:
        if ticket:
            self._tickets[row] = ticket
        else:
            self._tickets.pop(row, None)
