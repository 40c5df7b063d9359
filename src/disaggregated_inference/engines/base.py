"""The contract of every engine: eight methods on sequences.

A *sequence* is one request's KV inside an engine. It is opened with capacity for prompt and completion, filled by
`prefill` (computed here) or by `place` and `commit` (computed by another engine; `rollback` discards an incomplete
chunk), advanced by `step`, read by `export`, and closed.

Threads: one thread makes all calls to an engine. `emit` is called on that thread.
Counters: engines count every token that goes through the model, at the place where it does. Tests and nodes read these
counters to show that a hand-off recomputed nothing.
Memory: `kv_cost` is the most that a sequence will take, known before it is opened. Sequences whose costs together stay
within `kv_limit_bytes` fit together (torch may have only fragments left, and raises `KVMemoryFull`). `kv_held_bytes` is
what they take now. The caller keeps to the limit: it knows which requests can wait.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Protocol

from numpy import float32
from numpy.typing import NDArray

from disaggregated_inference.engines.scoring import Scoring
from disaggregated_inference.engines.sequence import Sequence, broken_on_error, require_batch
from disaggregated_inference.errors import (
    ContextTooLong,
    EngineUnavailable,
    KVMemoryFull,
    PromptLogprobsUnsupported,
    SliceRefused,
    TokensRefused,
)
from disaggregated_inference.kv import Fingerprint, KVDType, KVSlice
from disaggregated_inference.models import ModelSpec

Emit = Callable[[KVSlice], None]


class Tokens(Protocol):
    """Sampled tokens that may still be on the device; the next step can take them before they are read. Arrays of
    numpy, torch and MLX are such tokens."""

    def __len__(self) -> int: ...

    def tolist(self) -> list[int]: ...


class Logits(Protocol):
    """Logits of the next token, one row per sequence, on the device until they are read."""

    def greedy(self) -> Tokens: ...

    def numpy(self, rows: Items[int] | None = None) -> NDArray[float32]:
        """On the host: all rows, or only `rows`, in that order."""


@dataclass(slots=True)
class Counters:
    """Tokens that went through the model."""

    prompt_tokens: int = 0
    step_tokens: int = 0


class Engine(ABC):
    """One loaded model. Subclasses implement the abstract methods, which only the methods of this class call; checks
    are here, once.

    A refused call changes nothing. A call that fails half-way breaks its sequences: the model may have written a part
    of a chunk, and continuing would silently give a wrong answer. Broken sequences can only be closed.
    """

    name: str
    kv_limit_bytes: int  # for all sequences together
    preallocates_kv = False  # whether KV memory is allocated when the engine is loaded
    prompt_logprobs = False  # whether `prefill` can score a prompt
    max_batch = 256
    warm_lengths: tuple[int, ...] = (64,)  # chunk lengths to compute once before the first request
    threads = 0  # of the CPU, for computing; 0: the engine computes on another device
    chunk_tokens = 512  # enough to keep the device busy, few enough that other requests do not wait for seconds

    def __init__(self, spec: ModelSpec, fingerprint: Fingerprint, dtype: KVDType) -> None:
        self.spec = spec
        self.fingerprint = fingerprint
        self.dtype = dtype
        self.counters = Counters()
        self.live: set[Sequence] = set()
        self.loaded = True

    def open(self, capacity: int) -> Sequence:
        """Reserve memory for `capacity` tokens, prompt and completion together."""
        if capacity > self.spec.context_window:
            raise ContextTooLong(capacity, self.spec.context_window)
        if capacity < 1:
            raise KVMemoryFull(f"a sequence needs a capacity of at least one token, not {capacity}")
        sequence = Sequence(capacity=capacity, placed=[0] * len(self.spec.layout.layers), state=self.allocate(capacity))
        self.live.add(sequence)
        return sequence

    def close(self, sequence: Sequence) -> None:
        """Free the sequence's memory. Closing twice is harmless."""
        if not sequence.closed:
            sequence.closed = True
            self.live.discard(sequence)
            self.release(sequence)

    def kv_cost(self, capacity: int) -> int:
        """The most bytes that a sequence of this capacity takes, in any batch.

        A sliding layer counts its window twice: while slices arrive, committed and new rows exist side by side.
        """
        rows = sum(2 * plan.window or self.kv_rows(capacity) for plan in self.spec.layout.layers)
        return rows * self.spec.layout.row_bytes(self.dtype)

    def slice_copy_bytes(self, tokens: int) -> int:
        """What copies of a prompt's slices take of the same memory, beside the sequence, until they are sent."""
        return 0

    def placed_view(self, sequence: Sequence, piece: KVSlice) -> KVSlice:
        """The placed rows as a view of the sequence's memory, if other threads can read it: saves a second copy."""
        return piece

    @property
    def kv_held_bytes(self) -> int:
        """What the open sequences take now, measured."""
        return self.measure_kv() if self.loaded else 0

    def prefill(
        self, sequence: Sequence, tokens: Items[int], emit: Emit | None = None, scoring: Scoring | None = None
    ) -> Logits:
        """Compute one chunk and return the logits of its last position; `emit` gets each layer's slice when it is done,
        `scoring` the logprobs of the tokens that follow, piece by piece.

        The caller splits a prompt into chunks, and may do other work between two of them.
        """
        if not len(tokens):
            raise TokensRefused("a chunk needs at least one token")
        sequence.require_room(len(tokens))
        self.require_vocabulary(tokens)
        if scoring:
            self.require_prompt_logprobs()
            scoring.require_chunk(len(tokens))
            self.require_vocabulary(scoring.targets)
        with broken_on_error(sequence):
            sequence.computed += len(tokens)
            logits = self.run_prefill(sequence, tokens, emit, scoring if scoring and scoring.targets else None)
        sequence.advance(len(tokens))
        return logits

    def place(self, sequence: Sequence, piece: KVSlice) -> None:
        """Write one layer's slice. Layers may arrive in any order, the slices of one layer by position."""
        sequence.require_usable()
        piece.require_fits(self.spec.layout)
        sequence.require_next(piece, self.spec.layout.layers[piece.layer])
        piece.wait()
        with broken_on_error(sequence):
            self.write_slice(sequence, piece)
        sequence.placed[piece.layer] = piece.stop

    def commit(self, sequence: Sequence, length: int) -> None:
        """Declare the first `length` tokens complete; refused while any layer lacks rows."""
        sequence.require_usable()
        short = [layer for layer, stop in enumerate(sequence.placed) if stop != length]
        if short:
            raise SliceRefused(f"commit of {length} tokens: layer {short[0]} has {sequence.placed[short[0]]}")
        with broken_on_error(sequence):
            self.commit_rows(sequence, length)
        sequence.length = length

    def rollback(self, sequence: Sequence) -> None:
        """Discard what was placed since the last commit."""
        sequence.require_usable()
        with broken_on_error(sequence):
            self.discard_rows(sequence)
        sequence.advance(0)

    def export(self, sequence: Sequence, start: int = 0) -> Iterator[KVSlice]:
        """The sequence's rows from position `start` on, one slice per layer."""
        sequence.require_room(0)
        if not 0 <= start < sequence.length:
            raise SliceRefused(f"export from token {start} of a sequence of {sequence.length}")
        return self.read_slices(sequence, start)

    def step(self, sequences: Items[Sequence], tokens: Items[int] | Tokens) -> Logits:
        """Feed one token to each sequence and return the logits of the next. Every call may have other sequences."""
        require_batch(sequences, len(tokens), self.max_batch)
        if isinstance(tokens, Items):
            self.require_vocabulary(tokens)
        with broken_on_error(*sequences):
            logits = self.run_step(sequences, tokens)
        for sequence in sequences:
            sequence.advance(1)
        return logits

    def unload(self) -> None:
        """Free weights and KV memory; no sequence may be open. Spec, fingerprint, costs and counters stay."""
        self.loaded = False
        self.release_model()

    def replace(self, unloaded: "Engine") -> None:
        """Continue the counters of an unloaded engine. It must have the same model: prefixes and peers rely on it."""
        if self.fingerprint != unloaded.fingerprint:
            raise EngineUnavailable("The model's files have changed since this node started. Restart the node.")
        self.counters = unloaded.counters

    @abstractmethod
    def release_model(self) -> None:
        """Drop every reference to weights and KV memory, and make the library free what it keeps for reuse."""

    def set_threads(self, count: int) -> None:  # noqa: B027  most devices are no CPU
        """Compute with so many CPU threads from now on. An engine on another device lets `threads` be 0."""

    def leave_thread(self) -> None:  # noqa: B027  most engines have no state per thread
        """Called on the engine's thread before that thread ends."""

    def kv_rows(self, capacity: int) -> int:
        """The most rows of a full layer that a sequence of this capacity takes."""
        return capacity

    @abstractmethod
    def measure_kv(self) -> int: ...

    @abstractmethod
    def allocate(self, capacity: int) -> Any: ...

    @abstractmethod
    def release(self, sequence: Sequence) -> None: ...

    @abstractmethod
    def run_prefill(
        self, sequence: Sequence, tokens: Items[int], emit: Emit | None, scoring: Scoring | None
    ) -> Logits: ...

    @abstractmethod
    def write_slice(self, sequence: Sequence, piece: KVSlice) -> None: ...

    @abstractmethod
    def commit_rows(self, sequence: Sequence, length: int) -> None: ...

    @abstractmethod
    def discard_rows(self, sequence: Sequence) -> None: ...

    @abstractmethod
    def read_slices(self, sequence: Sequence, start: int) -> Iterator[KVSlice]: ...

    @abstractmethod
    def run_step(self, sequences: Items[Sequence], tokens: Items[int] | Tokens) -> Logits: ...

    def require_prompt_logprobs(self) -> None:
        if not self.prompt_logprobs:
            raise PromptLogprobsUnsupported(
                f"the engine {self.name} computes no prompt logprobs: leave out prompt_logprobs, or use another engine"
            )

    def require_vocabulary(self, tokens: Items[int]) -> None:
        """An id beyond the vocabulary crashes MLX and makes CUDA unusable: refuse it here."""
        low, high = min(tokens, default=0), max(tokens, default=0)
        if low < 0 or high >= self.spec.vocabulary:
            invalid = low if low < 0 else high
            raise TokensRefused(f"token {invalid} is not in the vocabulary of {self.spec.vocabulary}")


def token_list(tokens: Items[int] | Tokens) -> list[int]:
    """Tokens on the host; another engine's tokens may be fed to this one."""
    return list(tokens) if isinstance(tokens, Items) else tokens.tolist()


def chunks(tokens: Items[int], size: int) -> Iterable[Items[int]]:
    """A prompt in chunks of `size` tokens; the last may be shorter."""
    return (tokens[at : at + size] for at in range(0, len(tokens), size))
