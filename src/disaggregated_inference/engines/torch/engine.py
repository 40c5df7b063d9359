"""The torch engine: transformers models on CUDA or CPU, with their KV in an arena."""

import gc
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from disaggregated_inference.engines.base import Emit, Engine, Logits, Tokens, token_list
from disaggregated_inference.engines.memory import available_bytes
from disaggregated_inference.engines.scoring import Scoring
from disaggregated_inference.engines.sequence import Sequence
from disaggregated_inference.engines.torch import fused_kernels
from disaggregated_inference.engines.torch.arena import TORCH_DTYPES, Starts, TorchArena, host_array, host_tensor
from disaggregated_inference.engines.torch.attention import has_flash
from disaggregated_inference.engines.torch.cuda_graphs import ChunkGraphs, DecodeGraphs
from disaggregated_inference.engines.torch.forward_pass import (
    ATTENTION_NAME,
    ChunkPass,
    DecodePass,
    HostCopies,
    PrefillPass,
)
from disaggregated_inference.engines.torch.graph_inputs import ChunkTable, Places
from disaggregated_inference.errors import EngineMismatch, EngineUnavailable, ModelDamaged
from disaggregated_inference.kv import Fingerprint, KVDType, KVSlice, as_dtype
from disaggregated_inference.models import ModelFiles, ModelSpec

_CPU_KV_BYTES = 4 << 30  # address space, not memory: pages are touched as sequences fill them
_CUDA_KV_SHARE = 0.5


class TorchLogits:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def greedy(self) -> Tensor:
        return self.tensor.argmax(dim=-1)

    def numpy(self, rows: Items[int] | None = None) -> NDArray[np.float32]:
        chosen = self.tensor if rows is None else self.tensor[torch.tensor(rows, device=self.tensor.device).long()]
        array: NDArray[np.float32] = chosen.float().cpu().numpy()
        return array


@dataclass(slots=True)
class TorchState:
    """A sequence's rows. Slices of sliding layers go into a shadow of the ring until they are committed: in the ring
    they would overwrite rows that a rollback needs."""

    starts: Starts
    shadows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def shadow(self, arena: TorchArena, layer: int) -> tuple[Tensor, Tensor]:
        if layer not in self.shadows:
            keys, values = arena.ring(self.starts, layer)
            self.shadows[layer] = (keys.clone(), values.clone())
        return self.shadows[layer]

    @property
    def shadow_bytes(self) -> int:
        return sum(tensor.nbytes for pair in tuple(self.shadows.values()) for tensor in pair)


