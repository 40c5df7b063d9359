"""The KV memory of one engine, shared by the roles of a node: admission, open sequences and the prefix cache."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from disaggregated_inference.engines import Engine, Sequence, available_bytes
from disaggregated_inference.errors import BadRequest, NodeBusy, NodeDraining
from disaggregated_inference.kv.prefix_cache import DiskTier, PrefixCache
from disaggregated_inference.node.admission import Admission
from disaggregated_inference.node.scheduler import Scheduler
from disaggregated_inference.timeouts import NodeTimeouts

log = logging.getLogger(__name__)

_PREFIX_SHARE = 4  # a quarter of the memory is for the prefix cache


class KVMemory:
    """Sequences are opened and closed on the scheduler's thread; any thread may use the rest."""

    def __init__(
        self,
        scheduler: Scheduler,
        kv_bytes: int = 0,
        prefix_bytes: int | None = None,
        disk: DiskTier | None = None,
        max_waiting: int = 256,
        both_roles: bool = False,
        timeouts: NodeTimeouts = NodeTimeouts(),
    ) -> None:
        self.scheduler, self._timeouts = scheduler, timeouts
        cache_bytes = self.default_prefix_bytes(scheduler.engine) if prefix_bytes is None else prefix_bytes
        limit = kv_bytes or self.engine.kv_limit_bytes
        if not kv_bytes and not self.engine.preallocates_kv:
            limit = max(limit - cache_bytes, 0)
        parts = 2 if both_roles else 1
        self._require_useful(limit // parts)
        self.prefixes = PrefixCache(self.engine.fingerprint, self.engine.dtype, cache_bytes, disk=disk)
        slots = self.engine.max_batch
        prefill_slots = max(1, slots // 4) if both_roles else 0
        admission = partial(Admission, max_waiting=max_waiting, timeouts=timeouts)
        self.admission = admission(limit // parts, max(1, slots - prefill_slots))
        # Where one engine has both roles, KV that waits to be fetched must leave memory for the requests that fetch it.
        self.prefill_admission = admission(limit // 2, prefill_slots) if both_roles else self.admission
        self.draining = False
        self.faults = 0  # how often `check` found a difference
        self.held_bytes = self.peak_held_bytes = 0  # as the engine last reported
        self._reserved: dict[Sequence, int] = {}  # bytes of the sequences that admission has reserved memory for
        self.unreserved: set[Sequence] = set()
        self._checked_at = 0.0
        self._idle_s, self._used_at = 0.0, time.monotonic()
        self._ticks: list[Callable[[], None]] = [
            self.admission.sweep,
            self.prefill_admission.sweep,
            self._unload_if_idle,
        ]
        self._closing = threading.Event()
        scheduler.idle = self.check
        threading.Thread(target=self._tick, name="kv-memory", daemon=True).start()

    @property
    def engine(self) -> Engine:
        return self.scheduler.engine

    @staticmethod
    def default_prefix_bytes(engine: Engine) -> int:
        """A share of the KV memory, and at most a quarter of the machine's free memory."""
        return min(engine.kv_limit_bytes // _PREFIX_SHARE, available_bytes() // 4)

    def _require_useful(self, limit_bytes: int) -> None:
        """A node that can serve no request must not start."""
        least_bytes = self.engine.kv_cost(2)
        if limit_bytes < least_bytes:
            raise BadRequest(
                f"{limit_bytes} bytes of KV memory are left for requests; one prompt token and one completion token "
                f"need {least_bytes}: give more --kv-memory, or less --prefix-memory"
            )

    def unload_when_idle(self, seconds: float) -> None:
        """Unload the model after this time without a request, counted from now; 0: never."""
        self._idle_s, self._used_at = seconds, time.monotonic()

    def require_open(self) -> None:
        if self.draining:
            raise NodeDraining("this node is stopping and accepts no new requests")

    def every_tick(self, action: Callable[[], None]) -> None:
        """Call `action` a few times a second, for deadlines."""
        self._ticks.append(action)

    def open(self, capacity: int, reserved: bool = True) -> Sequence:
        """On the scheduler's thread. `reserved`: admission has reserved the memory."""
        self._used_at = time.monotonic()
        sequence = self.scheduler.require_loaded().open(capacity)
        if reserved:
            self._reserved[sequence] = self.engine.kv_cost(capacity)
        else:
            self.unreserved.add(sequence)
        self._measure()
        return sequence

    def close(self, *sequences: Sequence) -> None:
        """On the scheduler's thread."""
        for sequence in sequences:
            self._reserved.pop(sequence, None)
            self.unreserved.discard(sequence)
            self._used_at = time.monotonic()
            self.engine.close(sequence)
            self._measure()

    def _measure(self) -> None:
        self.held_bytes = self.engine.kv_held_bytes
        self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)

    @property
    def admissions(self) -> set[Admission]:
        return {self.admission, self.prefill_admission}

    @property
    def reserved_bytes(self) -> int:
        return sum(admission.held_bytes for admission in self.admissions)

    @property
    def held_slots(self) -> int:
        return sum(admission.held_slots for admission in self.admissions)

    @property
    def sequences(self) -> int:
        return len(self._reserved)

    def check(self) -> None:
        """Of an idle engine: does it hold no more memory than its sequences need and admission has reserved?"""
        now = time.monotonic()
        if (self._reserved and now - self._checked_at < self._timeouts.check_s) or not self.engine.loaded:
            return
        self._checked_at = now
        self._measure()
        held, cost = self.held_bytes, sum(self._reserved.values())
        unreserved = sum(self.engine.kv_cost(sequence.capacity) for sequence in self.unreserved)
        reserved = self.reserved_bytes
        if held > cost + unreserved or cost > reserved:
            self.faults += 1
            log.error(
                "KV memory is inconsistent: %d bytes held, %d opened, %d reserved", held, cost + unreserved, reserved
            )

    def unload(self) -> None:
        """On the scheduler's thread: free the weights, unless a request needs them."""
        if self._reserved or self.unreserved or self.held_slots or self.scheduler.unfinished > 1:
            raise NodeBusy("the model is in use; try again when its requests have ended and its KV was fetched")
        if self.engine.loaded:
            self.engine.unload()
            log.info("the model was unloaded")

    def load(self) -> Engine:
        self._used_at = time.monotonic()
        return self.scheduler.require_loaded()

    def _unload_if_idle(self) -> None:
        idle = self._idle_s and time.monotonic() - self._used_at > self._idle_s
        if idle and self.engine.loaded and not self._reserved:
            self._used_at = time.monotonic()
            self.scheduler.post(self.unload).add_done_callback(lambda done: done.exception())

    def _tick(self) -> None:
        while not self._closing.wait(self._timeouts.tick_s):
            for action in self._ticks:
                try:
                    action()
                except Exception:
                    log.exception("a periodic action failed")

    def close_all(self) -> None:
        self.draining = True
        self._closing.set()
        for admission in self.admissions:
            admission.close(NodeDraining("this node is stopping"))
        self.prefixes.close()
