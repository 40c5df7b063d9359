"""vLLM in the place of an engine that computes prompts, so that the contract suite takes it: what it hands over are the
slices that the connector exported and that the node would send."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from disaggregated_inference.kv import KVSlice
from tests.support.engines import LoadTiny
from tests.support.handoff import HostLogits
from tests.support.vllm_nodes import VllmHome
from tests.support.vllm_server import BUSY_S


@dataclass(slots=True)
class _Reading:
    tokens: list[int] = field(default_factory=list)


class VllmReader:
    """`open`, `prefill` and `close` of an engine. Every call of `prefill` is a request of the whole prompt so far, of
    which vLLM has the beginning in its prefix cache; slices begin where the last call ended."""

    def __init__(self, home: VllmHome) -> None:
        self._node = home.node

    def open(self, capacity: int) -> _Reading:
        return _Reading()

    def prefill(
        self, sequence: _Reading, tokens: list[int], emit: Callable[[KVSlice], object] = lambda piece: None
    ) -> HostLogits:
        held, node = len(sequence.tokens), self._node
        sequence.tokens += tokens
        context, computed = node.submit(sequence.tokens, timeout_s=BUSY_S)
        try:
            outbox = node.jobs[context.ticket].outbox
            assert computed.result(BUSY_S).prompt_tokens == len(sequence.tokens)
            for piece in outbox.slices():
                if piece.stop > held:
                    emit(piece.part(max(0, held - piece.start), piece.tokens))
            logits = outbox.next(0, want_logits=True)
            assert isinstance(logits, np.ndarray)
            return HostLogits(logits.copy())
        finally:
            node.tickets.cancel(context.ticket)

    def close(self, sequence: _Reading) -> None:
        """vLLM holds nothing for it."""


def with_vllm(load: LoadTiny, reader: Callable[[str], VllmReader]) -> LoadTiny:
    """The engines of a contract suite, and `vllm` as one that computes prompts."""

    def find(name: str, architecture: str) -> Any:
        return reader(architecture) if name == "vllm" else load(name, architecture)

    return find
