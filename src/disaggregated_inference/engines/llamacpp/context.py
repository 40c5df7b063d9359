"""One model in one llama.cpp context: tokens in, logits out, and the memory of its sequences.

The sequences share one buffer of cells (`kv_unified`), so that a range of one can be given to another without a copy.
Whoever calls is one thread, as for every engine.
"""

import ctypes
import weakref
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.engines.llamacpp.library import Library, LlamaBatch, heard
from disaggregated_inference.errors import EngineMismatch, KVMemoryFull, ModelDamaged, SliceRefused
from disaggregated_inference.kv import KVDType
from disaggregated_inference.kv.dtype import Array

GGML_TYPES: dict[KVDType, int] = {"float32": 0, "float16": 1, "bfloat16": 30}

_NO_ROOM = 1  # what llama_decode returns when it finds no cells; nothing was changed then
_ALL_LAYERS = -1


class Size(NamedTuple):
    """What is taken when a context is made."""

    cells: int  # tokens of all sequences together
    sequences: int
    batch_tokens: int = 2048  # most tokens in one call
    piece_tokens: int = 512  # computed at once


class Setting(NamedTuple):
    """How it computes."""

    dtype: KVDType = "float16"  # of the cache
    threads: int = 1
    yarn_range: tuple[float, float] = (32.0, 1.0)  # beta fast and slow: llama.cpp does not read them from a GGUF
    flash: bool = True


class LlamaContext:
    def __init__(self, library: Library, path: Path, size: Size, setting: Setting) -> None:
        self.library, self.size, self._call = library, size, library.call
        heard.errors.clear()
        params = library.default_model_params()
        params.n_gpu_layers = _ALL_LAYERS
        self.model = self._call.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise ModelDamaged(f"llama.cpp cannot load {path.name}: {heard.take()}")
        self._context = self._call.llama_init_from_model(self.model, self._params(setting))
        weakref.finalize(self, _free, self._call, self._context, self.model)
        if not self._context:
            raise KVMemoryFull(f"llama.cpp cannot make a context of {size.cells} tokens: {heard.take()}")
        self._memory = self._call.llama_get_memory(self._context)
        self.vocabulary: int = self._call.llama_vocab_n_tokens(self._call.llama_model_get_vocab(self.model))
        self._rows = _FreeCells(size.batch_tokens)

    def _params(self, setting: Setting) -> Any:
        """Everything that decides how a state looks is set here, and nothing of it left to llama.cpp."""
        params = self.library.default_context_params()
        params.n_ctx, params.n_seq_max = self.size.cells, self.size.sequences
        params.n_batch, params.n_ubatch = self.size.batch_tokens, self.size.piece_tokens
        params.n_threads = params.n_threads_batch = setting.threads
        params.flash_attn_type = int(setting.flash)
        params.type_k = params.type_v = GGML_TYPES[setting.dtype]
        params.yarn_beta_fast, params.yarn_beta_slow = setting.yarn_range
        params.kv_unified, params.swa_full = True, False
        if hasattr(params, "n_outputs_max"):
            params.n_outputs_max = self.size.sequences  # logits of whole prompts are never asked for
        return params

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Layers, KV heads, window and vocabulary, as llama.cpp has read them."""
        call = self._call
        counts = (call.llama_model_n_layer, call.llama_model_n_head_kv, call.llama_model_n_swa)
        layers, heads, window = (int(count(self.model)) for count in counts)
        return layers, heads, window, self.vocabulary

    def evaluate(
        self, tokens: Items[int], positions: Items[int], sequences: Items[int], wanted: int
    ) -> NDArray[np.float32]:
        """One token per row through the model; the logits of the last `wanted` rows, where llama.cpp has them: its next
        call overwrites them."""
        batch = self._rows.fill(tokens, positions, sequences, wanted)
        code = self._call.llama_decode(self._context, batch)
        if code == _NO_ROOM:
            raise KVMemoryFull(f"llama.cpp finds no room for {len(tokens)} tokens among its {self.size.cells} cells")
        if code:
            raise EngineMismatch(f"llama.cpp cannot compute {len(tokens)} tokens: {heard.take()} (code {code})")
        if not wanted:
            return np.empty((0, self.vocabulary), np.float32)
        logits = self._call.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (wanted, self.vocabulary))

    def forget(self, sequence: int) -> None:
        self._call.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def share(self, source: int, target: int, start: int = -1, stop: int = -1) -> None:
        """Give the cells of [start, stop) to another sequence too."""
        self._call.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def length(self, sequence: int) -> int:
        """Tokens up to the last position that llama.cpp holds for it."""
        return int(self._call.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def dump(self, sequence: int) -> Array:
        """Its state as llama.cpp writes it."""
        state = np.empty(self._call.llama_state_seq_get_size(self._context, sequence), np.uint8)
        written = self._call.llama_state_seq_get_data(self._context, state.ctypes.data, len(state), sequence)
        if written != len(state):
            raise EngineMismatch(f"llama.cpp wrote {written} bytes of a state of {len(state)}: {heard.take()}")
        return state

    def restore(self, sequence: int, state: Array) -> None:
        """Put a state in the place of what the sequence held. Refused, it holds nothing, and others what they held."""
        heard.errors.clear()
        read = self._call.llama_state_seq_set_data(self._context, state.ctypes.data, len(state), sequence)
        if not read or read != len(state):
            self.forget(sequence)
            raise SliceRefused(f"llama.cpp does not take a state of {len(state)} bytes: {heard.take()}")


class _FreeCells:
    """The arrays that a batch points to, made once."""

    def __init__(self, most: int) -> None:
        self._tokens, self._positions, self._sequences, ones = (np.ones(most, np.int32) for _ in range(4))
        self._wanted = np.zeros(most, np.int8)
        first = self._sequences.ctypes.data
        pointers = (first + self._sequences.itemsize * np.arange(most, dtype=np.uint64)).astype(np.uint64)
        self._kept = (ones, pointers)  # the batch has their addresses only
        self._batch = LlamaBatch(
            token=_pointer(self._tokens, ctypes.c_int32),
            pos=_pointer(self._positions, ctypes.c_int32),
            n_seq_id=_pointer(ones, ctypes.c_int32),
            seq_id=_pointer(pointers, ctypes.c_void_p),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )

    def fill(self, tokens: Items[int], positions: Items[int], sequences: Items[int], wanted: int) -> LlamaBatch:
        count = len(tokens)
        self._tokens[:count], self._positions[:count], self._sequences[:count] = tokens, positions, sequences
        self._wanted[:count] = 0
        self._wanted[count - wanted : count] = 1
        self._batch.n_tokens = count
        return self._batch


def _pointer(array: Array, kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))


def _free(call: Any, context: Any, model: Any) -> None:
    """Also when the process ends: Metal's library aborts when it has to clean up itself."""
    if context:
        call.llama_free(context)
    call.llama_model_free(model)
