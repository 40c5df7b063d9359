"""The open requests of a decode node: admission, deadlines, leases, and the cleanup at their end."""

import logging
import math
import threading
import time
from collections.abc import Callable

from disaggregated_inference.errors import Cancelled, DeadlineExceeded, DisaggError, NodeBusy, PeerFailed
from disaggregated_inference.node.admission import Claim
from disaggregated_inference.node.decode_task import DecodeTask
from disaggregated_inference.node.generation import Admitted, Generation
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.scheduler import Work
from disaggregated_inference.timeouts import NodeTimeouts

log = logging.getLogger(__name__)

OnEnd = Callable[[Generation, BaseException | None], None]


class OpenTasks:
    """Every request is added by `admit` and removed by `finish`, whatever happens between them."""

    def __init__(self, kv_memory: KVMemory, on_end: OnEnd, timeouts: NodeTimeouts) -> None:
        self._kv_memory, self._scheduler, self._on_end = kv_memory, kv_memory.scheduler, on_end
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._tasks: set[DecodeTask] = set()
        self._finished_tokens = 0  # completion tokens of finished requests
        kv_memory.every_tick(self._cancel_late)
        kv_memory.every_tick(self._renew_leases)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def waiting_tokens(self) -> int:
        return sum(task.waiting_tokens for task in list(self._tasks))

    @property
    def completion_tokens(self) -> int:
        """Of finished and of running requests."""
        with self._lock:
            return self._finished_tokens + sum(task.generation.metrics.completion_tokens for task in self._tasks)

    def cancel_all(self) -> None:
        for task in list(self._tasks):
            task.generation.cancel()

    def admit(self, task: DecodeTask, run: Callable[[], None]) -> Generation:
        """Call `run` when the memory is reserved; again if the engine did not have it in one piece."""
        generation, params = task.generation, task.generation.params

        def start(claim: Claim) -> None:
            with self._lock:
                task.claim = claim
                if task.finished:  # `admit` or `_end` releases the claim
                    return
                generation.metrics.admission_time = time.perf_counter() - generation.created_at
                generation.put(Admitted())
            run()

        generation.on_cancel(lambda error: None if task.sequences else self.finish(task, error))
        with self._lock:
            self._tasks.add(task)
        cost = params.n * self._scheduler.engine.kv_cost(task.capacity) + task.extra_bytes
        try:
            claim = self._kv_memory.admission.request(
                cost, params.n, start, lambda error: self.finish(task, error), params.queue_s
            )
        except BaseException:
            self._remove(task)
            raise
        with self._lock:
            task.claim = claim
        if task.finished:
            self._kv_memory.admission.release(claim)
        return generation

    def _cancel_late(self) -> None:
        now = time.monotonic()
        for task in list(self._tasks):
            if task.generation.deadline < now:
                state = ", still waiting for KV memory" if task.waits_for_memory else ""
                seconds = task.generation.params.timeout_s
                task.generation.cancel(
                    DeadlineExceeded(f"not done within {seconds:g} s{state}; request fewer tokens, or raise timeout_s")
                )

    def _renew_leases(self) -> None:
        """Of requests that wait for memory. Each on its own thread: a prefill node may not answer."""
        now = time.monotonic()
        for task in list(self._tasks):
            if task.renew_lease and task.waits_for_memory and task.renew_at < now:
                task.renew_at = math.inf
                renew = task.renew_lease
                threading.Thread(target=self._renew, args=(task, renew), name="kv-renew", daemon=True).start()

    def _renew(self, task: DecodeTask, renew: Callable[[], float]) -> None:
        lease_s = self._timeouts.unknown_lease_s
        try:
            lease_s = renew()
        except PeerFailed as error:
            if task.waits_for_memory:  # the KV is gone: waiting is useless
                task.generation.cancel(error)
        except DisaggError as error:
            log.info("cannot renew a lease: %s", error, extra={"request_id": task.generation.request_id})
        task.renew_at = time.monotonic() + max(0.1, lease_s / 3)

    def finish(self, task: DecodeTask, error: BaseException | None) -> None:
        """Free the memory, then end the generation. Later calls do nothing. A request without sequences is ended
        before that: freeing memory needs the scheduler, which may be loading the model."""
        with self._lock:
            if task.finished:
                return
            task.finished = True
        task.complete_metrics()
        if task.withdraw and isinstance(error, Cancelled | DeadlineExceeded):
            threading.Thread(target=task.withdraw, name="withdraw", daemon=True).start()
        try:
            if error and not task.sequences:
                self._end_generation(task, error)
        finally:
            self._schedule_cleanup(task, error)

    def _schedule_cleanup(self, task: DecodeTask, error: BaseException | None) -> None:
        try:
            if error:
                self._scheduler.post(lambda: self._clean_up(task, error))
            else:
                self._scheduler.submit(self._save_and_clean_up(task), urgent=True)
        except NodeBusy as stopped:  # the engine has stopped: there is no memory to free
            self._remove(task)
            if not task.generation.ended:
                task.generation.put(error or stopped)

    def _save_and_clean_up(self, task: DecodeTask) -> Work[None]:
        try:
            yield from self._save_prefix(task)
        except Exception:
            log.exception("cannot save the KV of a generation in the prefix cache")
        self._clean_up(task, None)

    def _save_prefix(self, task: DecodeTask) -> Work[None]:
        """Completions too: the next prompt of a chat begins with them."""
        for choice in task.choices:
            assert choice.sequence
            tokens = [*(task.prompt or []), *choice.tokens][: choice.sequence.length]
            wanted = task.prompt and task.cacheable
            insertion = self._kv_memory.prefixes.insert(tokens, task.salt) if wanted else None
            if insertion:
                try:
                    for piece in self._scheduler.engine.export(choice.sequence, insertion.start):
                        insertion.put(piece)
                    insertion.finish()
                finally:
                    insertion.abandon()
                yield

    def _clean_up(self, task: DecodeTask, error: BaseException | None) -> None:
        """On the scheduler's thread."""
        task.generation.metrics.prompt_tokens_recomputed = sum(sequence.computed for sequence in task.sequences)
        self._kv_memory.close(*task.sequences)
        task.sequences.clear()
        with self._lock:  # these refer to the task: its memory would wait for the garbage collector
            claim, task.claim, task.withdraw, task.renew_lease = task.claim, None, None, None
        if claim:
            self._kv_memory.admission.release(claim)
        task.generation.on_cancel(lambda error: None)  # drop the reference to what could stop it
        self._remove(task)
        self._end_generation(task, error)

    def _end_generation(self, task: DecodeTask, error: BaseException | None) -> None:
        if not task.generation.ended:
            self._on_end(task.generation, error)
            task.generation.put(error)

    def _remove(self, task: DecodeTask) -> None:
        with self._lock:
            self._tasks.discard(task)
            self._finished_tokens += task.generation.metrics.completion_tokens
