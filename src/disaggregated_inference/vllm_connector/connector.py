"""The KV connector that vLLM loads (`kv_connector_module_path`). It only sends, and only requests with a ticket.

vLLM makes one object beside its scheduler and one in each worker. All rows are copied out of the pages in the step that
computed them, so vLLM frees a request's blocks at once: a slow or lost receiver costs memory of the node, never of
vLLM.
"""

import os
import re
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from disaggregated_inference.vllm_connector import current_worker, parent_watch
from disaggregated_inference.vllm_connector.connection import NodeLink
from disaggregated_inference.vllm_connector.messages import (
    DECODES_OPTION,
    LOGITS_PROCESSOR,
    PROTOCOL,
    SOCKET_OPTION,
    AttachScheduler,
    AttachWorker,
    SentHeads,
)
from disaggregated_inference.vllm_connector.pages import DTYPES, PagesUnsupported, find_pages
from disaggregated_inference.vllm_connector.region import RegionLayout
from disaggregated_inference.vllm_connector.scheduler import Group, SchedulerHalf, Span, ticket_of
from disaggregated_inference.vllm_connector.worker import Layer, WorkerHalf


@dataclass
class StepSpans(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's half tells the workers about one step."""

    spans: list[Span] = field(default_factory=list)


class DisaggConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        parent_watch.watch()
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._config, self._caches = vllm_config, kv_cache_config
        self._options = vllm_config.kv_transfer_config.kv_connector_extra_config
        if not self._options.get(SOCKET_OPTION):
            raise ValueError(f"kv_connector_extra_config needs {SOCKET_OPTION}: the path of the node's socket")
        _require_supported(vllm_config)
        self._groups = [_group(each.kv_cache_spec) for each in kv_cache_config.kv_cache_groups]
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._written_early: frozenset[str] = frozenset()
        if role == KVConnectorRole.SCHEDULER:
            link = NodeLink(self._options[SOCKET_OPTION], self._attach_scheduler(), lambda accept, memory: None)
            self._scheduler = SchedulerHalf(link, self._groups)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A graph of the whole model calls no `save_kv_layer`; a node that only prefills has no use for it. Where vLLM
        also decodes, `wait_for_save` sends what such a graph computed."""
        return not extra_config.get(DECODES_OPTION)

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        model, parallel = self._config.model_config, self._config.parallel_config
        total, dim = model.get_total_num_kv_heads(), model.get_head_size()
        ranks = parallel.tensor_parallel_size
        held, rank = max(1, total // ranks), get_tensor_model_parallel_rank()
        copies = max(1, ranks // total)  # ranks that hold the same heads; the first of them sends
        names = {name: group for group, each in enumerate(self._caches.kv_cache_groups) for name in each.layer_names}
        first = next(iter(kv_caches.values()))
        isa = self._cpu_isa(first) if first.device.type == "cpu" else None
        layouts = [
            find_pages(each, held, dim, self._groups[names[name]].block, isa) for name, each in kv_caches.items()
        ]
        if any(type(each) is not type(layouts[0]) or each.block != layouts[0].block for each in layouts):
            raise PagesUnsupported("layers with different page layouts")
        found = layouts[0]
        sends = rank % copies == 0
        layers = {
            name: Layer(layer_number(name), names[name], pages, (rank // copies * held, held))
            for name, pages in kv_caches.items()
            if sends
        }
        vocabulary = model.get_vocab_size()
        attach = AttachWorker(
            protocol=PROTOCOL,
            vllm_version=vllm.__version__,
            engine=self._config.kv_transfer_config.engine_id,
            pid=os.getpid(),
            rank=parallel.rank,
            device=str(first.device),
            pages=found.name,
            dtype=DTYPES[first.dtype],  # type: ignore[arg-type]
            kv_heads=total,
            head_dim=dim,
            vocabulary=vocabulary,
            heads=tuple(SentHeads(layer.number, *layer.heads) for layer in layers.values()),
            sends_logits=rank == 0 and get_pp_group().is_last_rank,
        )
        layout = RegionLayout(model.get_total_num_hidden_layers(), total, dim, vocabulary, attach.dtype)
        path = self._options[SOCKET_OPTION]
        self._worker = WorkerHalf(path, attach, layout, layers, self._groups, found, first.device)
        current_worker.worker = self._worker if attach.sends_logits else None
        modules = self._config.compilation_config.static_forward_context
        self._written_early = frozenset(name for name in layers if _is_written_before_attention(modules.get(name)))

    def _cpu_isa(self, pages: torch.Tensor) -> str:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return str(_get_attn_isa(pages.dtype, pages.shape[2], self._config.model_config.get_head_size()))

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker:
            self._worker.begin(connector_metadata.spans)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """It loads nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """It loads nothing. vLLM calls it before the layer's attention: rows that are in the pages by then leave now,
        and cross the network while attention and experts compute."""
        if self._worker and layer_name in self._written_early:
            self._worker.export(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._worker:
            self._worker.export(layer_name)

    def wait_for_save(self) -> None:
        if self._worker:
            self._worker.finish()

    def shutdown(self) -> None:
        if half := self._worker or self._scheduler:
            half.close()

    # The scheduler's half.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """It loads nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> StepSpans:
        assert self._scheduler
        return StepSpans(self._scheduler.spans(scheduler_output))

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler
        self._scheduler.end(request.request_id, ticket_of(request.sampling_params), request.status.name)
        return False, self._scheduler.answer(request.sampling_params)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)

    def _attach_scheduler(self) -> AttachScheduler:
        config = self._config
        return AttachScheduler(
            protocol=PROTOCOL,
            vllm_version=vllm.__version__,
            engine=config.kv_transfer_config.engine_id,
            pid=os.getpid(),
            workers=config.parallel_config.world_size,
            max_tokens=config.model_config.max_model_len,
            max_step_tokens=config.scheduler_config.max_num_batched_tokens,
            max_sequences=config.scheduler_config.max_num_seqs,
            block_tokens=self._groups[0].block,
            blocks=self._caches.num_blocks,
            prefix_caching=bool(config.cache_config.enable_prefix_caching),
            windows=tuple(group.window for group in self._groups),
        )


def _group(spec: Any) -> Group:
    """Only plain attention: a layer keeps all tokens, or the last ones. With the hybrid manager off, vLLM keeps all
    tokens of sliding layers too."""
    kind = type(spec).__name__
    if kind not in ("FullAttentionSpec", "SlidingWindowSpec"):
        raise PagesUnsupported(f"{kind}: only full and sliding-window attention can be handed over")
    return Group(spec.block_size, int(spec.sliding_window) if kind == "SlidingWindowSpec" else 0)


def _require_supported(config: Any) -> None:
    parallel = config.parallel_config
    for option in ("decode_context_parallel_size", "prefill_context_parallel_size", "data_parallel_size"):
        if getattr(parallel, option, 1) > 1:
            raise ValueError(f"the connector does not support {option} {getattr(parallel, option)}: use 1")
    if config.speculative_config is not None:
        raise ValueError("the connector does not support speculative decoding: vLLM then calls no logits processor")
    if not any(_is_first_token(each) for each in config.model_config.logits_processors or ()):
        raise ValueError(f"the connector needs vLLM's argument --logits-processors {LOGITS_PROCESSOR}")


def _is_first_token(processor: str | type) -> bool:
    """vLLM takes the name of a class, or the class."""
    return (processor if isinstance(processor, str) else processor.__name__).endswith("FirstToken")


def _is_written_before_attention(module: Any) -> bool:
    """Whether a step of its own writes a layer's rows into the pages; else its attention does."""
    backend = getattr(module, "attn_backend", None)
    return getattr(backend, "forward_includes_kv_cache_update", True) is False


def layer_number(name: str) -> int:
    found = re.findall(r"(?:^|\.)layers\.(\d+)(?:\.|$)", name)
    if len(found) != 1:
        raise PagesUnsupported(f"the layer {name} has no number that is known here")
    return int(found[0])
