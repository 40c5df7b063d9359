"""The llama.cpp engine: GGUF files, on CPU, CUDA or Metal as llama.cpp was built."""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.cores import available_cores, configured_threads
from disaggregated_inference.engines.base import Emit, Engine, Logits, Tokens, chunks, token_list
from disaggregated_inference.engines.llamacpp.context import ContextSettings, ContextSize, LlamaContext
from disaggregated_inference.engines.llamacpp.library import load_library
from disaggregated_inference.engines.llamacpp.probe import probe
from disaggregated_inference.engines.llamacpp.state import Pair, StateCodec
from disaggregated_inference.engines.memory import available_bytes
from disaggregated_inference.engines.scoring import Scoring
from disaggregated_inference.engines.sequence import Sequence
from disaggregated_inference.errors import EngineUnavailable, KVMemoryFull, SliceRefused
from disaggregated_inference.kv import Array, Fingerprint, KVDType, KVSlice, as_dtype
from disaggregated_inference.models import ModelFiles, ModelSpec, llamacpp_rope, rope_parameters

log = logging.getLogger(__name__)

_WINDOWS = 4  # default KV budget, in context windows: llama.cpp writes zeros to all of it at the start
_CELL_STEP = 256  # a context has a multiple of this many cells
_MAX_SEQUENCES = 256


class LlamaLogits:
    """A view of llama.cpp's memory: a copy would be megabytes per step with a large vocabulary, and most steps need
    only the greedy tokens. llama.cpp overwrites them with its next call; `keep` copies them before that."""

    def __init__(self, array: NDArray[np.float32], owner: LlamaContext) -> None:
        self._array, self._owner = array, owner  # the owner of the memory

    def keep(self) -> None:
        self._array = self._array.copy()

    @property
    def rows(self) -> NDArray[np.float32]:
        return self._array

    def last(self) -> "LlamaLogits":
        """Of the last row alone: the others need no copy."""
        self._array = self._array[-1:]
        return self

    def greedy(self) -> NDArray[np.int64]:
        return self._array.argmax(axis=-1)

    def numpy(self, rows: Items[int] | None = None) -> NDArray[np.float32]:
        return self._array.copy() if rows is None else self._array[list(map(int, rows))]


@dataclass(eq=False, slots=True)
class LlamaSequence:
    """A sequence's number in llama.cpp, and the rows received for it, by layer, until they are committed."""

    number: int
    arriving: dict[int, list[Pair]] = field(default_factory=dict)

    @property
    def arriving_bytes(self) -> int:
        pieces = [pair for pairs in tuple(self.arriving.values()) for pair in tuple(pairs)]
        return sum(keys.nbytes + values.nbytes for keys, values in pieces)


class LlamaEngine(Engine):
    """See `engines.base.Engine` for the contract.

    llama.cpp reads and writes the state of a complete sequence only. A range goes through a spare sequence: for export
    the range is shared with the spare one, whose state is read; for import the spare one's state is written and shared
    with the target.
    """

    name = "llamacpp"
    preallocates_kv = True
    prompt_logprobs = True

    def __init__(self, model: LlamaContext, spec: ModelSpec, fingerprint: Fingerprint, codec: StateCodec) -> None:
        super().__init__(spec, fingerprint, codec.dtype)
        self.model = model
        self.codec = codec
        self._before: Callable[[], LlamaLogits | None] = lambda: None  # the last logits, if they are still in use
        self._spare = model.size.sequences - 1
        self._numbers = list(range(self._spare))[::-1]
        self.max_batch = self._spare
        self.kv_limit_bytes = model.size.cells * spec.layout.token_bytes(self.dtype)

    def set_threads(self, count: int) -> None:
        if self.model.on_cpu:
            self.model.set_threads(count)
            self.threads = count

    def release_model(self) -> None:
        del self.model, self.codec, self._before
        gc.collect()

    def measure_kv(self) -> int:
        live = tuple(self.live)
        rows = sum(self.spec.kv_bytes(sequence.length, self.dtype) for sequence in live)
        return rows + sum(sequence.state.arriving_bytes for sequence in live)

    def allocate(self, capacity: int) -> LlamaSequence:
        """llama.cpp takes cells as tokens come, so free cells follow from the open sequences' capacities."""
        free = self.model.size.cells - sum(sequence.capacity for sequence in self.live)
        if capacity > free:
            raise KVMemoryFull(f"no memory for {capacity} tokens of KV: {free} of {self.model.size.cells} free")
        if not self._numbers:
            raise KVMemoryFull(f"all {self.max_batch} sequences of this engine are open")
        return LlamaSequence(self._numbers.pop())

    def release(self, sequence: Sequence) -> None:
        self.model.forget(sequence.state.number)
        self._numbers.append(sequence.state.number)
        sequence.state.arriving.clear()

    def run_prefill(self, sequence: Sequence, tokens: Items[int], emit: Emit | None, scoring: Scoring | None) -> Logits:
        start, stop = sequence.length, sequence.length + len(tokens)
        self.counters.prompt_tokens += len(tokens)
        at, size = start, self.model.size
        for part in chunks(tokens, size.outputs if scoring else size.batch_tokens):
            positions = range(at, at + len(part))
            at = positions.stop
            wanted = len(part) if scoring else int(at == stop)
            logits = self._evaluate(part, positions, [sequence.state.number] * len(part), wanted)
            if scoring:
                _score(logits.rows, positions.start - start, start + 1, scoring)
                logits = logits.last()
        if emit:
            for piece in self._read(sequence, start, stop):
                emit(piece)
        return logits

    def run_step(self, sequences: Items[Sequence], tokens: Items[int] | Tokens) -> Logits:
        self.counters.step_tokens += len(sequences)
        numbers = [sequence.state.number for sequence in sequences]
        positions = [sequence.length for sequence in sequences]
        return self._evaluate(token_list(tokens), positions, numbers, wanted=len(numbers))

    def _evaluate(self, tokens: Items[int], positions: Items[int], sequences: Items[int], wanted: int) -> LlamaLogits:
        if before := self._before():
            before.keep()
        logits = LlamaLogits(self.model.evaluate(tokens, positions, sequences, wanted), self.model)
        self._before = weakref.ref(logits)
        return logits

    def _read(self, sequence: Sequence, start: int, stop: int) -> Iterator[KVSlice]:
        self.model.share(sequence.state.number, self._spare, start, stop)
        try:
            state = self.model.dump(self._spare)
        finally:
            self.model.forget(self._spare)
        return self.codec.decode(state, start, stop)

    def read_slices(self, sequence: Sequence, start: int) -> Iterator[KVSlice]:
        return self._read(sequence, start, sequence.length)

    def write_slice(self, sequence: Sequence, piece: KVSlice) -> None:
        pair = self._own(piece.keys, piece.dtype), self._own(piece.values, piece.dtype)
        pieces = sequence.state.arriving.setdefault(piece.layer, [])
        pieces.append(pair)
        if window := self.spec.layout.layers[piece.layer].window:
            sequence.state.arriving[piece.layer] = [_newest(pieces, window)]

    def _own(self, rows: Array, dtype: KVDType) -> Array:
        """A copy in the engine's dtype: the caller reuses its buffer after `place`."""
        with np.errstate(over="raise"):
            try:
                return rows.copy() if dtype == self.dtype else as_dtype(rows, dtype, self.dtype)
            except FloatingPointError as error:
                raise SliceRefused(f"the rows have values beyond the range of {self.dtype}") from error

    def commit_rows(self, sequence: Sequence, length: int) -> None:
        """llama.cpp takes all layers of a range at once, so rows are written here, not in `write_slice`."""
        held: LlamaSequence = sequence.state
        if held.arriving:
            rows = [held.arriving[layer] for layer in range(len(sequence.placed))]
            self.model.restore(self._spare, self.codec.encode(rows, length, self._spare))
            self.model.share(self._spare, held.number)
            self.model.forget(self._spare)
            held.arriving = {}

    def discard_rows(self, sequence: Sequence) -> None:
        sequence.state.arriving.clear()


