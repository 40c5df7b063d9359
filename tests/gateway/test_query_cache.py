"""Questions about the history: answered once for all who ask, and again when the answer is old."""

import asyncio
import threading
import time

import pytest

from disaggregated_inference.errors import QueueFull
from disaggregated_inference.gateway.query_cache import QueryCache
from disaggregated_inference.orchestrator import in_thread
from disaggregated_inference.timeouts import GatewayTimeouts
from tests.support.waiting import until_async


def test_one_answer_for_all_until_it_is_old() -> None:
    async def ask() -> None:
        cache, worked = QueryCache(GatewayTimeouts(answer_s=0.05)), list[int]()

        def work() -> bytes:
            worked.append(1)
            return b"answer %d" % len(worked)

        assert set(await asyncio.gather(*(cache.answer("q", work) for _ in range(20)))) == {b"answer 1"}
        assert await cache.answer("another", work) == b"answer 2"

        async def is_new() -> bool:
            return await cache.answer("q", work) != b"answer 1"

        assert await until_async(is_new)

    asyncio.run(ask())


def test_a_costly_answer_is_kept_longer() -> None:
    async def ask() -> None:
        cache = QueryCache(GatewayTimeouts(answer_s=0.0))

        def work() -> bytes:
            time.sleep(2.0)
            return str(time.monotonic()).encode()

        first = await cache.answer("q", work)
        await asyncio.sleep(0.1)
        assert await cache.answer("q", work) == first

    asyncio.run(ask())


def test_an_error_is_not_kept_and_answers_are_bounded() -> None:
    async def ask() -> None:
        cache, worked = QueryCache(), list[int]()

        def work() -> bytes:
            worked.append(1)
            if len(worked) == 1:
                raise ValueError("locked")
            return b"fine"

        with pytest.raises(ValueError, match="locked"):
            await cache.answer("q", work)
        assert await cache.answer("q", work) == b"fine"
        for number in range(200):
            await cache.answer(number, lambda: b"old")
        kept = [number for number in reversed(range(200)) if await cache.answer(number, lambda: b"new") == b"old"]
        assert kept == list(reversed(range(136, 200))), "the last 64"

    asyncio.run(ask())


class Crowd:
    """Work that counts how much of it runs at once."""

    def __init__(self) -> None:
        self._lock, self._running, self.most = threading.Lock(), 0, 0

    def work(self) -> bytes:
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
        time.sleep(0.002)
        with self._lock:
            self._running -= 1
        return b"fine"


def test_a_crowd_that_asks_for_rows_gets_few_threads() -> None:
    async def ask() -> None:
        cache, crowd = QueryCache(), Crowd()
        assert set(await asyncio.gather(*(cache.single(crowd.work) for _ in range(100)))) == {b"fine"}
        assert crowd.most <= 2

    asyncio.run(ask())


def test_questions_of_one_caller_are_bounded() -> None:
    """Also those of clients that have left: their questions are worked on all the same. Others are served meanwhile."""

    async def ask() -> None:
        cache, hold = QueryCache(), threading.Event()

        def work() -> bytes:
            hold.wait(60)
            return b"fine"

        asked = [asyncio.create_task(cache.answer(number, work, "ann")) for number in range(300)]
        asked += [asyncio.create_task(cache.single(work, "bob")) for _ in range(300)]
        await asyncio.sleep(0)
        refused = [task for task in asked if task.done()]
        assert len(refused) == 2 * (300 - 256)
        assert all(isinstance(task.exception(), QueueFull) for task in refused)
        for task in asked[:256]:
            task.cancel()  # the client leaves
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await cache.answer("one more", work, "ann")
        other = asyncio.create_task(cache.answer("q", work, "cy"))
        hold.set()
        assert await other == b"fine"
        await asyncio.gather(*asked, return_exceptions=True)

        async def is_free() -> bool:
            try:
                return await cache.answer("at last", lambda: b"fine", "ann") == b"fine"
            except QueueFull:
                return False

        assert await until_async(is_free)

    asyncio.run(ask())


def test_a_crowd_gets_a_bounded_number_of_threads() -> None:
    """Whatever it asks for: counting tokens, for instance. Each event loop has turns of its own."""

    async def ask() -> None:
        crowd = Crowd()
        leaving = [asyncio.create_task(in_thread(crowd.work)) for _ in range(100)]
        await asyncio.sleep(0)
        for task in leaving:  # their work goes on
            task.cancel()
        assert set(await asyncio.gather(*(in_thread(crowd.work) for _ in range(300)))) == {b"fine"}
        assert 1 <= crowd.most <= 32

    for _ in range(2):
        asyncio.run(ask())
