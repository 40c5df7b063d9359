"""The contract every engine keeps: eight methods over sequences.

A *sequence* is one request's cache inside an engine. It is opened with room for prompt and answer, filled by `prefill`
(computed here) or by `place` and `commit` (computed elsewhere; `rollback` forgets a chunk that never became whole),
advanced by `step`, read by `export`, and closed.

Threads: one thread makes all calls to an engine. `emit` is called on that thread.
Counting: engines count every token that goes through the model, where it goes through. Tests and nodes read these
counters to show that a hand-off recomputed nothing.
Memory: `kv_cost` says what a sequence will take at most, before it is opened; sequences whose costs stay within
`kv_limit_bytes` together have room together (torch may find it in pieces only, and says so: `KVMemoryFull`).
`kv_held_bytes` is what they take now. Keeping to the limit is the caller's business: it knows who can wait.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from numpy import float32
from numpy.typing import NDArray

from disaggregated_inference.errors import (
    ContextTooLong,
    EngineUnavailable,
    KVMemoryFull,
    SequenceBroken,
    SliceRefused,
    TokensRefused,
)
from disaggregated_inference.kv import Fingerprint, KVDType, KVSlice
from disaggregated_inference.models import ModelSpec

Emit = Callable[[KVSlice], None]

# What an engine is, whether or not its weights are in memory.
_KEPT = {"spec", "fingerprint", "dtype", "counters", "live", "kv_limit_bytes", "max_batch", "chunk_tokens"}


class Tokens(Protocol):
    """Chosen tokens that may still be on the device: feed them to the next step before reading them."""

    def __len__(self) -> int: ...

    def tolist(self) -> list[int]: ...


class Logits(Protocol):
    """Scores of the next token, one row per sequence, on the device until someone asks."""

    def greedy(self) -> Tokens: ...

    def numpy(self, rows: Items[int] | None = None) -> NDArray[float32]:
        """On the host: all rows, or only `rows`, in that order."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One request's cache. `length` counts tokens that are whole in every layer; `placed` runs ahead, per layer."""

    capacity: int
    placed: list[int]
    state: Any
    length: int = 0
    computed: int = 0  # prompt tokens that went through the model here
    closed: bool = False
    broken: bool = False


@dataclass(slots=True)
class Counters:
    """Tokens that went through the model, counted at the model's own door."""

    prompt_tokens: int = 0
    step_tokens: int = 0


