"""The torch engine: transformers models on CUDA or CPU, with the KV in an arena of our own."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from disaggregated_inference.engines.base import Emit, Engine, Logits, Sequence, Tokens, token_list
from disaggregated_inference.engines.torch.arena import TORCH_DTYPES, Arena, Starts, host_array, host_tensor
from disaggregated_inference.engines.torch.attention import has_flash
from disaggregated_inference.engines.torch.graphs import DecodeGraphs
from disaggregated_inference.engines.torch.passes import (
    ATTENTION_NAME,
    DecodePass,
    HostCopies,
    Places,
    PrefillPass,
)
from disaggregated_inference.errors import EngineMismatch, EngineUnavailable
from disaggregated_inference.kv import Fingerprint, KVDType, KVSlice, as_dtype
from disaggregated_inference.models import ModelFiles, ModelSpec

_CPU_KV_BYTES = 4 << 30  # address space, not memory: pages are touched as sequences fill them
_CUDA_KV_SHARE = 0.5


class TorchTokens:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def tolist(self) -> list[int]:
        tokens: list[int] = self.tensor.tolist()
        return tokens


class TorchLogits:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def greedy(self) -> TorchTokens:
        return TorchTokens(self.tensor.argmax(dim=-1))

    def numpy(self) -> NDArray[np.float32]:
        array: NDArray[np.float32] = self.tensor.float().cpu().numpy()
        return array


class TorchEngine(Engine):
    """See `engines.base.Engine` for the contract."""

    name = "torch"

    def __init__(
        self, model: Any, spec: ModelSpec, fingerprint: Fingerprint, kv_bytes: int | None = None, sequences: int = 64
    ) -> None:
        self.model = model.eval()
        self.device = torch.device(model.device)
        dtype: KVDType = next(name for name, kind in TORCH_DTYPES.items() if kind == model.dtype)
        super().__init__(spec, fingerprint, dtype)
        self.arena = Arena(spec.layout, dtype, self.device, kv_bytes or _default_budget(self.device), sequences)
        self._host = HostCopies(self.arena)
        self._places = Places(self.arena, sequences)
        flash = has_flash(self.device, model.dtype)
        self._graphs = DecodeGraphs(self._decode, self._places, sequences) if flash else None

    def _open(self, capacity: int) -> Starts:
        return self.arena.take(capacity)

    def _close(self, sequence: Sequence) -> None:
        self.arena.give_back(sequence.state)

    @torch.inference_mode()
    def _prefill(self, sequence: Sequence, tokens: Items[int], emit: Emit | None) -> Logits:
        count = len(tokens)
        self.counters.prompt_tokens += count
        ids = torch.tensor(tokens, device=self.device).unsqueeze(0)
        positions = torch.arange(sequence.length, sequence.length + count, device=self.device).unsqueeze(0)
        hidden = self._forward(ids, positions, PrefillPass(self.arena, sequence, count, emit, self._host))
        return TorchLogits(self.model.lm_head(hidden[:, -1]))

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
        plan = self.spec.layout.layers[piece.layer]
        first = sequence.state[plan.window]
        for store, rows in ((self.arena.keys, piece.keys), (self.arena.values, piece.values)):
            source = host_tensor(as_dtype(rows, piece.dtype, self.dtype), self.dtype)
            if plan.window:
                at = self.arena.ring_rows(first, plan.window, piece.start, piece.stop)
                store[piece.layer][at] = source.to(self.device)
            else:
                store[piece.layer][first + piece.start : first + piece.stop].copy_(source)

    def _commit(self, sequence: Sequence, length: int) -> None:
        """Rows are where they belong already."""

    @torch.inference_mode()
    def export(self, sequence: Sequence, start: int = 0) -> Iterator[KVSlice]:
        for layer, plan in enumerate(self.spec.layout.layers):
            first, begin = sequence.state[plan.window], plan.first_row(start, sequence.length)
            if plan.window:
                at = self.arena.ring_rows(first, plan.window, begin, sequence.length)
                keys, values = self.arena.keys[layer][at], self.arena.values[layer][at]
            else:
                span = slice(first + begin, first + sequence.length)
                keys, values = self.arena.keys[layer][span], self.arena.values[layer][span]
            arrays = [host_array(rows.cpu(), self.dtype) for rows in (keys, values)]
            yield KVSlice(layer, begin, self.dtype, arrays[0], arrays[1])


def _default_budget(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_KV_SHARE)
    return _CPU_KV_BYTES


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
    if model.kind != "safetensors":
        raise EngineUnavailable(f"the torch engine reads safetensors folders, not {model.path.name}")
    if threads:
        torch.set_num_threads(threads)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise EngineUnavailable("this torch sees no CUDA device; use device 'cpu' or install a CUDA build of torch")
    spec = model.spec  # refuses what we cannot run before any weight is read
    disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(
        model.path,
        dtype=TORCH_DTYPES[dtype or ("float32" if device == "cpu" else "bfloat16")],
        attn_implementation=ATTENTION_NAME,
        local_files_only=True,
    ).to(device)
    return TorchEngine(loaded, spec, _proven_fingerprint(loaded, model), kv_bytes, sequences)


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