def _score(logits: NDArray[np.float32], at: int, start: int, scoring: Scoring) -> None:
    """The logits are of the chunk's positions from `at` on."""
    piece = slice(at, min(at + len(logits), len(scoring.targets)))
    if piece.stop > at:  # the prompt's last position has no target
        scoring.take_logits(start + at, logits[: piece.stop - at], piece)


def _newest(pieces: list[Pair], window: int) -> Pair:
    """The last rows of a sliding layer; older ones are not needed."""
    keys, values = (np.concatenate(rows)[-window:] for rows in zip(*pieces, strict=True))
    return keys, values


def load(
    model: ModelFiles,
    *,
    dtype: KVDType | None = None,
    threads: int | None = None,
    kv_bytes: int | None = None,
    sequences: int = 64,
) -> LlamaEngine:
    """Load a GGUF file. `dtype` is that of the KV: float16 by default, as in llama.cpp."""
    if not 0 < sequences < _MAX_SEQUENCES:
        raise EngineUnavailable(f"llama.cpp has 1 to {_MAX_SEQUENCES - 1} sequences, not {sequences}")
    spec, kind = model.spec, dtype or "float16"
    size = ContextSize(_cells(spec, kind, kv_bytes or default_kv_bytes(spec, kind), sequences), sequences + 1)
    settings = ContextSettings(kind, threads or configured_threads() or available_cores(), _yarn_range(model))
    context = LlamaContext(load_library(), model.path, size, settings)
    rounded = llamacpp_rope(model.config, spec.layout.head_dim)
    codec, rope = probe(context, spec, kind, (spec.rope, rounded))
    fingerprint = model.fingerprint
    if rope != spec.rope:
        log.warning(
            "llama.cpp rounds YaRN's range where this model's checkpoint does not: this node exchanges KV with other"
            " llama.cpp nodes only"
        )
        fingerprint = msgspec.structs.replace(fingerprint, rope_frequencies=rope.frequencies)
    return LlamaEngine(context, spec, fingerprint, codec)


def _yarn_range(model: ModelFiles) -> tuple[float, float]:
    rope, default = rope_parameters(model.config), ContextSettings().yarn_range
    return float(rope.get("beta_fast", default[0])), float(rope.get("beta_slow", default[1]))


def _cells(spec: ModelSpec, dtype: KVDType, kv_bytes: int, sequences: int) -> int:
    """As many as fit into the budget, but no more than all sequences together can use."""
    token_bytes = spec.layout.token_bytes(dtype)
    cells = min(kv_bytes // token_bytes, sequences * spec.context_window) // _CELL_STEP * _CELL_STEP
    if not cells:
        raise KVMemoryFull(
            f"a KV budget of {kv_bytes} bytes is too small: {_CELL_STEP} tokens of {token_bytes} bytes are the minimum"
        )
    return cells


def default_kv_bytes(spec: ModelSpec, dtype: KVDType) -> int:
    return min(_WINDOWS * spec.kv_bytes(spec.context_window, dtype), available_bytes() // 4)
