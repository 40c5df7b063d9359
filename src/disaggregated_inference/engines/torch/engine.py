"""The torch engine: transformers models on CUDA or CPU, with the KV in an arena of our own."""

import gc
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from disaggregated_inference.engines.base import Emit, Engine, Logits, Sequence, Tokens, token_list
from disaggregated_inference.engines.memory import available_bytes
from disaggregated_inference.engines.torch import fused
from disaggregated_inference.engines.torch.arena import TORCH_DTYPES, Starts, TorchArena, host_array, host_tensor
from disaggregated_inference.engines.torch.attention import has_flash
from disaggregated_inference.engines.torch.graphs import ChunkGraphs, DecodeGraphs
from disaggregated_inference.engines.torch.passes import ATTENTION_NAME, ChunkPass, DecodePass, HostCopies, PrefillPass
from disaggregated_inference.engines.torch.tables import ChunkTable, Places
from disaggregated_inference.errors import EngineMismatch, EngineUnavailable, ModelDamaged
from disaggregated_inference.kv import Fingerprint, KVDType, KVSlice, as_dtype
from disaggregated_inference.models import ModelFiles, ModelSpec

_CPU_KV_BYTES = 4 << 30  # address space, not memory: pages are touched as sequences fill them
_CUDA_KV_SHARE = 0.5


class TorchTokens:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def tolist(self) -> list[int]:
        tokens: list[int] = self.tensor.tolist()
        return tokens


class TorchLogits:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def greedy(self) -> TorchTokens:
        return TorchTokens(self.tensor.argmax(dim=-1))

    def numpy(self, rows: Items[int] | None = None) -> NDArray[np.float32]:
        chosen = self.tensor if rows is None else self.tensor[torch.tensor(rows, device=self.tensor.device).long()]
        array: NDArray[np.float32] = chosen.float().cpu().numpy()
        return array


