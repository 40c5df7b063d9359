"""The request queue: bounded, one per model, fair between models and callers, by priority. Runs on one event loop."""

import asyncio
import itertools
import math
import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from disaggregated_inference.api import QueueStatus
from disaggregated_inference.errors import DeadlineExceeded, QueueFull
from disaggregated_inference.timeouts import OrchestratorTimeouts

_LAST_SERVED = 32


@dataclass(slots=True, eq=False)
class _Waiter:
    priority: int
    caller: str
    turn: "asyncio.Future[bool]"  # True: it has a place. False: its deadline passed first

    @property
    def has_place(self) -> bool:
        return self.turn.done() and not self.turn.cancelled() and self.turn.result()


@dataclass(slots=True, eq=False)
class _ModelQueue:
    places: int
    running: int = 0
    last_turn: int = 0
    waiters: list[_Waiter] = field(default_factory=list)  # by priority, then by arrival
    running_of: Counter[str] = field(default_factory=Counter)  # by caller
    last_turn_of: dict[str, int] = field(default_factory=dict)  # of callers that wait or run
    served_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST_SERVED))

    @property
    def is_due(self) -> bool:
        return bool(self.waiters) and self.running < self.places

    def pop(self) -> _Waiter:
        """Of the highest priority, the first request of the caller whose last turn is the longest ago."""
        first = self.waiters[0].priority
        rivals = itertools.takewhile(lambda each: each.priority == first, self.waiters)
        chosen = min(rivals, key=lambda each: self.last_turn_of.get(each.caller, 0))
        self.waiters.remove(chosen)
        return chosen

    def waiting_of(self, caller: str) -> int:
        return sum(each.caller == caller for each in self.waiters)

    def share_of(self, caller: str, places: int) -> int:
        """The part of the waiting places that one caller may fill when there are no others left."""
        return places // len({caller, *(each.caller for each in self.waiters)})

    def start(self, waiter: _Waiter, turn: int) -> None:
        self.running, self.last_turn = self.running + 1, turn
        self.running_of[waiter.caller] += 1
        self.last_turn_of[waiter.caller] = turn

    def end(self, caller: str) -> None:
        self.running -= 1
        self.running_of[caller] -= 1
        self._forget(caller)

    def remove(self, waiter: _Waiter) -> None:
        self.waiters.remove(waiter)
        self._forget(waiter.caller)

    def _forget(self, caller: str) -> None:
        """A caller without requests, so that their number stays bounded."""
        if not self.running_of[caller]:
            del self.running_of[caller]
            if not self.waiting_of(caller):
                self.last_turn_of.pop(caller, None)

    def retry_after_s(self, timeouts: OrchestratorTimeouts) -> int:
        """When a new request might run: after all before it, at the recent pace."""
        if not self.served_s:
            return timeouts.retry_hint_s
        each_s = sum(self.served_s) / len(self.served_s)
        ahead_s = (len(self.waiters) + 1) * each_s / max(self.places, 1)
        return max(1, min(timeouts.max_retry_hint_s, math.ceil(ahead_s)))


