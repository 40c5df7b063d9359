"""Who may take KV memory, and when: in order of asking, by bytes and by slots, without a thread that waits.

Callbacks run outside the lock, on whatever thread gave memory back or asked. They may ask and release themselves.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from disaggregated_inference.errors import DisaggError, KVMemoryFull, NodeBusy, RequestTooLarge

log = logging.getLogger(__name__)

_LAST_RELEASES = 32
_UNKNOWN_S = 5  # what to tell people who ask for the first time when nothing was released yet
_LONGEST_RETRY_S = 60


@dataclass(slots=True, eq=False)
class Claim:
    """One request's memory: waited for, then held, then ended. For a moment, when it waited too long, refused."""

    cost_bytes: int
    slots: int
    start: Callable[["Claim"], None]
    refuse: Callable[[DisaggError], None]
    number: int
    asked_at: float
    deadline: float
    state: Literal["waiting", "held", "refused", "ended"] = "waiting"
    held_after: int = 0  # releases, when its memory was reserved
    blocked: bool = False  # came back; trying again is useless before another claim gives memory back

    def may_be_passed(self, now: float) -> bool:
        """Who waits for one piece of memory need not keep the others from the rest. In the second half of its time it
        does all the same: each of them takes something of what is to become one piece."""
        return self.blocked and now < (self.asked_at + self.deadline) / 2


_Due = list[tuple[Claim, DisaggError | None]]


