"""The one thread that calls the engine. Each round: the small calls that wait, one beat, one piece of one work.

The beat is the decode batch's step. Work comes as generators, and every `yield` is a place to let others go first: so
a long prompt, chunk by chunk, neither starves short ones nor stops the answers that are being written, and placing a
slice waits for one chunk at most.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from disaggregated_inference.engines import Engine
from disaggregated_inference.errors import NodeBusy

log = logging.getLogger(__name__)

_STALL_S = 0.05  # how long answers that are being written may wait for a piece of someone's prompt, or so many steps
_STALL_STEPS = 2
_MOST_STALLS = 4  # times that, the more prompts wait: who writes has something to show, who waits has nothing
_PIECE_S = 0.8  # nobody stalls, but a client may leave: within a second its memory is someone else's
_LEAST_CHUNK = 16
_LINGER_SHARE = 0.25
_LEAST_LINGER_S = 0.005
_NEXT_SLICE_S = 0.002

Result = TypeVar("Result")
Work = Generator[None, None, Result]


class DecodeSteps(Protocol):
    """What is stepped every round as long as it has members: the decode batch."""

    members: list[Any]
    step_s: float  # how long the last one took

    def step(self) -> None: ...


class _EmptyBatch:
    step_s = 0.0

    def __init__(self) -> None:
        self.members: list[Any] = []

    def step(self) -> None: ...


class Scheduler:
    """Runs works in turn, a piece at a time. Small calls (`call`) go before the next piece of any work.

    A few works take turns, the others wait in line: if all took turns, all would be slow, and all would hold memory.
    `batch` is stepped every round while it has members; `idle` is called when there is nothing to do.
    """

    def __init__(self, load: Callable[[], Engine], most_works: int = 1024, in_turn: int = 8) -> None:
        self._load = load
        self.batch: DecodeSteps = _EmptyBatch()
        self.idle: Callable[[], None] = lambda: None
        self.loading = False
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._works: deque[tuple[Work[Any], Future[Any]]] = deque()
        self._line: deque[tuple[Work[Any], Future[Any]]] = deque()
        self._urgent: deque[tuple[Work[Any], Future[Any]]] = deque()
        self._most_works, self._in_turn = most_works, in_turn
        self._running = 0
        self._inbound = 0
        self._stopping = self._ended = False
        self._at_it_since: float | None = None
        loaded: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(loaded,), name="engine", daemon=True)
        self._thread.start()
        self.engine = loaded.result()

    def start(self, work: Work[Result], urgent: bool = False) -> "Future[Result]":
        """Run a work to its end; its return value is the future's. Refused when too much is waiting already. An urgent
        one, which must be short, goes before those that are not."""
        future: Future[Result] = Future()
        with self._changed:
            self._require_running()
            if not urgent and self.waiting >= self._most_works:
                raise NodeBusy(f"{self.waiting} requests are being worked on already")
            if urgent:
                self._urgent.append((work, future))
            else:
                self._line.append((work, future))
                self._let_in()
            self._changed.notify()
        return future

    def _let_in(self) -> None:
        while self._line and len(self._works) + self._running < self._in_turn:
            self._works.append(self._line.popleft())

    def call(self, function: Callable[[], Result]) -> Result:
        """Run one small thing on the engine's thread and wait for it."""
        return self.post(function).result()

    def post(self, function: Callable[[], Result]) -> "Future[Result]":
        """The same without waiting: also for the engine's thread itself. Who cancels the future before its turn has
        nothing done."""
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
        """How long the thread has been at one thing: a call, a step, a piece. Loading a model takes what it takes."""
        since = self._at_it_since
        return 0.0 if since is None or self.loading else time.monotonic() - since

    @property
    def waiting(self) -> int:
        """Works that are not finished."""
        return len(self._works) + len(self._line) + len(self._urgent) + self._running

    @property
    def _prompts(self) -> int:
        """Works that are not urgent: prompts, mostly."""
        return max(1, len(self._works) + len(self._line) + self._running)

    def _require_running(self) -> None:
        if self._ended:
            raise NodeBusy("this node's engine has stopped")

    def stop(self) -> None:
        """Finish what is being worked on, then end."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def require_loaded(self) -> Engine:
        """On the engine's thread: load the model again if it was unloaded. Whoever comes meanwhile waits in line."""
        if not self.engine.loaded:
            self.loading = True
            try:
                self.engine.become(self._load())
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
            while self._wait():
                self._answer_calls()
                if self.batch.members:
                    self._at_it_since = time.monotonic()
                    self.batch.step()
                self._advance_urgent()
                if self._works:
                    self._at_it_since = time.monotonic()
                    self._advance(*self._works.popleft(), self._works)
        finally:
            self._give_up()
        self.engine.leave_thread()

    def _advance_urgent(self) -> None:
        """As many as a share of a step's time allows, first come first: one per step would keep a crowd that arrives
        at once waiting for as many steps."""
        until = time.perf_counter() + max(_LEAST_LINGER_S, _LINGER_SHARE * self.batch.step_s)
        while self._urgent and time.perf_counter() < until:
            self._at_it_since = time.monotonic()
            self._advance(*self._urgent.popleft(), self._urgent)

    def _answer_calls(self) -> None:
        """All that wait. While a cache arrives, a share of a step's time longer: its slices come one after the other,
        and one per step would take the transfer as many steps as it has slices."""
        until = time.perf_counter() + max(_LEAST_LINGER_S, _LINGER_SHARE * self.batch.step_s)
        while True:
            while self._calls:
                self._at_it_since = time.monotonic()
                _finish(*self._calls.popleft())
            if not self._inbound or not self.batch.members or time.perf_counter() >= until:
                return
            with self._changed:
                if not self._changed.wait_for(lambda: self._calls, _NEXT_SLICE_S):
                    return

    def chunk_tokens(self, rate: float | None, most: int) -> int:
        """Tokens of a prompt at a time, of which this engine reads `rate` a second: few enough that whoever leaves is
        gone soon and, while answers are being written, that their streams do not stall."""
        writing = bool(self.batch.members)
        if not rate:
            return min(most, _LEAST_CHUNK) if writing else most
        stall_s = max(_STALL_S, _STALL_STEPS * self.batch.step_s) * min(_MOST_STALLS, self._prompts)
        return max(_LEAST_CHUNK, min(most, int(rate * (stall_s if writing else _PIECE_S))))

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Around a transfer whose slices will be placed."""
        with self._changed:
            self._inbound += 1
        try:
            yield
        finally:
            with self._changed:
                self._inbound -= 1

    def _wait(self) -> bool:
        self._at_it_since = None
        if not self._busy():
            self._idle()
        with self._changed:
            self._changed.wait_for(lambda: self._busy() or self._stopping)
            self._ended = not self._busy()  # woken for nothing else but to stop
            return not self._ended

    def _idle(self) -> None:
        try:
            self.idle()
        except Exception:
            log.exception("the check of an idle engine failed")

    def _give_up(self) -> None:
        """The thread ends: nobody may wait for it for ever."""
        with self._changed:
            self._ended = True
            waiting = [future for _, future in (*self._calls, *self._urgent, *self._works, *self._line)]
            for line in (self._calls, self._urgent, self._works, self._line):
                line.clear()
        for future in waiting:
            if not future.cancelled():
                future.set_exception(NodeBusy("this node's engine has stopped"))

    def _busy(self) -> bool:
        return bool(self._calls or self._urgent or self._works or self.batch.members)

    def _advance(self, work: Work[Any], future: "Future[Any]", back: "deque[tuple[Work[Any], Future[Any]]]") -> None:
        """One piece; what is left of it stands in line again, where it stood before."""
        self._running = 1
        going = self._turn(work, future)
        with self._changed:
            self._running = 0
            if going:
                back.append((work, future))
            self._let_in()

    def _turn(self, work: Work[Any], future: "Future[Any]") -> bool:
        """One piece of a work; whether there is more."""
        try:
            next(work)
            return True
        except StopIteration as end:
            future.set_result(end.value)
        except BaseException as error:
            future.set_exception(error)
        return False


def _finish(function: Callable[[], Any], future: "Future[Any]") -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
