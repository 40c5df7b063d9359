"""One model in one llama.cpp context: tokens in, logits out, and the KV of its sequences.

The sequences share one buffer of cells (`kv_unified`), so that a range of one can be shared with another without a
copy. One thread makes all calls, as for every engine.
"""

import ctypes
import weakref
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.engines.llamacpp.library import Library, LlamaBatch, log_capture
from disaggregated_inference.errors import EngineMismatch, KVMemoryFull, ModelDamaged, SliceRefused
from disaggregated_inference.kv import Array, KVDType

GGML_TYPES: dict[KVDType, int] = {"float32": 0, "float16": 1, "bfloat16": 30}

_NO_CELLS = 1  # llama_decode found no free cells and changed nothing
_ALL_LAYERS = -1
_SCORED_TOKENS = 64  # of a prompt whose logprobs are wanted, at a time


class ContextSize(NamedTuple):
    """The memory that a context allocates."""

    cells: int  # tokens of all sequences together
    sequences: int
    batch_tokens: int = 2048  # limit of one call
    piece_tokens: int = 512  # computed together

    @property
    def outputs(self) -> int:
        """Rows of logits that one call may return: never those of all prompt tokens."""
        return max(self.sequences, _SCORED_TOKENS)


class ContextSettings(NamedTuple):
    dtype: KVDType = "float16"  # of the cache
    threads: int = 1
    yarn_range: tuple[float, float] = (32.0, 1.0)  # beta fast and slow: llama.cpp does not read them from a GGUF
    flash: bool = True


class LlamaContext:
    def __init__(self, library: Library, path: Path, size: ContextSize, settings: ContextSettings) -> None:
        self.library, self.size, self._call = library, size, library.call
        log_capture.errors.clear()
        params = library.default_model_params()
        params.n_gpu_layers = _ALL_LAYERS
        self.model = self._call.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise ModelDamaged(f"llama.cpp cannot load {path.name}: {log_capture.take()}")
        self._context = self._call.llama_init_from_model(self.model, self._params(settings))
        weakref.finalize(self, _free, self._call, self._context, self.model)
        if not self._context:
            raise KVMemoryFull(f"llama.cpp cannot make a context of {size.cells} tokens: {log_capture.take()}")
        self._memory = self._call.llama_get_memory(self._context)
        self.vocabulary: int = self._call.llama_vocab_n_tokens(self._call.llama_model_get_vocab(self.model))
        self._rows = _BatchArrays(size.batch_tokens)

    def _params(self, settings: ContextSettings) -> Any:
        """Sets everything that affects the state format, so that llama.cpp's defaults do not matter."""
        params = self.library.default_context_params()
        params.n_ctx, params.n_seq_max = self.size.cells, self.size.sequences
        params.n_batch, params.n_ubatch = self.size.batch_tokens, self.size.piece_tokens
        params.n_threads = params.n_threads_batch = settings.threads
        params.flash_attn_type = int(settings.flash)
        params.type_k = params.type_v = GGML_TYPES[settings.dtype]
        params.yarn_beta_fast, params.yarn_beta_slow = settings.yarn_range
        params.kv_unified, params.swa_full = True, False
        if hasattr(params, "n_outputs_max"):
            params.n_outputs_max = self.size.outputs
        return params

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Layers, KV heads, window and vocabulary, as llama.cpp read them."""
        call = self._call
        counts = (call.llama_model_n_layer, call.llama_model_n_head_kv, call.llama_model_n_swa)
        layers, heads, window = (int(count(self.model)) for count in counts)
        return layers, heads, window, self.vocabulary

    def evaluate(
        self, tokens: Items[int], positions: Items[int], sequences: Items[int], wanted: int
    ) -> NDArray[np.float32]:
        """One token per row through the model. Returns the logits of the last `wanted` rows; the next call overwrites
        them."""
        batch = self._rows.fill(tokens, positions, sequences, wanted)
        code = self._call.llama_decode(self._context, batch)
        if code == _NO_CELLS:
            raise KVMemoryFull(f"llama.cpp has no free cells for {len(tokens)} tokens among its {self.size.cells}")
        if code:
            raise EngineMismatch(f"llama.cpp cannot compute {len(tokens)} tokens: {log_capture.take()} (code {code})")
        if not wanted:
            return np.empty((0, self.vocabulary), np.float32)
        logits = self._call.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (wanted, self.vocabulary))

    @property
    def on_cpu(self) -> bool:
        return not self._call.llama_supports_gpu_offload()

    def set_threads(self, count: int) -> None:
        self._call.llama_set_n_threads(self._context, count, count)

    def forget(self, sequence: int) -> None:
        self._call.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def share(self, source: int, target: int, start: int = -1, stop: int = -1) -> None:
        """Share the cells of [start, stop) with another sequence."""
        self._call.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def length(self, sequence: int) -> int:
        """The sequence's length in llama.cpp."""
        return int(self._call.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def dump(self, sequence: int) -> Array:
        """The sequence's state in llama.cpp's format."""
        state = np.empty(self._call.llama_state_seq_get_size(self._context, sequence), np.uint8)
        written = self._call.llama_state_seq_get_data(self._context, state.ctypes.data, len(state), sequence)
        if written != len(state):
            raise EngineMismatch(f"llama.cpp wrote {written} bytes of a state of {len(state)}: {log_capture.take()}")
        return state

    def restore(self, sequence: int, state: Array) -> None:
        """Replace the sequence's state. A refused state leaves it empty; other sequences are not affected."""
        log_capture.errors.clear()
        read = self._call.llama_state_seq_set_data(self._context, state.ctypes.data, len(state), sequence)
        if not read or read != len(state):
            self.forget(sequence)
            raise SliceRefused(f"llama.cpp refused a state of {len(state)} bytes: {log_capture.take()}")


class _BatchArrays:
    """The arrays of a llama_batch, allocated once."""

    def __init__(self, size: int) -> None:
        self._tokens, self._positions, self._sequences, ones = (np.ones(size, np.int32) for _ in range(4))
        self._wanted = np.zeros(size, np.int8)
        first = self._sequences.ctypes.data
        pointers = (first + self._sequences.itemsize * np.arange(size, dtype=np.uint64)).astype(np.uint64)
        self._kept = (ones, pointers)  # the batch holds only their addresses
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
    """Also when the process ends: Metal's library aborts if objects are left."""
    if context:
        call.llama_free(context)
    call.llama_model_free(model)