class RequestQueue:
    """Places to run, by model, and the requests that wait for one: at most `max_waiting` in all.

    Models take turns, so that with `max_running` many requests for one model do not block another. Inside a model a
    higher priority goes first; then callers take turns, so that many requests of one do not delay another's; then the
    earlier request goes first. `model` must be a name from the config, or the number of queues would have no bound.
    """

    def __init__(
        self,
        max_waiting: int,
        max_running_per_model: int,
        max_running: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        timeouts: OrchestratorTimeouts = OrchestratorTimeouts(),
    ) -> None:
        self.max_waiting, self.max_running_per_model = max_waiting, max_running_per_model
        self.max_running = math.inf if max_running is None else max_running
        self._clock, self._turns, self._timeouts = clock, 0, timeouts
        self._queues: dict[str, _ModelQueue] = {}

    @property
    def waiting(self) -> int:
        return sum(len(queue.waiters) for queue in self._queues.values())

    @property
    def running(self) -> int:
        return sum(queue.running for queue in self._queues.values())

    def status(self) -> dict[str, QueueStatus]:
        return {
            model: QueueStatus(waiting=len(queue.waiters), running=queue.running, places=queue.places)
            for model, queue in sorted(self._queues.items())
        }

    def allow(self, model: str, places: int) -> None:
        """Set how many requests of a model run at once. Requests that run beyond it finish, and are not replaced."""
        queue = self._queue(model)
        if queue.places != places:
            queue.places = places
            self._grant_places()

    def turn(self, model: str, priority: int = 0, deadline: float = math.inf, caller: str = "") -> "_Turn":
        """`async with`: waits for a place and holds it inside. `deadline` is on the queue's clock."""
        return _Turn(self, model, priority, deadline, caller)

    async def enter(self, model: str, priority: int, deadline: float, caller: str) -> float:
        """Returns when the turn began."""
        await self._wait(self._queue(model), model, priority, deadline, caller)
        return self._clock()

    def leave(self, model: str, caller: str, began_at: float) -> None:
        queue = self._queue(model)
        queue.served_s.append(self._clock() - began_at)
        self._leave(queue, caller)

    async def _wait(self, queue: _ModelQueue, model: str, priority: int, deadline: float, caller: str) -> None:
        if (left_s := deadline - self._clock()) <= 0:
            raise DeadlineExceeded(f"the request for {model} arrived after its deadline")
        loop = asyncio.get_running_loop()
        waiter = self._join(queue, model, _Waiter(priority, caller, loop.create_future()))
        if waiter.has_place:
            return
        timer = None if math.isinf(left_s) else loop.call_later(left_s, self._expire, queue, waiter)
        try:
            if not await waiter.turn:
                raise DeadlineExceeded(f"no place for {model} within {left_s:.1f} s; try again later")
        except BaseException:
            self._withdraw(queue, waiter)
            raise
        finally:
            if timer:
                timer.cancel()

    def _join(self, queue: _ModelQueue, model: str, waiter: _Waiter) -> _Waiter:
        is_free = queue.running < queue.places and self.running < self.max_running
        if not is_free and self.waiting >= self.max_waiting and not self._has_share(queue, waiter.caller):
            raise QueueFull(
                f"{self.waiting} requests for {model} and others are waiting already",
                queue.retry_after_s(self._timeouts),
            )
        insort(queue.waiters, waiter, key=lambda each: -each.priority)
        self._grant_places()
        return waiter

    def _has_share(self, queue: _ModelQueue, caller: str) -> bool:
        """Requests for one model, or of one caller, do not crowd out another's."""
        share = self.max_waiting // len(self._queues)
        return len(queue.waiters) < share or queue.waiting_of(caller) < queue.share_of(caller, share)

    def _queue(self, model: str) -> _ModelQueue:
        return self._queues.setdefault(model, _ModelQueue(self.max_running_per_model))

    def _grant_places(self) -> None:
        """Grant all free places, first to the model whose last turn is the longest ago."""
        while self.running < self.max_running:
            due = (queue for queue in self._queues.values() if queue.is_due)
            if not self.waiting or not (queue := min(due, key=lambda each: each.last_turn, default=None)):
                return
            self._grant(queue, queue.pop())

    def _grant(self, queue: _ModelQueue, waiter: _Waiter) -> None:
        """A cancelled request stays in the queue until its task wakes up; it must not take a place."""
        if not waiter.turn.done():
            waiter.turn.set_result(True)
            self._turns += 1
            queue.start(waiter, self._turns)

    def _expire(self, queue: _ModelQueue, waiter: _Waiter) -> None:
        """Grants and this run on one loop: the first one counts, the other finds it done."""
        if not waiter.turn.done():
            waiter.turn.set_result(False)
            queue.remove(waiter)

    def _withdraw(self, queue: _ModelQueue, waiter: _Waiter) -> None:
        """A task may be cancelled between its grant and its wake-up: then the place goes to the next."""
        if waiter.has_place:
            self._leave(queue, waiter.caller)
        elif waiter in queue.waiters:
            queue.remove(waiter)

    def _leave(self, queue: _ModelQueue, caller: str) -> None:
        queue.end(caller)
        self._grant_places()


class _Turn:
    """A place of a model, while the `with` lasts."""

    __slots__ = ("_began_at", "_caller", "_deadline", "_model", "_priority", "_queue")

    def __init__(self, queue: RequestQueue, model: str, priority: int, deadline: float, caller: str) -> None:
        self._queue, self._model, self._priority = queue, model, priority
        self._deadline, self._caller = deadline, caller

    async def __aenter__(self) -> None:
        self._began_at = await self._queue.enter(self._model, self._priority, self._deadline, self._caller)

    async def __aexit__(self, *_: object) -> None:
        self._queue.leave(self._model, self._caller, self._began_at)
