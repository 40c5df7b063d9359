"""The MLX engine: mlx-lm models on Metal, or on the CPU under Linux."""

import gc
import logging
import platform
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.engines.base import Emit, Engine, Logits, token_list
from disaggregated_inference.engines.memory import available_bytes
from disaggregated_inference.engines.mlx import grouped
from disaggregated_inference.engines.mlx.batch import Batches, capacity_class
from disaggregated_inference.engines.mlx.blas import set_blas_threads
from disaggregated_inference.engines.mlx.caches import MLX_DTYPES, make_layers, to_numpy, token_major
from disaggregated_inference.engines.mlx.loading import activation_dtype, load_weights
from disaggregated_inference.engines.mlx.rope import ensure_exact
from disaggregated_inference.engines.scoring import Scoring
from disaggregated_inference.engines.sequence import Sequence
from disaggregated_inference.kv import Fingerprint, KVDType, KVSlice
from disaggregated_inference.models import ModelFiles, ModelSpec

log = logging.getLogger(__name__)

_METAL_KV_SHARE = 0.8
_FREED_BYTES = 2 << 30


class MlxLogits:
    """Scheduled, not evaluated: the device computes while the caller prepares the next step."""

    def __init__(self, array: mx.array) -> None:
        self.array = array

    def greedy(self) -> Any:
        tokens = mx.argmax(self.array, axis=-1)
        mx.async_eval(tokens)
        return tokens

    def numpy(self, rows: Items[int] | None = None) -> NDArray[np.float32]:
        chosen = self.array if rows is None else self.array[mx.array(list(rows), mx.int32)]
        return np.array(chosen.astype(mx.float32))