@dataclass(slots=True)
class TorchState:
    """A sequence's rows. Slices of sliding layers go into a shadow of the ring until they are committed: in the ring
    itself they would overwrite rows that a rollback still needs."""

    starts: Starts
    shadows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def shadow(self, arena: TorchArena, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
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
    own_memory = True

    def __init__(
        self, model: Any, spec: ModelSpec, fingerprint: Fingerprint, kv_bytes: int | None = None, sequences: int = 64
    ) -> None:
        self.model = model.eval()
        self.device = torch.device(model.device)
        dtype: KVDType = next(name for name, kind in TORCH_DTYPES.items() if kind == model.dtype)
        super().__init__(spec, fingerprint, dtype)
        self.arena = TorchArena(spec.layout, dtype, self.device, kv_bytes or _default_budget(self.device), sequences)
        self.kv_limit_bytes = self.arena.limit_bytes
        self._host = HostCopies(self.arena)
        self._places = Places(self.arena, sequences)
        self.max_batch = sequences
        if self.device.type == "cuda":
            self.chunk_tokens = 8192
        flash = has_flash(self.device, model.dtype)
        if flash:
            fused.install(self.model)
        self._graphs = DecodeGraphs(self._decode, self._places, sequences) if flash else None
        self._chunks: ChunkGraphs | None = None
        if flash and not any(plan.window for plan in spec.layout.layers):
            self._chunks = ChunkGraphs(self._compute_chunk, self.arena, self._host)
            self.warm_lengths = tuple(size - 1 for size in ChunkGraphs.sizes)

    def _kv_held(self) -> int:
        return self.arena.used_bytes + sum(sequence.state.shadow_bytes for sequence in tuple(self.live))

    def _free(self) -> None:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _open(self, capacity: int) -> TorchState:
        return TorchState(self.arena.take(capacity))

    def _close(self, sequence: Sequence) -> None:
        self._host.finish()
        self.arena.give_back(sequence.state.starts)

    @torch.inference_mode()
    def _prefill(self, sequence: Sequence, tokens: Items[int], emit: Emit | None) -> Logits:
        count = len(tokens)
        self.counters.prompt_tokens += count
        if self._chunks and self._chunks.fits(count):
            logits = self._chunks.run(sequence, tokens, emit)
            if logits is not None:
                return TorchLogits(logits)
        ids = torch.tensor(tokens, device=self.device).unsqueeze(0)
        positions = torch.arange(sequence.length, sequence.length + count, device=self.device).unsqueeze(0)
        hidden = self._forward(ids, positions, PrefillPass(self.arena, sequence, count, emit, self._host))
        return TorchLogits(self.model.lm_head(hidden[:, -1]))

    def _compute_chunk(self, table: ChunkTable, size: int, arena_pass: ChunkPass) -> torch.Tensor:
        ids, positions = table.ids[:size].unsqueeze(0), table.positions[:size].long().unsqueeze(0)
        hidden = self._forward(ids, positions, arena_pass)
        logits: torch.Tensor = self.model.lm_head(hidden[0].index_select(0, table.last))
        return logits

    @torch.inference_mode()
    def _step(self, sequences: Items[Sequence], tokens: Items[int] | Tokens) -> Logits:
        size = len(sequences)
        self.counters.step_tokens += size
        ids = tokens.tensor if isinstance(tokens, TorchTokens) else torch.tensor(token_list(tokens))
        self._places.load(sequences)
        if self._graphs:
            return TorchLogits(self._graphs.run(ids, size))
        return TorchLogits(self._decode(ids.to(self.device), size))

    def _decode(self, ids: torch.Tensor, size: int) -> torch.Tensor:
        positions = self._places.positions[:size].long().unsqueeze(1)
        hidden = self._forward(ids.unsqueeze(1), positions, DecodePass(self.arena, self._places, size))
        logits: torch.Tensor = self.model.lm_head(hidden[:, -1])
        return logits

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, arena_pass: Any) -> torch.Tensor:
        output = self.model.model(
            input_ids=ids, position_ids=positions, past_key_values=arena_pass, use_cache=True, arena_pass=arena_pass
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    @torch.inference_mode()
    def _place(self, sequence: Sequence, piece: KVSlice) -> None:
        window = self.spec.layout.layers[piece.layer].window
        if window:
            targets = sequence.state.shadow(self.arena, piece.layer)
            at: Any = self.arena.ring_rows(0, window, piece.start, piece.stop)
        else:
            first = sequence.state.starts[0]
            targets = (self.arena.keys[piece.layer], self.arena.values[piece.layer])
            at = slice(first + piece.start, first + piece.stop)
        for target, rows in zip(targets, (piece.keys, piece.values), strict=True):
            target[at] = host_tensor(as_dtype(rows, piece.dtype, self.dtype), self.dtype).to(self.device)

    def held_as(self, sequence: Sequence, piece: KVSlice) -> KVSlice:
        if self.device.type != "cpu" or self.spec.layout.layers[piece.layer].window:
            return piece
        first = sequence.state.starts[0]
        at, tensors = slice(first + piece.start, first + piece.stop), (self.arena.keys, self.arena.values)
        arrays = [host_array(tensor[piece.layer][at], self.dtype) for tensor in tensors]
        return KVSlice(piece.layer, piece.start, self.dtype, arrays[0], arrays[1])

    @torch.inference_mode()
    def _commit(self, sequence: Sequence, length: int) -> None:
        for layer, rows in sequence.state.shadows.items():
            for ring, fresh in zip(self.arena.ring(sequence.state.starts, layer), rows, strict=True):
                ring.copy_(fresh)
        sequence.state.shadows.clear()

    def _rollback(self, sequence: Sequence) -> None:
        sequence.state.shadows.clear()

    @torch.inference_mode()
    def _export(self, sequence: Sequence, start: int) -> Iterator[KVSlice]:
        for layer, plan in enumerate(self.spec.layout.layers):
            first, begin = sequence.state.starts[plan.window], plan.first_row(start, sequence.length)
            if plan.window:
                at: Any = self.arena.ring_rows(first, plan.window, begin, sequence.length)
            else:
                at = slice(first + begin, first + sequence.length)
            rows = (self.arena.keys[layer][at].cpu(), self.arena.values[layer][at].cpu())
            arrays = [host_array(tensor, self.dtype) for tensor in rows]
            yield KVSlice(layer, begin, self.dtype, arrays[0], arrays[1])


def _default_budget(device: torch.device) -> int:
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
    spec = model.spec  # refuses what we cannot run before any weight is read
    disable_progress_bar()
    loaded, notes = AutoModelForCausalLM.from_pretrained(
        model.path,
        dtype=TORCH_DTYPES[dtype or ("float32" if target.type == "cpu" else "bfloat16")],
        attn_implementation=ATTENTION_NAME,
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := [*notes["missing_keys"], *notes["mismatched_keys"]]:
        raise ModelDamaged(f"{model.path} lacks {len(missing)} weights that the model needs, the first: {missing[0]}")
    return TorchEngine(loaded.to(target), spec, _proven_fingerprint(loaded, model), kv_bytes, sequences)


def require_device(name: str) -> torch.device:
    """A torch device that is really there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineUnavailable(f"no torch device {name!r}; try cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineUnavailable("this torch sees no CUDA device; use device 'cpu' or install a CUDA build of torch")
    return device


def _proven_fingerprint(loaded: Any, model: ModelFiles) -> Fingerprint:
    """The model's fingerprint, after checking that torch really rotates as the config says."""
    rotary = loaded.model.rotary_emb
    actual = rotary.inv_freq.float().cpu().numpy()
    expected = np.array(model.spec.rope.frequencies, np.float32)
    if actual.shape != expected.shape or not np.allclose(actual, expected, rtol=1e-5, atol=0):
        raise EngineMismatch("transformers computes other RoPE frequencies than the model's config asks for")
    if not np.isclose(rotary.attention_scaling, model.spec.rope.scale, rtol=1e-5):
        raise EngineMismatch("transformers scales RoPE otherwise than the model's config asks for")
    return model.fingerprint