class Admission:
    """Who may take KV memory, in order of asking: a long prompt is not starved by short ones. Nobody is overtaken but
    who has found the memory in pieces only, and not for ever: `Claim.may_be_passed`."""

    def __init__(
        self,
        limit_bytes: int,
        most_slots: int,
        most_waiting: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_bytes, self.most_slots, self.most_waiting = limit_bytes, most_slots, most_waiting
        self.held_bytes = self.held_slots = self.peak_bytes = 0
        self._clock, self._lock, self._calling = clock, threading.Lock(), threading.local()
        self._line: deque[Claim] = deque()
        self._held: set[Claim] = set()
        self._asked = self._releases = 0
        self._held_s: deque[float] = deque(maxlen=_LAST_RELEASES)  # by all together, from one release to the next
        self._held_since_s, self._looked_at = 0.0, clock()
        self._closed: DisaggError | None = None

    @property
    def waiting(self) -> int:
        return len(self._line)

    def ask(
        self,
        cost_bytes: int,
        slots: int,
        start: Callable[[Claim], None],
        refuse: Callable[[DisaggError], None],
        wait_s: float,
    ) -> Claim:
        """Stand in line. `start` is called with the claim once the memory is reserved, perhaps before this returns;
        `refuse` when that took too long. What can never fit, or need not wait, is refused here and now."""
        self._require_possible(cost_bytes, slots)
        with self._lock:
            if self._closed:
                raise self._closed.with_traceback(None)
            now, self._asked = self._clock(), self._asked + 1
            claim = Claim(cost_bytes, slots, start, refuse, self._asked, now, now + wait_s)
            if not self._is_free(cost_bytes, slots):
                self._require_place(claim, wait_s)
            self._line.append(claim)
            due = self._let_in()
        self._tell(due)
        return claim

    def release(self, claim: Claim) -> None:
        """It ends, whatever it was doing: a second time does nothing. One that waits is not called any more."""
        with self._lock:
            if claim.state == "waiting":
                self._line.remove(claim)
            elif claim.state == "held":
                self._give_back(claim)
                self._releases += 1
                self._held_s.append(self._held_since_s)
                self._held_since_s = 0.0
                self._unblock()
            claim.state = "ended"
            due = self._let_in()
        self._tell(due)

    def again(self, claim: Claim) -> None:
        """The promised memory is there, but not in one piece. Back to its place in line until another claim ends (at
        once, if one did since); where there is no other, waiting would be for nothing."""
        with self._lock:
            if claim.state != "held":
                return
            self._give_back(claim)
            if not self._held:  # nobody is left whom the others could wait for
                self._unblock()
            due: _Due = []
            if not self._closed and (self._held or self._releases > claim.held_after):
                claim.state, claim.blocked = "waiting", self._releases == claim.held_after
                self._line.insert(sum(other.number < claim.number for other in self._line), claim)
            else:
                due = [self._refused(claim, self._closed or self._full(claim, self._fragmented(claim)))]
            due += self._let_in()
        self._tell(due)

    def sweep(self) -> None:
        """Refuse what waited too long."""
        with self._lock:
            now = self._clock()
            late = [claim for claim in self._line if claim.deadline <= now]
            for claim in late:
                self._line.remove(claim)
            due: _Due = [self._refused(claim, self._full(claim, self._waited(claim, now))) for claim in late]
            due += self._let_in()
        self._tell(due)

    def close(self, error: DisaggError) -> None:
        """Refuse everything that waits, and everyone who asks from now on. What is held stays until it is released."""
        with self._lock:
            self._closed = error
            due: _Due = [self._refused(claim, error) for claim in self._line]
            self._line.clear()
        self._tell(due)

    def retry_after_s(self) -> int:
        """When someone new who needs little might have a turn."""
        with self._lock:
            return self._retry_after_s(1, 1)

    def _retry_after_s(self, cost_bytes: int, slots: int) -> int:
        """Those in line, at the pace of the last releases: as long as memory was held for each of them, shared by those
        who hold some now. So time in which nobody held any does not count, nor how few they were."""
        if self._is_free(cost_bytes, slots):
            return 1
        if not self._held_s:
            return _UNKNOWN_S
        self._look_at_clock()
        each_s = sum(self._held_s) / len(self._held_s)
        if self._held_since_s > each_s:  # the next is late
            each_s = (sum(self._held_s) + self._held_since_s) / (len(self._held_s) + 1)
        turns = (len(self._line) + 1) / max(1, len(self._held))
        return max(1, min(_LONGEST_RETRY_S, round(turns * each_s)))

    def _look_at_clock(self) -> None:
        """Whenever someone begins or ends to hold memory: what those who did have held since it was last looked at."""
        now = self._clock()
        self._held_since_s += len(self._held) * (now - self._looked_at)
        self._looked_at = now

    def _require_possible(self, cost_bytes: int, slots: int) -> None:
        if cost_bytes > self.limit_bytes or slots > self.most_slots:
            raise RequestTooLarge(
                f"{cost_bytes} bytes of KV memory and {slots} slots can never fit {self.limit_bytes} bytes and "
                f"{self.most_slots} slots; ask for a shorter answer or fewer choices, or start it with more --kv-memory"
            )

    def _require_place(self, claim: Claim, wait_s: float) -> None:
        if wait_s <= 0:
            raise self._busy(claim, f"no KV memory is free now, {len(self._line)} requests wait for it")
        if len(self._line) >= self.most_waiting:
            raise self._busy(claim, f"{len(self._line)} requests wait for KV memory already")

    def _busy(self, claim: Claim, words: str) -> NodeBusy:
        error = NodeBusy(f"{words}; try again later")
        error.retry_after_s = self._retry_after_s(claim.cost_bytes, claim.slots)
        return error

    def _full(self, claim: Claim, words: str) -> KVMemoryFull:
        error = KVMemoryFull(words)
        error.retry_after_s = self._retry_after_s(claim.cost_bytes, claim.slots)
        return error

    def _fits(self, cost_bytes: int, slots: int) -> bool:
        return self.held_bytes + cost_bytes <= self.limit_bytes and self.held_slots + slots <= self.most_slots

    def _is_free(self, cost_bytes: int, slots: int) -> bool:
        """For someone new, now."""
        now = self._clock()
        return self._fits(cost_bytes, slots) and all(claim.may_be_passed(now) for claim in self._line)

    def _let_in(self) -> _Due:
        """One after the other as long as they fit."""
        due: _Due = []
        self._look_at_clock()
        while (claim := self._next()) and self._fits(claim.cost_bytes, claim.slots):
            self._line.remove(claim)
            claim.state, claim.held_after = "held", self._releases
            self._held.add(claim)
            self.held_bytes += claim.cost_bytes
            self.held_slots += claim.slots
            due.append((claim, None))
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return due

    def _next(self) -> Claim | None:
        """The first in line, without those that it may pass."""
        now = self._clock()
        first = next((claim for claim in self._line if not claim.may_be_passed(now)), None)
        return first if first and not first.blocked else None

    def _give_back(self, claim: Claim) -> None:
        self._look_at_clock()
        self._held.remove(claim)
        self.held_bytes -= claim.cost_bytes
        self.held_slots -= claim.slots

    def _unblock(self) -> None:
        for claim in self._line:
            claim.blocked = False

    def _refused(self, claim: Claim, error: DisaggError) -> tuple[Claim, DisaggError]:
        claim.state = "refused"
        return claim, error

    def _waited(self, claim: Claim, now: float) -> str:
        waited_s = now - claim.asked_at
        if claim.blocked and self._fits(claim.cost_bytes, claim.slots):
            return self._fragmented(claim, f", nor had for {waited_s:.1f} s")
        return (
            f"no KV memory within {waited_s:.1f} s: {claim.cost_bytes} bytes and {claim.slots} slots are "
            f"needed, {self.held_bytes} of {self.limit_bytes} bytes and {self.held_slots} of {self.most_slots} slots "
            "are held; try again later"
        )

    def _fragmented(self, claim: Claim, waited: str = "") -> str:
        others = f"others hold only {self.held_bytes}" if self.held_bytes else "nobody else holds any"
        return (
            f"the engine has no {claim.cost_bytes} bytes of KV memory in one piece{waited}, though {others} of the "
            f"{self.limit_bytes}; ask for a shorter answer, or give the node more memory"
        )

    def _tell(self, due: _Due) -> None:
        """One call after the other, also when one of them leads to more: a long line must not become a deep stack."""
        if (queue := getattr(self._calling, "queue", None)) is not None:
            queue.extend(due)
            return
        self._calling.queue = queue = deque(due)
        try:
            while queue:
                self._call(*queue.popleft())
        finally:
            self._calling.queue = None

    def _call(self, claim: Claim, error: DisaggError | None) -> None:
        with self._lock:
            if claim.state != ("refused" if error else "held"):  # released meanwhile
                return
            claim.state = "ended" if error else "held"
        try:
            claim.refuse(error) if error else claim.start(claim)
        except Exception as failure:
            log.exception("a request that had its turn could not begin")
            self._fail(claim, failure)

    def _fail(self, claim: Claim, failure: Exception) -> None:
        """Nobody waits for an answer that does not come: its memory goes back, and it is told so."""
        was_held = claim.state == "held"
        self.release(claim)
        if was_held:
            error = failure if isinstance(failure, DisaggError) else DisaggError(f"it could not begin: {failure}")
            self._tell([self._refused(claim, error)])