class Engine(ABC):
    """One loaded model. Subclasses fill in the underscored hooks; checks and counting live here, once.

    A call that is refused changes nothing. One that fails half-way breaks its sequences: the model may have written a
    part of a chunk, and going on from there would give a wrong answer in silence. They can only be closed.
    """

    name: str
    kv_limit_bytes: int  # what all sequences together may take
    own_memory = False  # whether KV memory was taken when the engine was loaded, and nobody else could use it
    max_batch = 256
    warm_lengths: tuple[int, ...] = (64,)  # chunks worth reading once before the first request
    chunk_tokens = 512  # at a time: enough to keep the device busy, not so much that others wait for seconds

    def __init__(self, spec: ModelSpec, fingerprint: Fingerprint, dtype: KVDType) -> None:
        self.spec = spec
        self.fingerprint = fingerprint
        self.dtype = dtype
        self.counters = Counters()
        self.live: set[Sequence] = set()

    def open(self, capacity: int) -> Sequence:
        """Reserve room for `capacity` tokens, prompt and answer together."""
        if capacity > self.spec.context_window:
            raise ContextTooLong(capacity, self.spec.context_window)
        if capacity < 1:
            raise KVMemoryFull(f"a sequence needs room for at least one token, not {capacity}")
        sequence = Sequence(capacity=capacity, placed=[0] * len(self.spec.layout.layers), state=self._open(capacity))
        self.live.add(sequence)
        return sequence

    def close(self, sequence: Sequence) -> None:
        """Give the memory back. Closing twice is harmless."""
        if not sequence.closed:
            sequence.closed = True
            self.live.discard(sequence)
            self._close(sequence)

    def kv_cost(self, capacity: int) -> int:
        """The most bytes a sequence of that capacity takes, whoever it is batched with.

        Of a sliding layer the window, twice: while slices arrive, the committed rows and the new ones are both there.
        """
        rows = sum(2 * plan.window or self._kv_rows(capacity) for plan in self.spec.layout.layers)
        return rows * self.spec.layout.row_bytes(self.dtype)

    def handed_out_bytes(self, tokens: int) -> int:
        """What the slices of a prompt take of the same memory, beside the sequence, until nobody needs them."""
        return 0

    def held_as(self, sequence: Sequence, piece: KVSlice) -> KVSlice:
        """The same rows, which were placed, in the sequence's own memory where others can read it: so that they are
        not there twice."""
        return piece

    @property
    def kv_held_bytes(self) -> int:
        """What the open sequences take now, measured; nothing open, nothing held."""
        return self._kv_held() if self.loaded else 0

    def prefill(self, sequence: Sequence, tokens: Items[int], emit: Emit | None = None) -> Logits:
        """Evaluate one chunk and return the logits of its last position; `emit` gets each layer's slice as it is done.

        Splitting a prompt into chunks is the caller's business: between two chunks it may do other work.
        """
        if not len(tokens):
            raise TokensRefused("a chunk needs at least one token")
        self._require_room(sequence, len(tokens))
        self.require_vocabulary(tokens)
        with whole_or_broken(sequence):
            sequence.computed += len(tokens)
            logits = self._prefill(sequence, tokens, emit)
        self._advance(sequence, len(tokens))
        return logits

    def place(self, sequence: Sequence, piece: KVSlice) -> None:
        """Put one layer's slice in its place. Layers may arrive in any order, the slices of one layer in theirs."""
        self._require_usable(sequence)
        piece.require_fits(self.spec.layout)
        self._require_next(sequence, piece)
        if piece.stop > sequence.capacity:
            raise KVMemoryFull(f"slice up to token {piece.stop} in a sequence opened for {sequence.capacity}")
        piece.wait()
        with whole_or_broken(sequence):
            self._place(sequence, piece)
        sequence.placed[piece.layer] = piece.stop

    def commit(self, sequence: Sequence, length: int) -> None:
        """Declare the first `length` tokens whole: refused while any layer lacks rows."""
        self._require_usable(sequence)
        short = [layer for layer, stop in enumerate(sequence.placed) if stop != length]
        if short:
            raise SliceRefused(f"commit of {length} tokens: layer {short[0]} has {sequence.placed[short[0]]}")
        with whole_or_broken(sequence):
            self._commit(sequence, length)
        sequence.length = length

    def rollback(self, sequence: Sequence) -> None:
        """Forget what was placed since the last commit: the sequence goes on from there."""
        self._require_usable(sequence)
        with whole_or_broken(sequence):
            self._rollback(sequence)
        self._advance(sequence, 0)

    def export(self, sequence: Sequence, start: int = 0) -> Iterator[KVSlice]:
        """The rows this engine holds for positions from `start`, one slice per layer."""
        self._require_room(sequence, 0)
        if not 0 <= start < sequence.length:
            raise SliceRefused(f"export from token {start} of a sequence of {sequence.length}")
        return self._export(sequence, start)

    def step(self, sequences: Items[Sequence], tokens: Items[int] | Tokens) -> Logits:
        """Feed each sequence one token and return the logits of the next. Membership may change at every call."""
        self._require_batch(sequences, tokens)
        with whole_or_broken(*sequences):
            logits = self._step(sequences, tokens)
        for sequence in sequences:
            self._advance(sequence, 1)
        return logits

    @property
    def loaded(self) -> bool:
        return "model" in self.__dict__

    def unload(self) -> None:
        """Give weights and KV memory back; nothing may be open. What the engine is (spec, fingerprint, costs) stays."""
        for name in [name for name in self.__dict__ if name not in _KEPT]:
            del self.__dict__[name]
        self._free()

    def become(self, fresh: "Engine") -> None:
        """Take over an engine that was just loaded, for everyone who holds this one. Counters go on; prefixes, proofs
        and whoever knows this node too, so it must be the same model."""
        if fresh.fingerprint != self.fingerprint:
            raise EngineUnavailable("the model's files have changed since this node started: start it again")
        fresh.counters = self.counters
        self.__dict__ = fresh.__dict__

    def _free(self) -> None:  # noqa: B027
        """Make the library give back what it keeps for later."""

    def leave_thread(self) -> None:  # noqa: B027  most engines keep nothing per thread
        """Called on the engine's thread before that thread ends."""

    def _kv_rows(self, capacity: int) -> int:
        """Rows of a full layer that a sequence of that capacity takes at most."""
        return capacity

    @abstractmethod
    def _kv_held(self) -> int: ...

    @abstractmethod
    def _open(self, capacity: int) -> Any: ...

    @abstractmethod
    def _close(self, sequence: Sequence) -> None: ...

    @abstractmethod
    def _prefill(self, sequence: Sequence, tokens: Items[int], emit: Emit | None) -> Logits: ...

    @abstractmethod
    def _place(self, sequence: Sequence, piece: KVSlice) -> None: ...

    @abstractmethod
    def _commit(self, sequence: Sequence, length: int) -> None: ...

    @abstractmethod
    def _rollback(self, sequence: Sequence) -> None: ...

    @abstractmethod
    def _export(self, sequence: Sequence, start: int) -> Iterator[KVSlice]: ...

    @abstractmethod
    def _step(self, sequences: Items[Sequence], tokens: Items[int] | Tokens) -> Logits: ...

    def _advance(self, sequence: Sequence, count: int) -> None:
        sequence.length += count
        sequence.placed = [sequence.length] * len(sequence.placed)

    def _require_usable(self, sequence: Sequence) -> None:
        if sequence.closed:
            raise SliceRefused("the sequence is closed")
        if sequence.broken:
            raise SequenceBroken("an earlier call on this sequence failed half-way; close it and start again")

    def _require_room(self, sequence: Sequence, count: int) -> None:
        self._require_usable(sequence)
        if sequence.placed.count(sequence.length) != len(sequence.placed):  # every step of every sequence asks
            raise SliceRefused("slices were placed and not committed; commit them or roll back")
        if sequence.length + count > sequence.capacity:
            raise KVMemoryFull(f"{sequence.length + count} tokens in a sequence opened for {sequence.capacity}")

    def require_vocabulary(self, tokens: Items[int]) -> None:
        """An id past the end crashes MLX and stops CUDA for good: it must not get there."""
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.spec.vocabulary:
            wrong = low if low < 0 else high
            raise TokensRefused(f"token {wrong} is not in the vocabulary of {self.spec.vocabulary}")

    def _require_batch(self, sequences: Items[Sequence], tokens: Items[int] | Tokens) -> None:
        count = len(sequences)
        if not 0 < count <= self.max_batch:
            raise TokensRefused(f"a step of {count} sequences; this engine takes 1 to {self.max_batch}")
        if len({id(sequence) for sequence in sequences}) < count:
            raise TokensRefused("a sequence may be in a step only once")
        if len(tokens) != count:
            raise TokensRefused(f"{len(tokens)} tokens for {count} sequences")
        for sequence in sequences:
            self._require_room(sequence, 1)
        if isinstance(tokens, Items):
            self.require_vocabulary(tokens)

    def _require_next(self, sequence: Sequence, piece: KVSlice) -> None:
        """The slice must join on: at the layer's last row, or where a sliding layer's window begins."""
        held = sequence.placed[piece.layer]
        plan = self.spec.layout.layers[piece.layer]
        if piece.start != held and piece.start != plan.first_row(held, piece.stop):
            raise SliceRefused(f"layer {piece.layer}: slice starts at {piece.start}, {held} tokens are held")


@contextmanager
def whole_or_broken(*sequences: Sequence) -> Iterator[None]:
    """Whatever fails in here leaves them neither as they were nor as they should be."""
    try:
        yield
    except BaseException:
        for sequence in sequences:
            sequence.broken = True
        raise


def token_list(tokens: Items[int] | Tokens) -> list[int]:
    """Tokens on the host, wherever they were: those of another engine may be fed to this one."""
    return list(tokens) if isinstance(tokens, Items) else tokens.tolist()


def chunks(tokens: Items[int], size: int) -> Iterable[Items[int]]:
    """A prompt cut into chunks of `size` tokens, the last one shorter."""
    return (tokens[at : at + size] for at in range(0, len(tokens), size))
