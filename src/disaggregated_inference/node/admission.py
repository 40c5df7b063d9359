"""Admission: which requests may use KV memory, first come, first served, by bytes and by slots. No thread waits in it.

Callbacks run outside the lock, on the thread that requested or released memory. They may request and release memory.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from disaggregated_inference.errors import DisaggError, KVMemoryFull, NodeBusy, RequestTooLarge
from disaggregated_inference.timeouts import NodeTimeouts

log = logging.getLogger(__name__)

_MEASURED_RELEASES = 32


@dataclass(slots=True, eq=False)
class Claim:
    """The memory of one request: waiting, then held, then ended. A late one is refused until its callback has run."""

    cost_bytes: int
    slots: int
    start: Callable[["Claim"], None]
    refuse: Callable[[DisaggError], None]
    number: int
    requested_at: float
    deadline: float
    state: Literal["waiting", "held", "refused", "ended"] = "waiting"
    held_after: int = 0  # number of releases when its memory was reserved
    blocked: bool = False  # requeued: it must not be tried again before another claim is released

    def can_be_overtaken(self, now: float) -> bool:
        """A claim that waits for memory in one piece does not block the others. In the second half of its time it
        does: each of them takes a part of what is to become one piece."""
        return self.blocked and now < (self.requested_at + self.deadline) / 2


_Calls = list[tuple[Claim, DisaggError | None]]  # claims to start, or to refuse with the error


class Admission:
    """First come, first served, so that short prompts do not starve a long one. Only a claim that found the memory in
    pieces is overtaken, and only for a while: see `Claim.can_be_overtaken`."""

    def __init__(
        self,
        limit_bytes: int,
        max_slots: int,
        max_waiting: int = 256,
        clock: Callable[[], float] = time.monotonic,
        timeouts: NodeTimeouts = NodeTimeouts(),
    ) -> None:
        self._timeouts = timeouts
        self.limit_bytes, self.max_slots, self.max_waiting = limit_bytes, max_slots, max_waiting
        self.held_bytes = self.held_slots = self.peak_bytes = 0
        self._clock, self._lock, self._thread = clock, threading.Lock(), threading.local()
        self._waiting: deque[Claim] = deque()
        self._held: set[Claim] = set()
        self._requests = self._releases = 0
        self._held_s: deque[float] = deque(maxlen=_MEASURED_RELEASES)  # held by all claims, from release to release
        self._held_since_release_s, self._measured_at = 0.0, clock()
        self._closed: DisaggError | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def request(
        self,
        cost_bytes: int,
        slots: int,
        start: Callable[[Claim], None],
        refuse: Callable[[DisaggError], None],
        wait_s: float,
    ) -> Claim:
        """Call `start` with the claim when the memory is reserved, perhaps before this returns, or `refuse` after
        `wait_s`. Raises at once where the memory can never fit, or where the queue is full."""
        self._require_possible(cost_bytes, slots)
        with self._lock:
            if self._closed:
                raise self._closed.with_traceback(None)
            now, self._requests = self._clock(), self._requests + 1
            claim = Claim(cost_bytes, slots, start, refuse, self._requests, now, now + wait_s)
            if not self._is_free(cost_bytes, slots):
                self._require_place(claim, wait_s)
            self._waiting.append(claim)
            calls = self._admit()
        self._run(calls)
        return claim

    def release(self, claim: Claim) -> None:
        """End a claim in any state. A waiting claim is not called any more; a second release does nothing."""
        with self._lock:
            if claim.state == "waiting":
                self._waiting.remove(claim)
            elif claim.state == "held":
                self._free(claim)
                self._releases += 1
                self._held_s.append(self._held_since_release_s)
                self._held_since_release_s = 0.0
                self._unblock()
            claim.state = "ended"
            calls = self._admit()
        self._run(calls)

    def requeue(self, claim: Claim) -> None:
        """The engine does not have the reserved memory in one piece. The claim goes back to its place in the queue
        until another claim ends. Where no other claim holds memory, it is refused."""
        with self._lock:
            if claim.state != "held":
                return
            self._free(claim)
            if not self._held:  # no release will come: the others must not wait for one
                self._unblock()
            calls: _Calls = []
            if not self._closed and (self._held or self._releases > claim.held_after):
                claim.state, claim.blocked = "waiting", self._releases == claim.held_after
                self._waiting.insert(sum(other.number < claim.number for other in self._waiting), claim)
            else:
                calls = [self._refusal(claim, self._closed or self._full(claim, self._fragmented(claim)))]
            calls += self._admit()
        self._run(calls)

    def sweep(self) -> None:
        """Refuse the claims that waited too long."""
        with self._lock:
            now = self._clock()
            late = [claim for claim in self._waiting if claim.deadline <= now]
            for claim in late:
                self._waiting.remove(claim)
            calls: _Calls = [self._refusal(claim, self._full(claim, self._late(claim, now))) for claim in late]
            calls += self._admit()
        self._run(calls)

    def close(self, error: DisaggError) -> None:
        """Refuse all waiting and all later claims. Held memory stays until it is released."""
        with self._lock:
            self._closed = error
            calls: _Calls = [self._refusal(claim, error) for claim in self._waiting]
            self._waiting.clear()
        self._run(calls)

    def retry_after_s(self) -> int:
        """When a new request that needs little memory might be admitted."""
        with self._lock:
            return self._retry_after_s(1, 1)

    def _retry_after_s(self, cost_bytes: int, slots: int) -> int:
        """The length of the queue times the time per claim, divided by the number of claims that hold memory. The time
        per claim comes from the last releases; time in which no memory was held does not count."""
        if self._is_free(cost_bytes, slots):
            return 1
        if not self._held_s:
            return self._timeouts.retry_hint_s
        self._measure()
        claim_s = sum(self._held_s) / len(self._held_s)
        if self._held_since_release_s > claim_s:  # the next release is late
            claim_s = (sum(self._held_s) + self._held_since_release_s) / (len(self._held_s) + 1)
        rounds = (len(self._waiting) + 1) / max(1, len(self._held))
        return max(1, min(self._timeouts.max_retry_hint_s, round(rounds * claim_s)))

    def _measure(self) -> None:
        """Add the time that claims held memory since the last call. Before any change of the held claims."""
        now = self._clock()
        self._held_since_release_s += len(self._held) * (now - self._measured_at)
        self._measured_at = now

    def _require_possible(self, cost_bytes: int, slots: int) -> None:
        if cost_bytes > self.limit_bytes or slots > self.max_slots:
            raise RequestTooLarge(
                f"{cost_bytes} bytes of KV memory and {slots} slots can never fit {self.limit_bytes} bytes and "
                f"{self.max_slots} slots; request fewer tokens or choices, or start the node with more --kv-memory"
            )

    def _require_place(self, claim: Claim, wait_s: float) -> None:
        if wait_s <= 0:
            raise self._busy(claim, f"no KV memory is free, {len(self._waiting)} requests wait for it")
        if len(self._waiting) >= self.max_waiting:
            raise self._busy(claim, f"{len(self._waiting)} requests wait for KV memory already")

    def _busy(self, claim: Claim, reason: str) -> NodeBusy:
        error = NodeBusy(f"{reason}; try again later")
        error.retry_after_s = self._retry_after_s(claim.cost_bytes, claim.slots)
        return error

    def _full(self, claim: Claim, reason: str) -> KVMemoryFull:
        error = KVMemoryFull(reason)
        error.retry_after_s = self._retry_after_s(claim.cost_bytes, claim.slots)
        return error

    def _fits(self, cost_bytes: int, slots: int) -> bool:
        return self.held_bytes + cost_bytes <= self.limit_bytes and self.held_slots + slots <= self.max_slots

    def _is_free(self, cost_bytes: int, slots: int) -> bool:
        """For a new request, without waiting."""
        now = self._clock()
        return self._fits(cost_bytes, slots) and all(claim.can_be_overtaken(now) for claim in self._waiting)

    def _admit(self) -> _Calls:
        """Reserve memory for waiting claims, in order, as long as they fit."""
        calls: _Calls = []
        self._measure()
        while (claim := self._next()) and self._fits(claim.cost_bytes, claim.slots):
            self._waiting.remove(claim)
            claim.state, claim.held_after = "held", self._releases
            self._held.add(claim)
            self.held_bytes += claim.cost_bytes
            self.held_slots += claim.slots
            calls.append((claim, None))
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return calls

    def _next(self) -> Claim | None:
        """The first waiting claim, without those that it may overtake."""
        now = self._clock()
        first = next((claim for claim in self._waiting if not claim.can_be_overtaken(now)), None)
        return first if first and not first.blocked else None

    def _free(self, claim: Claim) -> None:
        self._measure()
        self._held.remove(claim)
        self.held_bytes -= claim.cost_bytes
        self.held_slots -= claim.slots

    def _unblock(self) -> None:
        for claim in self._waiting:
            claim.blocked = False

    def _refusal(self, claim: Claim, error: DisaggError) -> tuple[Claim, DisaggError]:
        claim.state = "refused"
        return claim, error

    def _late(self, claim: Claim, now: float) -> str:
        waited_s = now - claim.requested_at
        if claim.blocked and self._fits(claim.cost_bytes, claim.slots):
            return self._fragmented(claim, f" within {waited_s:.1f} s")
        return (
            f"no KV memory within {waited_s:.1f} s: {claim.cost_bytes} bytes and {claim.slots} slots are "
            f"needed, {self.held_bytes} of {self.limit_bytes} bytes and {self.held_slots} of {self.max_slots} slots "
            "are held; try again later"
        )

    def _fragmented(self, claim: Claim, waited: str = "") -> str:
        return (
            f"the engine has no {claim.cost_bytes} bytes of KV memory in one piece{waited}, though other requests hold "
            f"only {self.held_bytes} of the {self.limit_bytes}; request fewer tokens, or give the node more memory"
        )

    def _run(self, calls: _Calls) -> None:
        """One callback after the other, also where a callback leads to more: a long queue must not become a deep
        stack."""
        if (queue := getattr(self._thread, "calls", None)) is not None:
            queue.extend(calls)
            return
        self._thread.calls = queue = deque(calls)
        try:
            while queue:
                self._call(*queue.popleft())
        finally:
            self._thread.calls = None

    def _call(self, claim: Claim, error: DisaggError | None) -> None:
        with self._lock:
            if claim.state != ("refused" if error else "held"):  # released meanwhile
                return
            claim.state = "ended" if error else "held"
        try:
            claim.refuse(error) if error else claim.start(claim)
        except Exception as failure:
            log.exception("an admitted request could not start")
            self._fail(claim, failure)

    def _fail(self, claim: Claim, failure: Exception) -> None:
        """Release the memory of a request that could not start, and refuse it."""
        was_held = claim.state == "held"
        self.release(claim)
        if was_held:
            error = failure if isinstance(failure, DisaggError) else DisaggError(f"cannot start: {failure}")
            self._run([self._refusal(claim, error)])
