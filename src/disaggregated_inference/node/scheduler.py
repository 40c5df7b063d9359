"""The scheduler: the one thread that calls the engine.

A round runs the pending calls, one decode step of the batch, the urgent work and one prefill chunk. Work comes as
generators, and every `yield` lets others go first. So a long prompt, chunk by chunk, neither starves short prompts nor
stops running generations, and placing a KV slice waits for one chunk at most.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from disaggregated_inference.engines import Engine
from disaggregated_inference.errors import NodeBusy
from disaggregated_inference.node.batch import DecodeBatch
from disaggregated_inference.struct_types import build_struct_types
from disaggregated_inference.timeouts import NodeTimeouts

log = logging.getLogger(__name__)

_STALL_STEPS = 2  # a chunk may take `stall_s`, or as long as this many decode steps
_MAX_STALLS = 4  # times that, where several prompts wait: running requests have output, waiting ones have none
_MIN_CHUNK_TOKENS = 16
_LINGER_SHARE = 0.25  # of a decode step

Result = TypeVar("Result")
Work = Generator[None, None, Result]
_Queue = deque[tuple[Work[Any], Future[Any]]]


class Scheduler:
    """Up to `max_running` works run in turn, one chunk each; further ones wait. If all ran in turn, all would be slow
    and hold memory. `idle` is called when there is nothing to do."""

    def __init__(
        self,
        load: Callable[[], Engine],
        max_works: int = 1024,
        max_running: int = 8,
        timeouts: NodeTimeouts = NodeTimeouts(),
    ) -> None:
        build_struct_types()
        self._load, self._max_works, self._max_running, self._timeouts = load, max_works, max_running, timeouts
        self.batch = DecodeBatch()
        self.idle: Callable[[], None] = lambda: None
        self.loading = False
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._urgent, self._running, self._waiting = _Queue(), _Queue(), _Queue()
        self._current = 0  # 1 while a work is out of its queue
        self._transfers = 0  # KV transfers whose slices will be placed
        self._stopping = self._stopped = False
        self._busy_since: float | None = None
        loaded: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(loaded,), name="engine", daemon=True)
        self._thread.start()
        self.engine = loaded.result()

    def submit(self, work: Work[Result], urgent: bool = False) -> "Future[Result]":
        """Run a work to its end; its return value becomes the future's result. Urgent work must be short."""
        future: Future[Result] = Future()
        with self._changed:
            self._require_running()
            if not urgent and self.unfinished >= self._max_works:
                raise NodeBusy(f"the scheduler has {self.unfinished} requests already; try again later")
            (self._urgent if urgent else self._waiting).append((work, future))
            self._start_waiting()
            self._changed.notify()
        return future

    def call(self, function: Callable[[], Result]) -> Result:
        """Run one short function on the scheduler's thread and wait for it."""
        return self.post(function).result()

    def post(self, function: Callable[[], Result]) -> "Future[Result]":
        """The same without waiting, also from the scheduler's thread. A future cancelled in time runs nothing."""
        future: Future[Result] = Future()
        with self._changed:
            self._require_running()
            self._calls.append((function, future))
            self._changed.notify()
        return future

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stalled_s(self) -> float:
        """Age of the call, step or chunk that runs now. Loading a model does not count."""
        since = self._busy_since
        return 0.0 if since is None or self.loading else time.monotonic() - since

    @property
    def unfinished(self) -> int:
        """Works that run or wait."""
        return len(self._urgent) + self._prompts

    @property
    def working(self) -> int:
        """Requests that the engine computes for: prompts that are read in turn, and answers of the batch."""
        return len(self._running) + self._current + len(self.batch.running)

    @property
    def _prompts(self) -> int:
        """Works that are not urgent: mostly prompts."""
        return len(self._running) + len(self._waiting) + self._current

    def _require_running(self) -> None:
        if self._stopped:
            raise NodeBusy("this node's engine has stopped")

    def stop(self) -> None:
        """Finish all work, then end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def require_loaded(self) -> Engine:
        """On the scheduler's thread: load the model again if it was unloaded."""
        if not self.engine.loaded:
            self.loading = True
            try:
                fresh = self._load()
                fresh.replace(self.engine)
                self.engine = fresh
            finally:
                self.loading = False
        return self.engine

    def _run(self, loaded: "Future[Engine]") -> None:
        try:
            loaded.set_result(self._load())
        except BaseException as error:
            loaded.set_exception(error)
            return
        try:
            while self._wait_for_work():
                self._round()
        finally:
            self._fail_all()
        self.engine.leave_thread()

    def _round(self) -> None:
        self._run_calls()
        if self.batch.running:
            self._busy_since = time.monotonic()
            self.batch.step(self.engine)
        self._run_urgent()
        if self._running:  # a prefill chunk
            self._advance(self._running)

    def _run_calls(self) -> None:
        """All that are pending. During a KV transfer the scheduler waits a share of a step for further slices: one
        slice per step would make the transfer as long as its number of slices."""
        until = self._linger_until()
        while True:
            while self._calls:
                self._busy_since = time.monotonic()
                _run_call(*self._calls.popleft())
            if not self._transfers or not self.batch.running or time.perf_counter() >= until:
                return
            with self._changed:
                if not self._changed.wait_for(lambda: self._calls, self._timeouts.next_slice_s):
                    return

    def _run_urgent(self) -> None:
        """As many as a share of a step's time allows: one per step would delay requests that arrive together."""
        until = self._linger_until()
        while self._urgent and time.perf_counter() < until:
            self._advance(self._urgent)

    def _linger_until(self) -> float:
        return time.perf_counter() + max(self._timeouts.linger_s, _LINGER_SHARE * self.batch.step_s)

    def chunk_tokens(self, rate: float | None, limit: int) -> int:
        """Tokens of the next prefill chunk, where the engine computes `rate` a second: few enough that a cancelled
        request ends soon and that running generations do not stall."""
        if not rate:
            return min(limit, _MIN_CHUNK_TOKENS) if self.batch.running else limit
        seconds = self._timeouts.chunk_s
        if self.batch.running:
            stall_s = max(self._timeouts.stall_s, _STALL_STEPS * self.batch.step_s)
            seconds = stall_s * min(_MAX_STALLS, max(1, self._prompts))
        return max(_MIN_CHUNK_TOKENS, min(limit, int(rate * seconds)))

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Around a KV transfer."""
        with self._changed:
            self._transfers += 1
        try:
            yield
        finally:
            with self._changed:
                self._transfers -= 1

    def _wait_for_work(self) -> bool:
        self._busy_since = None
        if not self._has_work():
            self._run_idle()
        with self._changed:
            self._changed.wait_for(lambda: self._has_work() or self._stopping)
            self._stopped = not self._has_work()
            return not self._stopped

    def _has_work(self) -> bool:
        return bool(self._calls or self._urgent or self._running or self.batch.running)

    def _run_idle(self) -> None:
        try:
            self.idle()
        except Exception:
            log.exception("the check of an idle engine failed")

    def _advance(self, queue: _Queue) -> None:
        """Run the first work up to its next `yield`. Unfinished work goes to the end of its queue."""
        self._busy_since = time.monotonic()
        self._current = 1
        work, future = queue.popleft()
        unfinished = _run_to_yield(work, future)
        with self._changed:
            self._current = 0
            if unfinished:
                queue.append((work, future))
            self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) + self._current < self._max_running:
            self._running.append(self._waiting.popleft())

    def _fail_all(self) -> None:
        """The thread ends: no caller may wait for it."""
        queues = (self._urgent, self._running, self._waiting)
        with self._changed:
            self._stopped = True
            futures = [future for _, future in self._calls] + [future for queue in queues for _, future in queue]
            for queue in (self._calls, *queues):
                queue.clear()
        for future in futures:
            if not future.cancelled():
                future.set_exception(NodeBusy("this node's engine has stopped"))


def _run_to_yield(work: Work[Any], future: "Future[Any]") -> bool:
    """Whether there is more to run."""
    try:
        next(work)
        return True
    except StopIteration as end:
        future.set_result(end.value)
    except BaseException as error:
        future.set_exception(error)
    return False


def _run_call(function: Callable[[], Any], future: "Future[Any]") -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
