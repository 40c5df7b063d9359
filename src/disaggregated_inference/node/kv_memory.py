"""The KV memory of one engine, shared by the roles of a node: who may take it, who has it, what stays behind."""

import logging
import threading
import time
from collections.abc import Callable

from disaggregated_inference.engines import Engine, Sequence
from disaggregated_inference.engines.memory import available_bytes
from disaggregated_inference.errors import BadRequest, NodeBusy, NodeDraining
from disaggregated_inference.kv.prefix_cache.cache import PrefixCache
from disaggregated_inference.kv.prefix_cache.disk import DiskTier
from disaggregated_inference.node.admission import Admission
from disaggregated_inference.node.scheduler import Scheduler

log = logging.getLogger(__name__)

_TICK_S = 0.2
_CHECK_S = 1.0
_PREFIX_SHARE = 4  # one part in four of the memory is for prefixes


class KVMemory:
    """Sequences are opened and closed here, on the engine's thread; everything else may be asked by any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        kv_bytes: int = 0,
        prefix_bytes: int | None = None,
        disk: DiskTier | None = None,
        most_waiting: int = 256,
        both_roles: bool = False,
    ) -> None:
        self.scheduler, self.engine = scheduler, scheduler.engine
        kept = self.default_prefix_bytes(scheduler.engine) if prefix_bytes is None else prefix_bytes
        limit = kv_bytes or self.engine.kv_limit_bytes
        if not kv_bytes and not self.engine.own_memory:
            limit = max(limit - kept, 0)
        parts = 2 if both_roles else 1
        self._require_useful(limit // parts)
        self.prefixes = PrefixCache(self.engine.fingerprint, self.engine.dtype, kept, disk=disk)
        slots = self.engine.max_batch
        held = max(1, slots // 4) if both_roles else 0
        self.admission = Admission(limit // parts, max(1, slots - held), most_waiting)
        # Where one engine has both roles, caches that wait to be fetched must leave room for those who fetch them.
        self.reading = Admission(limit // 2, held, most_waiting) if both_roles else self.admission
        self.draining = False
        self.faults = 0  # times the books did not add up
        self.held_bytes = self.peak_held_bytes = 0  # what the engine says it holds, when last asked
        self._counted: dict[Sequence, int] = {}
        self._others: set[Sequence] = set()
        self._checked_at = 0.0
        self._idle_s, self._used_at = 0.0, time.monotonic()
        self._ticks: list[Callable[[], None]] = [self.admission.sweep, self.reading.sweep, self._unload_if_idle]
        self._closing = threading.Event()
        scheduler.idle = self.check
        threading.Thread(target=self._run, name="room", daemon=True).start()

    @staticmethod
    def default_prefix_bytes(engine: Engine) -> int:
        """A share of the KV memory, and never much of what the machine has left."""
        return min(engine.kv_limit_bytes // _PREFIX_SHARE, available_bytes() // 4)

    def _require_useful(self, limit_bytes: int) -> None:
        """Before a node that can serve nobody says that it is healthy."""
        least_bytes = self.engine.kv_cost(2)
        if limit_bytes < least_bytes:
            raise BadRequest(
                f"{limit_bytes} bytes of KV memory are left for requests; a token of a prompt and one of an answer "
                f"need {least_bytes}: give more --kv-memory, or less --prefix-memory"
            )

    def unload_when_idle(self, seconds: float) -> None:
        """From now on, when nobody has used the model for so long; 0: never."""
        self._idle_s, self._used_at = seconds, time.monotonic()

    def require_open(self) -> None:
        if self.draining:
            raise NodeDraining("this node is stopping and takes no new work")

    def every_tick(self, action: Callable[[], None]) -> None:
        """Called a few times a second, for deadlines."""
        self._ticks.append(action)

    def open(self, capacity: int, counted: bool = True) -> Sequence:
        """On the engine's thread. `counted`: admission has promised the memory."""
        self._used_at = time.monotonic()
        sequence = self.scheduler.require_loaded().open(capacity)
        if counted:
            self._counted[sequence] = self.engine.kv_cost(capacity)
        else:
            self._others.add(sequence)
        self._weigh()
        return sequence

    def close(self, sequence: Sequence) -> None:
        self._counted.pop(sequence, None)
        self._others.discard(sequence)
        self._used_at = time.monotonic()
        self.engine.close(sequence)
        self._weigh()

    def _weigh(self) -> None:
        self.held_bytes = self.engine.kv_held_bytes
        self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)

    @property
    def admissions(self) -> set[Admission]:
        return {self.admission, self.reading}

    @property
    def promised_bytes(self) -> int:
        return sum(admission.held_bytes for admission in self.admissions)

    @property
    def held_slots(self) -> int:
        return sum(admission.held_slots for admission in self.admissions)

    @property
    def sequences(self) -> int:
        return len(self._counted)

    def check(self) -> None:
        """When the engine has nothing to do: do memory, sequences and promises add up?"""
        now = time.monotonic()
        if (self._counted and now - self._checked_at < _CHECK_S) or not self.engine.loaded:
            return
        self._checked_at = now
        self._weigh()
        held, cost = self.held_bytes, sum(self._counted.values())
        others = sum(self.engine.kv_cost(sequence.capacity) for sequence in self._others)
        promised = self.promised_bytes
        if held > cost + others or cost > promised:
            self.faults += 1
            log.error("KV memory does not add up: %d bytes held, %d opened, %d promised", held, cost + others, promised)

    def unload(self) -> None:
        """On the engine's thread: give the weights back, unless someone needs them."""
        if self._counted or self._others or self.held_slots or self.scheduler.waiting > 1:
            raise NodeBusy("the model is in use; try again when its answers are written and its caches fetched")
        if self.engine.loaded:
            self.engine.unload()
            log.info("the model was unloaded")

    def load(self) -> Engine:
        self._used_at = time.monotonic()
        return self.scheduler.require_loaded()

    def _unload_if_idle(self) -> None:
        idle = self._idle_s and time.monotonic() - self._used_at > self._idle_s
        if idle and self.engine.loaded and not self._counted:
            self._used_at = time.monotonic()
            self.scheduler.post(self.unload).add_done_callback(lambda done: done.exception())

    def _run(self) -> None:
        while not self._closing.wait(_TICK_S):
            for tick in self._ticks:
                try:
                    tick()
                except Exception:
                    log.exception("a tick failed")

    def close_all(self) -> None:
        self.draining = True
        self._closing.set()
        for admission in self.admissions:
            admission.close(NodeDraining("this node is stopping"))
        self.prefixes.close()
