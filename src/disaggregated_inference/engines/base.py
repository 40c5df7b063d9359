"""The contract every engine keeps: seven methods over sequences.

A *sequence* is one request's cache inside an engine. It is opened with room for prompt and answer, filled by `prefill`
(compute here) or by `place` + `commit` (computed elsewhere), advanced by `step`, and closed.

Threads: one thread makes all calls to an engine. `emit` is called on that thread.
Counting: engines count every token that goes through the model, where it goes through. Tests and nodes read these
counters to show that a hand-off recomputed nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Protocol

from numpy import float32
from numpy.typing import NDArray

from disaggregated_inference.errors import ContextTooLong, KVMemoryFull, SliceRefused
from disaggregated_inference.kv import Fingerprint, KVDType, KVSlice
from disaggregated_inference.models import ModelSpec

Emit = Callable[[KVSlice], None]


class Tokens(Protocol):
    """Chosen tokens that may still be on the device: feed them to the next step before reading them."""

    def tolist(self) -> list[int]: ...


class Logits(Protocol):
    """Scores of the next token, one row per sequence, on the device until someone asks."""

    def greedy(self) -> Tokens: ...

    def numpy(self) -> NDArray[float32]: ...


@dataclass(eq=False, slots=True)
class Sequence:
    """One request's cache. `length` counts tokens that are whole in every layer; `placed` runs ahead, per layer."""

    capacity: int
    placed: list[int]
    state: Any
    length: int = 0
    closed: bool = False


@dataclass(slots=True)
class Counters:
    """Tokens that went through the model, counted at the model's own door."""

    prompt_tokens: int = 0
    step_tokens: int = 0


class Engine(ABC):
    """One loaded model. Subclasses fill in the underscored hooks; checks and counting live here, once."""

    name: str

    def __init__(self, spec: ModelSpec, fingerprint: Fingerprint, dtype: KVDType) -> None:
        self.spec = spec
        self.fingerprint = fingerprint
        self.dtype = dtype
        self.counters = Counters()

    def open(self, capacity: int) -> Sequence:
        """Reserve room for `capacity` tokens, prompt and answer together."""
        if capacity > self.spec.context_window:
            raise ContextTooLong(capacity, self.spec.context_window)
        if capacity < 1:
            raise KVMemoryFull(f"a sequence needs room for at least one token, not {capacity}")
        return Sequence(capacity=capacity, placed=[0] * len(self.spec.layout.layers), state=self._open(capacity))

    def close(self, sequence: Sequence) -> None:
        """Give the memory back. Closing twice is harmless."""
        if not sequence.closed:
            sequence.closed = True
            self._close(sequence)

    def prefill(self, sequence: Sequence, tokens: Items[int], emit: Emit | None = None) -> Logits:
        """Evaluate one chunk and return the logits of its last position; `emit` gets each layer's slice as it is done.

        Splitting a prompt into chunks is the caller's business: between two chunks it may do other work.
        """
        self._require_room(sequence, len(tokens))
        if not len(tokens):
            raise SliceRefused("a chunk needs at least one token")
        logits = self._prefill(sequence, tokens, emit)
        self._advance(sequence, len(tokens))
        return logits

    def place(self, sequence: Sequence, piece: KVSlice) -> None:
        """Put one layer's slice in its place. Layers may arrive in any order, the slices of one layer in theirs."""
        self._require_open(sequence)
        piece.require_fits(self.spec.layout)
        self._require_next(sequence, piece)
        if piece.stop > sequence.capacity:
            raise KVMemoryFull(f"slice up to token {piece.stop} in a sequence opened for {sequence.capacity}")
        piece.wait()
        self._place(sequence, piece)
        sequence.placed[piece.layer] = piece.stop

    def commit(self, sequence: Sequence, length: int) -> None:
        """Declare the first `length` tokens whole: refused while any layer lacks rows."""
        self._require_open(sequence)
        short = [layer for layer, stop in enumerate(sequence.placed) if stop != length]
        if short:
            raise SliceRefused(f"commit of {length} tokens: layer {short[0]} has {sequence.placed[short[0]]}")
        self._commit(sequence, length)
        sequence.length = length

    @abstractmethod
    def export(self, sequence: Sequence, start: int = 0) -> Iterator[KVSlice]:
        """The rows this engine holds for positions from `start`, one slice per layer."""

    def step(self, sequences: Items[Sequence], tokens: Items[int] | Tokens) -> Logits:
        """Feed each sequence one token and return the logits of the next. Membership may change at every call."""
        for sequence in sequences:
            self._require_room(sequence, 1)
        logits = self._step(sequences, tokens)
        for sequence in sequences:
            self._advance(sequence, 1)
        return logits

    def shutdown(self) -> None:  # noqa: B027  most engines have nothing to give back but memory
        """Release the device."""

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
    def _step(self, sequences: Items[Sequence], tokens: Items[int] | Tokens) -> Logits: ...

    def _advance(self, sequence: Sequence, count: int) -> None:
        sequence.length += count
        sequence.placed = [sequence.length] * len(sequence.placed)

    def _require_open(self, sequence: Sequence) -> None:
        if sequence.closed:
            raise SliceRefused("the sequence is closed")

    def _require_room(self, sequence: Sequence, count: int) -> None:
        self._require_open(sequence)
        if any(stop != sequence.length for stop in sequence.placed):
            raise SliceRefused("slices were placed and not committed")
        if sequence.length + count > sequence.capacity:
            raise KVMemoryFull(f"{sequence.length + count} tokens in a sequence opened for {sequence.capacity}")

    def _require_next(self, sequence: Sequence, piece: KVSlice) -> None:
        """The slice must join on: at the layer's last row, or where a sliding layer's window begins."""
        held = sequence.placed[piece.layer]
        plan = self.spec.layout.layers[piece.layer]
        if piece.start != held and piece.start != plan.first_row(held, piece.stop):
            raise SliceRefused(f"layer {piece.layer}: slice starts at {piece.start}, {held} tokens are held")


def token_list(tokens: Items[int] | Tokens) -> list[int]:
    """Tokens on the host, wherever they were: those of another engine may be fed to this one."""
    return list(tokens) if isinstance(tokens, Items) else tokens.tolist()


def chunks(tokens: Items[int], size: int) -> Iterable[Items[int]]:
    """A prompt cut into chunks of `size` tokens, the last one shorter."""
    return (tokens[at : at + size] for at in range(0, len(tokens), size))