class TorchEngine(Engine):
    """See `engines.base.Engine` for the contract."""

    name = "torch"
    preallocates_kv = True
    prompt_logprobs = True

    def __init__(
        self, model: Any, spec: ModelSpec, fingerprint: Fingerprint, kv_bytes: int | None = None, sequences: int = 64
    ) -> None:
        self.model = model.eval()
        self.device = torch.device(model.device)
        dtype: KVDType = next(name for name, kind in TORCH_DTYPES.items() if kind == model.dtype)
        super().__init__(spec, fingerprint, dtype)
        self.arena = TorchArena(spec.layout, dtype, self.device, kv_bytes or default_kv_bytes(self.device), sequences)
        self.kv_limit_bytes = self.arena.limit_bytes
        self.host_copies = HostCopies(self.arena)
        self._places = Places(self.arena, sequences)
        self.max_batch = sequences
        if self.device.type == "cuda":
            self.chunk_tokens = 8192
        flash = has_flash(self.device, model.dtype)
        if flash:
            fused_kernels.install(self.model)
        self._graphs = DecodeGraphs(self._decode, self._places, sequences) if flash else None
        self.chunk_graphs: ChunkGraphs | None = None
        if flash and not any(plan.window for plan in spec.layout.layers):
            self.chunk_graphs = ChunkGraphs(self._compute_chunk, self.arena, self.host_copies)
            self.warm_lengths = tuple(size - 1 for size in ChunkGraphs.sizes)

    def set_threads(self, count: int) -> None:
        """OpenMP keeps the number per thread: this must be the engine's."""
        if self.device.type == "cpu":
            torch.set_num_threads(count)
            self.threads = count

    def measure_kv(self) -> int:
        return self.arena.used_bytes + sum(sequence.state.shadow_bytes for sequence in tuple(self.live))

    def release_model(self) -> None:
        del self.model, self.arena, self.host_copies, self._places, self._graphs, self.chunk_graphs
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def allocate(self, capacity: int) -> TorchState:
        return TorchState(self.arena.take(capacity))

    def release(self, sequence: Sequence) -> None:
        self.host_copies.finish()
        self.arena.give_back(sequence.state.starts)

    @torch.inference_mode()
    def run_prefill(self, sequence: Sequence, tokens: Items[int], emit: Emit | None, scoring: Scoring | None) -> Logits:
        count = len(tokens)
        self.counters.prompt_tokens += count
        if (
            self.chunk_graphs and self.chunk_graphs.fits(count) and not scoring
        ):  # a graph keeps the last position's logits only
            logits = self.chunk_graphs.run(sequence, tokens, emit)
            if logits is not None:
                return TorchLogits(logits)
        ids = torch.tensor(tokens, device=self.device).unsqueeze(0)
        positions = torch.arange(sequence.length, sequence.length + count, device=self.device).unsqueeze(0)
        hidden = self._forward(ids, positions, PrefillPass(self.arena, sequence, count, emit, self.host_copies))
        if scoring:
            self._score(hidden[0], sequence.length + 1, scoring)
        return TorchLogits(self.model.lm_head(hidden[:, -1]))

    def _score(self, hidden: Tensor, start: int, scoring: Scoring) -> None:
        targets = torch.tensor(scoring.targets, device=self.device).unsqueeze(1)
        for piece in scoring.pieces(self.spec.vocabulary):
            logits = self.model.lm_head(hidden[piece]).float()
            whole = logits.logsumexp(dim=-1, keepdim=True)
            top, tokens = logits.topk(min(scoring.alternatives, logits.shape[-1]), dim=-1)
            chosen = (logits.gather(1, targets[piece]) - whole).squeeze(1)
            scoring.take(start + piece.start, *(found.cpu().numpy() for found in (chosen, tokens, top - whole)))

    def _compute_chunk(self, table: ChunkTable, size: int, arena_pass: ChunkPass) -> Tensor:
        ids, positions = table.ids[:size].unsqueeze(0), table.positions[:size].long().unsqueeze(0)
        hidden = self._forward(ids, positions, arena_pass)
        logits: Tensor = self.model.lm_head(hidden[0].index_select(0, table.last))
        return logits

    @torch.inference_mode()
    def run_step(self, sequences: Items[Sequence], tokens: Items[int] | Tokens) -> Logits:
        size = len(sequences)
        self.counters.step_tokens += size
        ids = tokens if isinstance(tokens, Tensor) else torch.tensor(token_list(tokens))
        self._places.load(sequences)
        if self._graphs:
            return TorchLogits(self._graphs.run(ids, size))
        return TorchLogits(self._decode(ids.to(self.device), size))

    def _decode(self, ids: Tensor, size: int) -> Tensor:
        positions = self._places.positions[:size].long().unsqueeze(1)
        hidden = self._forward(ids.unsqueeze(1), positions, DecodePass(self.arena, self._places, size))
        logits: Tensor = self.model.lm_head(hidden[:, -1])
        return logits

    def _forward(self, ids: Tensor, positions: Tensor, arena_pass: Any) -> Tensor:
        output = self.model.model(
            input_ids=ids, position_ids=positions, past_key_values=arena_pass, use_cache=True, arena_pass=arena_pass
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    @torch.inference_mode()
    def write_slice(self, sequence: Sequence, piece: KVSlice) -> None:
        window = self.spec.layout.layers[piece.layer].window
        if window:
            first, targets = 0, sequence.state.shadow(self.arena, piece.layer)
        else:
            first, targets = sequence.state.starts[0], (self.arena.keys[piece.layer], self.arena.values[piece.layer])
        at = self.arena.where(first, window, piece.start, piece.stop)
        for target, rows in zip(targets, (piece.keys, piece.values), strict=True):
            target[at] = host_tensor(as_dtype(rows, piece.dtype, self.dtype), self.dtype).to(self.device)

    def placed_view(self, sequence: Sequence, piece: KVSlice) -> KVSlice:
        if self.device.type != "cpu" or self.spec.layout.layers[piece.layer].window:
            return piece
        at = self.arena.where(sequence.state.starts[0], 0, piece.start, piece.stop)
        arrays = [host_array(tensor[piece.layer][at], self.dtype) for tensor in (self.arena.keys, self.arena.values)]
        return KVSlice(piece.layer, piece.start, self.dtype, arrays[0], arrays[1])

    @torch.inference_mode()
    def commit_rows(self, sequence: Sequence, length: int) -> None:
        for layer, rows in sequence.state.shadows.items():
            for ring, fresh in zip(self.arena.ring(sequence.state.starts, layer), rows, strict=True):
                ring.copy_(fresh)
        sequence.state.shadows.clear()

    def discard_rows(self, sequence: Sequence) -> None:
        sequence.state.shadows.clear()

    @torch.inference_mode()
    def read_slices(self, sequence: Sequence, start: int) -> Iterator[KVSlice]:
        for layer, plan in enumerate(self.spec.layout.layers):
            begin = plan.first_row(start, sequence.length)
            at = self.arena.where(sequence.state.starts[plan.window], plan.window, begin, sequence.length)
            rows = (self.arena.keys[layer][at].cpu(), self.arena.values[layer][at].cpu())
            arrays = [host_array(tensor, self.dtype) for tensor in rows]
            yield KVSlice(layer, begin, self.dtype, arrays[0], arrays[1])


def default_kv_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_KV_SHARE)
    return min(_CPU_KV_BYTES, available_bytes() // 2)


def load(
    model: ModelFiles,
    *,
    device: str | None = None,
    dtype: KVDType | None = None,
    threads: int | None = None,
    kv_bytes: int | None = None,
    sequences: int = 64,
) -> TorchEngine:
    """Load a safetensors folder. By default CUDA in bfloat16 where there is one, else the CPU in float32."""
    if threads:
        torch.set_num_threads(threads)
    target = require_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    spec = model.spec  # refuses unsupported models before any weight is read
    disable_progress_bar()
    loaded, notes = AutoModelForCausalLM.from_pretrained(
        model.path,
        dtype=TORCH_DTYPES[dtype or ("float32" if target.type == "cpu" else "bfloat16")],
        attn_implementation=ATTENTION_NAME,
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := [*notes["missing_keys"], *notes["mismatched_keys"]]:
        raise ModelDamaged(f"{model.path} lacks {len(missing)} weights, the first: {missing[0]}")
    return TorchEngine(loaded.to(target), spec, _checked_fingerprint(loaded, model), kv_bytes, sequences)


def require_device(name: str) -> torch.device:
    """A torch device that exists on this machine."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineUnavailable(f"no torch device {name!r}; try cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineUnavailable("this torch sees no CUDA device; use device 'cpu' or install a CUDA build of torch")
    return device


def _checked_fingerprint(loaded: Any, model: ModelFiles) -> Fingerprint:
    """The model's fingerprint, after checking that torch applies the config's RoPE."""
    rotary = loaded.model.rotary_emb
    actual = rotary.inv_freq.float().cpu().numpy()
    expected = np.array(model.spec.rope.frequencies, np.float32)
    if actual.shape != expected.shape or not np.allclose(actual, expected, rtol=1e-5, atol=0):
        raise EngineMismatch("transformers computes other RoPE frequencies than the model's config specifies")
    if not np.isclose(rotary.attention_scaling, model.spec.rope.scale, rtol=1e-5):
        raise EngineMismatch("transformers scales RoPE differently than the model's config specifies")
    return model.fingerprint
