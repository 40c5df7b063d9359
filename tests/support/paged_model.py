"""What vLLM does with pages, without vLLM: a scheduler that cuts prompts into steps, hands out blocks in any order,
frees blocks outside the window, preempts and resumes; and pages that it fills with known rows. Freed blocks are
overwritten at once, so that a connector that reads too late gets wrong rows."""

import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from disaggregated_inference.models import ModelSpec, spec_from_config
from disaggregated_inference.vllm_connector.connection import NodeLink
from disaggregated_inference.vllm_connector.messages import (
    PROTOCOL,
    TICKET_PARAM,
    AttachScheduler,
    AttachWorker,
    SentHeads,
)
from disaggregated_inference.vllm_connector.pages import FusedPages, Pages, RowPages, SplitPages
from disaggregated_inference.vllm_connector.region import RegionLayout
from disaggregated_inference.vllm_connector.scheduler import Group, SchedulerHalf
from disaggregated_inference.vllm_connector.worker import Layer, WorkerHalf

LAYERS, HEADS, DIM, VOCABULARY, WINDOW, BLOCK, BLOCKS = 4, 2, 8, 16, 5, 4, 200
SLIDING = 0  # the group of layers 0 and 2; 1 and 3 keep all tokens
LAYOUTS: dict[str, Any] = {"rows": RowPages, "heads first": SplitPages, "fused": FusedPages}  # on CUDA


def spec() -> ModelSpec:
    from tests.support.tiny_models import config_of

    shape = {"head_dim": DIM, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS}
    return spec_from_config(config_of("gpt_oss", **shape).to_dict() | {"sliding_window": WINDOW})


def empty_pages(shape: str) -> torch.Tensor:
    if shape == "rows":
        return torch.zeros(BLOCKS, 2, BLOCK, HEADS, DIM)
    if shape == "heads first":
        return torch.zeros(BLOCKS, 2, HEADS, BLOCK, DIM).transpose(2, 3)
    return torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM).transpose(1, 2)


def write_row(pages: torch.Tensor, slot: int, row: torch.Tensor) -> None:
    """Keys and values `[2, heads, dim]` of one token."""
    block, place = divmod(slot, BLOCK)
    if pages.dim() == 5:
        pages[block, :, place] = row
    else:
        pages[block, :, place] = row.permute(1, 0, 2).flatten(1)


@dataclass
class Request:
    id: str
    ticket: str
    rows: torch.Tensor  # the truth: [layers, 2, tokens, heads, dim]
    tables: list[list[int]] = field(default_factory=lambda: [[], []])
    computed: int = 0
    known: bool = False  # to the workers

    @property
    def tokens(self) -> int:
        return self.rows.shape[2]


@dataclass
class Stage:
    """One worker: its layers, and its heads as first and count. `sends`: others have the same heads."""

    layers: Sequence[int] = range(LAYERS)
    heads: tuple[int, int] = (0, HEADS)
    sends: bool = True