class _Tap:
    """Wraps a layer's cache during prefill and keeps the new K and V, scheduled for evaluation at once."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.fresh: tuple[mx.array, mx.array] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.fresh = (token_major(keys[0]), token_major(values[0]))
        fetched: tuple[mx.array, mx.array] = self._cache.update_and_fetch(keys, values)
        mx.async_eval(*self.fresh)
        return fetched


class MlxEngine(Engine):
    """See `engines.base.Engine` for the contract."""

    name = "mlx"
    prompt_logprobs = True

    def __init__(self, model: Any, spec: ModelSpec, fingerprint: Fingerprint, kv_bytes: int | None = None) -> None:
        super().__init__(spec, fingerprint, activation_dtype(model))
        grouped.install(model)
        self.model = model
        self.kv_limit_bytes = kv_bytes or _default_limit()
        self._batches = Batches()
        if mx.default_device() == mx.gpu:
            self.chunk_tokens = 2048

    def set_threads(self, count: int) -> None:
        """Only the BLAS of Linux has several."""
        if mx.default_device() == mx.cpu:
            set_blas_threads(count)
            self.threads = count

    def slice_copy_bytes(self, tokens: int) -> int:
        """Slices are copies in the portable layout, in the memory that CPU and GPU share."""
        return self.spec.layout.total_bytes(tokens, self.dtype)

    def release_model(self) -> None:
        del self.model, self._batches
        gc.collect()
        mx.clear_cache()

    def leave_thread(self) -> None:
        """A thread that ends with its own MLX streams makes the process abort at exit, one time in five."""
        mx.synchronize()
        mx.clear_streams()

    def kv_rows(self, capacity: int) -> int:
        """A batch gives each member the capacity of its largest, which has the same class and fits the context."""
        return max(capacity, min(capacity_class(capacity), self.spec.context_window))

    def measure_kv(self) -> int:
        own = sum(layer.nbytes for sequence in tuple(self.live) for layer in sequence.state or ())
        return own + self._batches.nbytes

    def allocate(self, capacity: int) -> Any:
        return make_layers(self.spec.layout, self.dtype, capacity)

    def release(self, sequence: Sequence) -> None:
        self._batches.drop(sequence)
        sequence.state = None

    def run_prefill(self, sequence: Sequence, tokens: Items[int], emit: Emit | None, scoring: Scoring | None) -> Logits:
        self._batches.take_back(sequence)
        self.counters.prompt_tokens += len(tokens)
        caches = [layer.cache for layer in sequence.state]
        taps = [_Tap(cache) for cache in caches] if emit else caches
        hidden = self.model.model(mx.array(list(tokens))[None], cache=taps)
        logits = self._head(hidden[:, -1])
        mx.async_eval(logits)
        if emit:
            self._emit_slices(sequence.length, len(tokens), taps, emit)
        if scoring:
            self._score(hidden[0], sequence.length + 1, scoring)
        for layer in sequence.state:
            layer.settle()
        mx.eval(logits, [array for cache in caches for array in (cache.keys, cache.values)])
        return MlxLogits(logits)

    def _score(self, hidden: mx.array, start: int, scoring: Scoring) -> None:
        targets = mx.array(list(scoring.targets))[:, None]
        count = min(scoring.alternatives, self.spec.vocabulary)
        for piece in scoring.pieces(self.spec.vocabulary):
            logits = self._head(hidden[piece]).astype(mx.float32)
            whole = mx.logsumexp(logits, axis=-1, keepdims=True)
            chosen = (mx.take_along_axis(logits, targets[piece], axis=-1) - whole)[:, 0]
            tokens = mx.argpartition(-logits, max(count - 1, 0), axis=-1)[:, :count]
            top = mx.take_along_axis(logits, tokens, axis=-1) - whole
            mx.eval(chosen, tokens, top)
            scoring.take(start + piece.start, *map(np.array, (chosen, tokens, top)))

    def _emit_slices(self, start: int, count: int, taps: list[_Tap], emit: Emit) -> None:
        """Layer by layer: each is evaluated alone, while the device computes the later ones."""
        for index, (tap, plan) in enumerate(zip(taps, self.spec.layout.layers, strict=True)):
            first = plan.first_row(start, start + count)
            assert tap.fresh is not None
            mx.eval(*tap.fresh)
            keys, values = (to_numpy(rows, self.dtype)[first - start :] for rows in tap.fresh)
            tap.fresh = None
            emit(KVSlice(index, first, self.dtype, keys, values))

    def run_step(self, sequences: Items[Sequence], tokens: Any) -> Logits:
        self.counters.step_tokens += len(sequences)
        arranged = self._batches.arrange(sequences)
        inputs = tokens if isinstance(tokens, mx.array) else mx.array(token_list(tokens))
        hidden = self.model.model(arranged.rows(inputs)[:, None], cache=arranged.caches)
        logits = self._head(arranged.callers(hidden[:, -1]))
        mx.async_eval(logits)
        return MlxLogits(logits)

    def _head(self, hidden: mx.array) -> mx.array:
        if getattr(self.model.args, "tie_word_embeddings", False):
            return self.model.model.embed_tokens.as_linear(hidden)
        return self.model.lm_head(hidden)

    def write_slice(self, sequence: Sequence, piece: KVSlice) -> None:
        self._batches.take_back(sequence)
        sequence.state[piece.layer].place(piece)

    def commit_rows(self, sequence: Sequence, length: int) -> None:
        for layer in sequence.state:
            layer.commit(length)

    def discard_rows(self, sequence: Sequence) -> None:
        for layer in sequence.state:
            layer.rollback()

    def read_slices(self, sequence: Sequence, start: int) -> Iterator[KVSlice]:
        self._batches.take_back(sequence)
        for index, (layer, plan) in enumerate(zip(sequence.state, self.spec.layout.layers, strict=True)):
            first = plan.first_row(start, sequence.length)
            rows = [token_major(array) for array in layer.rows(first, sequence.length)]
            mx.eval(rows)
            keys, values = (to_numpy(array, self.dtype) for array in rows)
            yield KVSlice(index, first, self.dtype, keys, values)


def load(
    model: ModelFiles, *, dtype: KVDType | None = None, blas: str | None = None, kv_bytes: int | None = None
) -> MlxEngine:
    """Load a safetensors folder. On Metal in the dtype it was saved in, on Linux in float32."""
    spec = model.spec
    if blas is None:
        log.warning("no BLAS found for MLX: prefill will be 60 times slower. Install libopenblas0-pthread")
    loaded = load_weights(model, dtype or _default_dtype(model))
    if repaired := ensure_exact(loaded, spec.rope):
        log.info("replaced MLX's RoPE frequencies by the model's in %d layers", repaired)
    _bound_freed_buffers()
    return MlxEngine(loaded, spec, model.fingerprint, kv_bytes)


def _default_limit() -> int:
    """Metal's working set minus a share for temporaries; on Linux half of the free memory."""
    working_set = int(mx.device_info().get("max_recommended_working_set_size", 0))
    if not working_set:
        return available_bytes() // 2
    free = min(working_set - int(mx.get_active_memory()), available_bytes())
    return max(int(free * _METAL_KV_SHARE), 0)


def _bound_freed_buffers() -> None:
    """MLX keeps freed buffers for the next array of their size, on Metal up to all memory.

    Temporaries of a chunk are reused by the next chunk and fit into this limit. Batches that sequences join and leave
    have ever new sizes: their buffers would not be reused, and their memory would be missing for the next batch.
    """
    before = mx.set_cache_limit(_FREED_BYTES)
    if before < _FREED_BYTES:
        mx.set_cache_limit(before)


def _default_dtype(model: ModelFiles) -> KVDType:
    """MLX has no fast half precision on the CPU, and no half-precision mixtures of experts at all."""
    if platform.system() == "Linux":
        return "float32"
    saved = str(model.config.get("torch_dtype") or model.config.get("dtype") or "bfloat16")
    return next((name for name in MLX_DTYPES if name == saved), "bfloat16")
