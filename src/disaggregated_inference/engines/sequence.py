"""A sequence: one request's KV inside an engine, and what may be done with it in its state."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from disaggregated_inference.errors import KVMemoryFull, SequenceBroken, SliceRefused, TokensRefused
from disaggregated_inference.kv import KVSlice, LayerPlan


@dataclass(eq=False, slots=True)
class Sequence:
    """`length` counts tokens that are complete in every layer; `placed` runs ahead, per layer."""

    capacity: int
    placed: list[int]
    state: Any
    length: int = 0
    computed: int = 0  # prompt tokens that went through the model here
    closed: bool = False
    broken: bool = False

    def advance(self, count: int) -> None:
        self.length += count
        self.placed = [self.length] * len(self.placed)

    def require_usable(self) -> None:
        if self.closed:
            raise SliceRefused("the sequence is closed")
        if self.broken:
            raise SequenceBroken("an earlier call on this sequence failed; close it and start again")

    def require_room(self, count: int) -> None:
        self.require_usable()
        if self.placed.count(self.length) != len(self.placed):  # fast: every step checks every sequence
            raise SliceRefused("slices were placed and not committed; commit or roll back first")
        if self.length + count > self.capacity:
            raise KVMemoryFull(f"{self.length + count} tokens in a sequence with a capacity of {self.capacity}")

    def require_next(self, piece: KVSlice, plan: LayerPlan) -> None:
        """The slice must continue the layer: at its last row, or where a sliding layer's window begins."""
        held = self.placed[piece.layer]
        if piece.start != held and piece.start != plan.first_row(held, piece.stop):
            raise SliceRefused(f"layer {piece.layer}: slice starts at {piece.start}, {held} tokens are held")
        if piece.stop > self.capacity:
            raise KVMemoryFull(f"slice up to token {piece.stop} in a sequence with a capacity of {self.capacity}")


def require_batch(sequences: Items[Sequence], tokens: int, most: int) -> None:
    """Whether these sequences can take a step with so many tokens."""
    count = len(sequences)
    if not 0 < count <= most:
        raise TokensRefused(f"a step of {count} sequences; this engine takes 1 to {most}")
    if len({id(sequence) for sequence in sequences}) < count:
        raise TokensRefused("a sequence may be in a step only once")
    if tokens != count:
        raise TokensRefused(f"{tokens} tokens for {count} sequences")
    for sequence in sequences:
        sequence.require_room(1)


@contextmanager
def broken_on_error(*sequences: Sequence) -> Iterator[None]:
    """A failure inside leaves the sequences in an unknown state: mark them broken."""
    try:
        yield
    except BaseException:
        for sequence in sequences:
            sequence.broken = True
        raise
