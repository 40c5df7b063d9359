"""Prefill and decode nodes, reduced to their memory: the real admission and the real row allocator, one step at a time.

As on a node, a claim that admission starts is posted to the scheduler, which opens the sequence. No threads, no time of
its own."""

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from disaggregated_inference.engines.row_allocator import RowAllocator
from disaggregated_inference.errors import DisaggError, KVMemoryFull
from disaggregated_inference.node.admission import Admission, Claim

ROW_BYTES = 10
SLOTS = 4


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class MemoryNode:
    """`opens_first` is how nodes work. False: as they did, with a context that goes out before the memory is there."""

    def __init__(self, name: str, rows: int, clock: Clock, *, opens_first: bool = True) -> None:
        self.name, self.opens_first, self._size, self._clock = name, opens_first, rows, clock
        self.restart()

    def restart(self) -> None:
        self.rows, self.posted = RowAllocator(self._size), deque[Callable[[], None]]()
        self.claims = list[Claim]()
        self.admission = Admission(self._size * ROW_BYTES, SLOTS, max_waiting=64, clock=self._clock)

    def step(self) -> bool:
        """What the scheduler's thread does next."""
        if not self.posted:
            return False
        self.posted.popleft()()
        return True

    @property
    def oldest(self) -> Claim | None:
        waiting = (claim for claim in self.claims if claim.state == "waiting")
        return min(waiting, key=lambda claim: claim.number, default=None)

    def could_start(self, claim: Claim) -> bool:
        """Its memory is free, in one piece."""
        held = self.admission
        if held.held_bytes + claim.cost_bytes > held.limit_bytes or held.held_slots + claim.slots > held.max_slots:
            return False
        try:
            copy.deepcopy(self.rows).take(claim.cost_bytes // ROW_BYTES)
        except KVMemoryFull:
            return False
        return True


@dataclass(eq=False)
class Part:
    """A request's memory on one node."""

    node: MemoryNode
    size: int
    on_admitted: Callable[[], None]
    on_refused: Callable[[DisaggError], None]
    claim: Claim | None = None
    row: int | None = None
    ended: bool = False

    def request(self, wait_s: float) -> None:
        claim = self.node.admission.request(self.size * ROW_BYTES, 1, self._start, self.on_refused, wait_s)
        self.node.claims.append(claim)
        self.claim = claim
        if self.ended:
            self.end()

    def _start(self, claim: Claim) -> None:
        self.claim = claim
        if not self.node.opens_first:
            self.on_admitted()
        self.node.posted.append(self._open)

    def _open(self) -> None:
        if self.ended or self.row is not None:
            return
        assert self.claim
        try:
            self.row = self.node.rows.take(self.size)
        except KVMemoryFull:
            return self.node.admission.requeue(self.claim)
        if self.node.opens_first:
            self.on_admitted()

    def end(self) -> None:
        """Rows first, then the promise of them."""
        self.ended = True
        if self.row is not None:
            self.node.rows.give_back(self.row)
            self.row = None
        if self.claim:
            self.node.admission.release(self.claim)


@dataclass(eq=False)
class MemoryRequest:
    """Prefill memory first, then decode memory; the prefill memory is free when the KV has moved."""

    prefill: MemoryNode
    decode: MemoryNode
    prompt: int
    output: int
    wait_s: float
    over: bool = False
    parts: list[Part] = field(default_factory=list)

    def begin(self) -> None:
        self.ask(self.prefill, self.prompt, self._prefill_admitted)

    def _prefill_admitted(self) -> None:
        if not self.over and len(self.parts) == 1:
            self.ask(self.decode, self.prompt + self.output, lambda: None)

    def ask(self, node: MemoryNode, size: int, on_admitted: Callable[[], None]) -> None:
        part = Part(node, size, on_admitted, lambda error: self.cancel())
        self.parts.append(part)
        try:
            part.request(self.wait_s)
        except DisaggError:  # the queue is full
            self.cancel()

    def cancel(self) -> None:
        self.over = True
        for part in self.parts:
            part.end()

    def advance(self) -> bool:
        """The next thing that happens by itself: the KV moves once both have memory, then the answer ends."""
        if self.over or len(self.parts) < 2 or any(part.row is None for part in self.parts if not part.ended):
            return False
        if not self.parts[0].ended:
            self.parts[0].end()
        else:
            self.cancel()
        return True
