"""Answers to questions about the history, worked out on threads: a few at a time, each once for all who ask."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

from disaggregated_inference.errors import QueueFull
from disaggregated_inference.orchestrator import in_thread
from disaggregated_inference.timeouts import GatewayTimeouts

Result = TypeVar("Result")

_MAX_ANSWERS = 64
_AT_ONCE = 2  # threads that read the history
_MAX_WAITING = 256  # questions of one caller; clients that leave do not end theirs
_REST = 10  # an answer is good for so many times the time that it took: reading never takes much of a core


class _Answer(NamedTuple):
    content: bytes
    good_until: float


class QueryCache:
    """An answer is good for `answer_s`, and longer if it was much work. Many open dashboards ask the same: one of them
    causes the work."""

    def __init__(self, timeouts: GatewayTimeouts = GatewayTimeouts()) -> None:
        self._timeouts = timeouts
        self._tasks: dict[Hashable, asyncio.Task[_Answer]] = {}
        self._turn, self._single_turn = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_AT_ONCE)
        self._waiting: Counter[str | None] = Counter()  # questions of each caller

    async def answer(self, question: Hashable, work: Callable[[], bytes], caller: str | None = None) -> bytes:
        """`work` runs on a thread. An error is for all who wait, and is not kept."""
        task = self._tasks.get(question)
        if task is None or not _is_good(task):
            self._tasks.pop(question, None)
            self._begin(caller)
            task = self._tasks[question] = asyncio.create_task(self._work(work))
            task.add_done_callback(lambda _: self._end(caller))
            while len(self._tasks) > _MAX_ANSWERS:
                self._tasks.pop(next(iter(self._tasks)))
        return (await asyncio.shield(task)).content

    async def single(self, work: Callable[[], Result], caller: str | None = None) -> Result:
        """What is read for one caller alone. The others wait: a client that asks for much, at once, gets no thread for
        each question."""
        self._begin(caller)
        try:
            async with self._single_turn:
                return await in_thread(work)
        finally:
            self._end(caller)

    def _begin(self, caller: str | None) -> None:
        if self._waiting[caller] >= _MAX_WAITING:
            raise QueueFull(
                f"{_MAX_WAITING} questions about the history are waiting already", self._timeouts.answer_hint_s
            )
        self._waiting[caller] += 1

    def _end(self, caller: str | None) -> None:
        self._waiting[caller] -= 1
        if not self._waiting[caller]:
            del self._waiting[caller]

    async def _work(self, work: Callable[[], bytes]) -> _Answer:
        async with self._turn:
            began_at = time.monotonic()
            content = await in_thread(work)
            now = time.monotonic()
            return _Answer(content, now + max(self._timeouts.answer_s, _REST * (now - began_at)))


def _is_good(task: "asyncio.Task[_Answer]") -> bool:
    if not task.done():
        return True
    return not task.cancelled() and task.exception() is None and time.monotonic() < task.result().good_until
