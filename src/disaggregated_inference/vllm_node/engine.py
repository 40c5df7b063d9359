"""vLLM as an engine: what a node knows of it without computing. It keeps the part of the contract that admission,
status and metrics need; sequences are memory for exported KV. vLLM computes by its own scheduler, see `prefill`."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any

import msgspec

from disaggregated_inference.engines import Engine, Logits, Scoring, Sequence, Tokens
from disaggregated_inference.errors import NotOffered
from disaggregated_inference.kv import KVDType, KVSlice
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.vllm_connector.region import RegionLayout
from disaggregated_inference.vllm_node.staging import Staging

_NOT_HERE = "vLLM computes by its own scheduler: this engine takes no single chunks, steps or slices"


class VllmEngine(Engine):
    """`max_tokens` of prompt and completion together, as vLLM was started with."""

    name = "vllm"
    preallocates_kv = True
    warm_lengths = ()

    def __init__(self, model: ModelFiles, dtype: KVDType, staging: Staging, max_tokens: int) -> None:
        window = min(model.spec.context_window, max_tokens - 1)  # it always writes one token
        super().__init__(msgspec.structs.replace(model.spec, context_window=window), model.fingerprint, dtype)
        layout = model.spec.layout
        self.region = RegionLayout(
            len(layout.layers), layout.kv_heads, layout.head_dim, model.spec.vocabulary, str(dtype)
        )
        self.staging, self.kv_limit_bytes = staging, staging.size_bytes
        self.chunk_tokens = window  # vLLM chooses its chunks; a cached prefix comes in one piece

    def kv_cost(self, capacity: int) -> int:
        return self.region.ticket_bytes(capacity)

    def measure_kv(self) -> int:
        return self.staging.used_bytes

    def allocate(self, capacity: int) -> int:
        return self.staging.take(self.region.ticket_bytes(capacity))

    def release(self, sequence: Sequence) -> None:
        self.staging.give_back(sequence.state)

    def release_model(self) -> None:
        raise NotOffered("vLLM keeps its model in memory: stop this node to free it")

    def run_prefill(self, sequence: Sequence, tokens: Items[int], emit: Any, scoring: Scoring | None) -> Logits:
        raise NotOffered(_NOT_HERE)

    def write_slice(self, sequence: Sequence, piece: KVSlice) -> None:
        raise NotOffered(_NOT_HERE)

    def commit_rows(self, sequence: Sequence, length: int) -> None:
        raise NotOffered(_NOT_HERE)

    def discard_rows(self, sequence: Sequence) -> None:
        raise NotOffered(_NOT_HERE)

    def read_slices(self, sequence: Sequence, start: int) -> Iterator[KVSlice]:
        raise NotOffered(_NOT_HERE)

    def run_step(self, sequences: Items[Sequence], tokens: Items[int] | Tokens) -> Logits:
        raise NotOffered(_NOT_HERE)