class PagedModel:
    """`stages` are the workers. All of them have pages with all heads here; each exports only its own."""

    def __init__(self, border: Path, shape: str = "rows", stages: Sequence[Stage] = (Stage(),), seed: int = 0) -> None:
        self._random = random.Random(seed)
        pairs = [empty_pages(shape), empty_pages(shape)]  # a sliding and a full layer share a tensor
        self.pages = [pairs[layer // 2] for layer in range(LAYERS)]
        self.free = list(range(1, BLOCKS))
        self._random.shuffle(self.free)
        groups = [Group(BLOCK, WINDOW), Group(BLOCK, 0)]
        pages = LAYOUTS[shape](BLOCK, torch.device("cpu"))
        self.workers = [
            self._worker(border, number, stage, groups, pages, len(stages)) for number, stage in enumerate(stages)
        ]
        self.attach = AttachScheduler(
            protocol=PROTOCOL,
            vllm_version="test",
            engine="one",
            pid=1,
            workers=len(stages),
            max_tokens=4096,
            max_step_tokens=64,
            max_sequences=8,
            block_tokens=BLOCK,
            blocks=BLOCKS,
            prefix_caching=True,
            windows=(WINDOW, 0),
        )
        self.scheduler = SchedulerHalf(NodeLink(str(border), self.attach, lambda accept, memory: None), groups)

    def _worker(
        self, border: Path, rank: int, stage: Stage, groups: Sequence[Group], layout: Pages, count: int
    ) -> WorkerHalf:
        first, heads = stage.heads
        own = [pages if heads == HEADS else pages[..., first : first + heads, :] for pages in self.pages]
        numbers = stage.layers if stage.sends else ()
        layers = {f"layers.{number}": Layer(number, number % 2, own[number], stage.heads) for number in numbers}
        attach = AttachWorker(
            protocol=PROTOCOL,
            vllm_version="test",
            engine="one",
            pid=1,
            rank=rank,
            device="cpu",
            pages=layout.name,
            dtype="float32",
            kv_heads=HEADS,
            head_dim=DIM,
            vocabulary=VOCABULARY,
            heads=tuple(SentHeads(layer.number, *layer.heads) for layer in layers.values()),
            sends_logits=rank == count - 1,
        )
        region = RegionLayout(LAYERS, HEADS, DIM, VOCABULARY, "float32")
        return WorkerHalf(str(border), attach, region, layers, groups, layout, torch.device("cpu"))

    def request(self, ticket: str, tokens: int) -> Request:
        rows = torch.randn(LAYERS, 2, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(tokens))
        return Request(f"request-{ticket}", ticket, rows)

    def step(self, *parts: tuple[Request, int], sees: Callable[[int], bool] = lambda layer: True) -> None:
        """Compute so many tokens of each request. `sees`: whether vLLM calls the connector after this layer."""
        output = self._output(parts)
        spans = pickle.loads(pickle.dumps(self.scheduler.spans(output)))  # as to another process
        for worker in self.workers:
            worker.begin(spans)
        for layer in range(LAYERS):
            for request, count in parts:
                self._compute(request, layer, count)
            for worker in self.workers:
                if sees(layer):
                    worker.export(f"layers.{layer}")
        for worker in self.workers:
            worker.finish()
        for request, count in parts:
            request.computed += count
            self._free_outside_the_window(request)
        for span in spans:
            if span.last:
                self.workers[-1].export_logits(span.ticket, torch.arange(VOCABULARY, dtype=torch.float32))

    def preempt(self, request: Request) -> None:
        for table in request.tables:
            self._free([block for block in table if block])
        request.tables, request.computed = [[], []], 0

    def end(self, request: Request) -> None:
        self.scheduler.end(request.id, request.ticket, "FINISHED_LENGTH_CAPPED")
        self.preempt(request)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def _output(self, parts: Sequence[tuple[Request, int]]) -> Any:
        new, cached = [], SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        for request, count in parts:
            resumed, added = request.known and not request.tables[0], self._allocate(request, count)
            if request.known:
                cached.req_ids.append(request.id)
                cached.new_block_ids.append(added)
                cached.num_computed_tokens.append(request.computed)
                cached.resumed_req_ids |= {request.id} if resumed else set()
            else:
                params = SimpleNamespace(extra_args={"kv_transfer_params": {TICKET_PARAM: request.ticket}})
                new.append(
                    SimpleNamespace(
                        req_id=request.id,
                        prompt_token_ids=[0] * request.tokens,
                        sampling_params=params,
                        block_ids=request.tables,
                        num_computed_tokens=request.computed,
                    )
                )
                request.known = True
        counts = {request.id: count for request, count in parts}
        return SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens=counts)

    def hit(self, request: Request, tokens: int) -> None:
        """The first tokens are in the prefix cache: of the sliding layers, the window's."""
        self._allocate(request, tokens)
        for layer in range(LAYERS):
            self._compute(request, layer, tokens)
        request.computed = tokens
        self._free_outside_the_window(request)

    def _allocate(self, request: Request, count: int) -> tuple[list[int], ...]:
        added: tuple[list[int], ...] = ([], [])
        for table, new in zip(request.tables, added, strict=True):
            while len(table) * BLOCK < request.computed + count:
                table.append(self.free.pop(self._random.randrange(len(self.free))))
                new.append(table[-1])
        return added

    def _compute(self, request: Request, layer: int, count: int) -> None:
        table = request.tables[layer % 2]
        for position in range(request.computed, request.computed + count):
            slot = table[position // BLOCK] * BLOCK + position % BLOCK
            write_row(self.pages[layer], slot, request.rows[layer, :, position])

    def _free_outside_the_window(self, request: Request) -> None:
        table = request.tables[SLIDING]
        for number in range(max(0, request.computed - WINDOW + 1) // BLOCK):
            if table[number]:
                self._free([table[number]])
                table[number] = 0

    def _free(self, blocks: list[int]) -> None:
        for pages in self.pages:
            pages[blocks] = float("nan")
        self.free += blocks
