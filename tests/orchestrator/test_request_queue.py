"""The line: order, bounds, and that no place is ever lost, whatever leaves when."""

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disaggregated_inference.api import QueueStatus
from disaggregated_inference.errors import DeadlineExceeded, QueueFull
from disaggregated_inference.orchestrator.request_queue import RequestQueue


class Crowd:
    """Requests by name: each takes its turn and keeps it until told to end."""

    def __init__(self, line: RequestQueue) -> None:
        self.line = line
        self.started: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.ends: dict[str, asyncio.Event] = {}

    async def come(
        self, name: str, model: str = "m", priority: int = 0, deadline: float = math.inf, caller: str = ""
    ) -> None:
        self.send(name, model, priority, deadline, caller)
        await settle()

    def send(
        self, name: str, model: str = "m", priority: int = 0, deadline: float = math.inf, caller: str = ""
    ) -> None:
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, model, priority, deadline, caller))

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await settle()

    async def end_all(self) -> list[object]:
        for end in self.ends.values():
            end.set()
        return list(await asyncio.gather(*self.tasks.values(), return_exceptions=True))

    async def _run(self, name: str, model: str, priority: int, deadline: float, caller: str) -> None:
        async with self.line.turn(model, priority, deadline, caller):
            self.started.append(name)
            await self.ends[name].wait()


class Clock:
    """The time of a line and of its loop, which passes when told to: timers neither come early nor late."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def __enter__(self) -> "Clock":
        self._patch = patch.object(asyncio.get_running_loop(), "time", self)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


async def settle() -> None:
    """Everything that can go on without time passing, does."""
    for _ in range(10):
        await asyncio.sleep(0)


async def timers() -> None:
    """Those that are due run, after us in the first round, and who they wake does not yet."""
    for _ in range(2):
        await asyncio.sleep(0)


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def test_free_places_are_taken_at_once() -> None:
    async def scene() -> None:
        crowd = Crowd(RequestQueue(max_waiting=0, max_running_per_model=2))
        await crowd.come("a")
        await crowd.come("b")
        assert crowd.started == ["a", "b"]
        assert (crowd.line.running, crowd.line.waiting) == (2, 0)
        await crowd.end_all()
        assert (crowd.line.running, crowd.line.waiting) == (0, 0)

    run(scene())


def test_a_free_place_is_taken_without_yielding_to_the_loop() -> None:
    async def scene() -> None:
        line = RequestQueue(8, 1)
        coroutine = line.turn("m").__aenter__()
        with pytest.raises(StopIteration):
            coroutine.send(None)
        assert line.running == 1

    run(scene())


def test_priority_first_then_first_come_first_served() -> None:
    async def scene() -> None:
        crowd = Crowd(RequestQueue(8, 1))
        for name, priority in (("first", 0), ("b0", 0), ("c1", 1), ("d0", 0), ("e1", 1), ("f-1", -1)):
            await crowd.come(name, priority=priority)
        for name in ("first", "c1", "e1", "b0", "d0", "f-1"):
            assert crowd.started[-1] == name
            await crowd.end(name)
        await crowd.end_all()

    run(scene())


def test_each_model_has_its_own_places() -> None:
    async def scene() -> None:
        line = RequestQueue(8, 1)
        crowd = Crowd(line)
        line.allow("big", 2)
        for name in ("big-1", "big-2", "big-3", "small-1", "small-2"):
            await crowd.come(name, model=name.split("-")[0])
        assert crowd.started == ["big-1", "big-2", "small-1"]
        assert line.status() == {
            "big": QueueStatus(waiting=1, running=2, places=2),
            "small": QueueStatus(waiting=1, running=1, places=1),
        }
        await crowd.end_all()

    run(scene())


def test_models_take_turns_where_all_share_a_limit() -> None:
    async def scene() -> None:
        crowd = Crowd(RequestQueue(16, 4, max_running=1))
        for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
            await crowd.come(name, model=name[0])
        for number in range(7):
            assert len(crowd.started) == number + 1
            await crowd.end(crowd.started[-1])
        assert crowd.started == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]
        await crowd.end_all()

    run(scene())


def test_more_places_let_more_in_and_fewer_take_none_away() -> None:
    async def scene() -> None:
        line = RequestQueue(8, 1)
        crowd = Crowd(line)
        for name in "abcd":
            await crowd.come(name)
        line.allow("m", 3)
        await settle()
        assert crowd.started == ["a", "b", "c"]
        line.allow("m", 1)
        await crowd.end("a")
        await crowd.end("b")
        assert (crowd.started, line.running) == (["a", "b", "c"], 1)
        await crowd.end("c")
        assert crowd.started == ["a", "b", "c", "d"]
        await crowd.end_all()

    run(scene())


def test_a_model_without_places_waits_for_some() -> None:
    async def scene() -> None:
        line = RequestQueue(8, 1)
        crowd = Crowd(line)
        line.allow("m", 0)
        await crowd.come("a")
        assert crowd.started == []
        line.allow("m", 1)
        await settle()
        assert crowd.started == ["a"]
        await crowd.end_all()

    run(scene())


def test_a_full_queue_gives_a_retry_after() -> None:
    async def scene() -> None:
        now = 0.0
        line = RequestQueue(2, 2, clock=lambda: now)
        crowd = Crowd(line)
        for name in "abcd":
            await crowd.come(name)
        with pytest.raises(QueueFull, match=r"2 requests .* are waiting already; try again in 5 s") as caught:
            async with line.turn("m"):
                pass
        assert (caught.value.retry_after_s, caught.value.status) == (5, 503)
        async with line.turn("another model"):
            assert line.running == 3, "a free place is free, however long the line before others is"
        now = 7.0
        await crowd.end("a")
        await crowd.come("e")
        with pytest.raises(QueueFull) as caught:
            async with line.turn("m"):
                pass
        assert caught.value.retry_after_s == math.ceil(3 * 7 / 2), "two before it and itself, two at once, 7 s each"
        assert (line.waiting, line.running) == (2, 2)
        await crowd.end_all()

    run(scene())


@pytest.mark.parametrize(("service_s", "retry_s"), [(0.001, 1), (1000, 60)])
def test_retry_after_is_bounded(service_s: float, retry_s: int) -> None:
    async def scene() -> None:
        now = 0.0
        line = RequestQueue(0, 1, clock=lambda: now)
        async with line.turn("m"):
            now += service_s
        async with line.turn("m"):
            with pytest.raises(QueueFull) as caught:
                await line.turn("m").__aenter__()
        assert caught.value.retry_after_s == retry_s

    run(scene())


def test_the_deadline_ends_the_wait() -> None:
    async def scene() -> None:
        with Clock() as clock:
            crowd = Crowd(RequestQueue(8, 1, clock=clock))
            await crowd.come("a")
            await crowd.come("late", deadline=2)
            await crowd.come("patient", deadline=60)
            clock.now = 2
            await settle()
            with pytest.raises(DeadlineExceeded, match=r"no place for m within 2\.0 s"):
                crowd.tasks["late"].result()
            assert (crowd.line.waiting, crowd.line.running) == (1, 1)
            await crowd.end("a")
            assert crowd.started == ["a", "patient"]
            await crowd.end_all()

    run(scene())


def test_a_deadline_that_is_over_takes_no_place() -> None:
    async def scene() -> None:
        line = RequestQueue(8, 1)
        with pytest.raises(DeadlineExceeded):
            async with line.turn("m", deadline=time.monotonic() - 1):
                pass
        assert (line.waiting, line.running) == (0, 0)

    run(scene())


def test_a_deadline_does_not_end_what_has_begun() -> None:
    async def scene() -> None:
        with Clock() as clock:
            line = RequestQueue(8, 1, clock=clock)
            async with line.turn("m", deadline=2):
                clock.now = 5
                await settle()
                assert (line.waiting, line.running) == (0, 1)

    run(scene())


def test_a_cancelled_request_leaves_nothing_behind() -> None:
    async def scene() -> None:
        crowd = Crowd(RequestQueue(8, 1))
        for name in "abc":
            await crowd.come(name)
        await crowd.cancel("b")
        assert (crowd.line.waiting, crowd.line.running) == (1, 1)
        await crowd.end("a")
        assert crowd.started == ["a", "c"]
        await crowd.cancel("c")
        assert (crowd.line.waiting, crowd.line.running) == (0, 0)
        await crowd.end_all()

    run(scene())


def test_given_a_place_and_cancelled_at_the_same_moment() -> None:
    async def scene() -> None:
        crowd = Crowd(RequestQueue(8, 1))
        for name in "abc":
            await crowd.come(name)
        crowd.tasks["a"].cancel()
        await asyncio.sleep(0)  # a leaves, b is given its place and does not run yet
        assert (crowd.line.running, crowd.line.waiting, crowd.started) == (1, 1, ["a"])
        await crowd.cancel("b")
        assert crowd.started == ["a", "c"], "b's place went on"
        await crowd.end_all()
        assert (crowd.line.waiting, crowd.line.running) == (0, 0)

    run(scene())


def test_cancelled_and_then_next_in_line_at_the_same_moment() -> None:
    async def scene() -> None:
        line = RequestQueue(8, 1)
        crowd = Crowd(line)
        for name in "abc":
            await crowd.come(name)
        crowd.tasks["b"].cancel()
        line.allow("m", 2)  # before b's task woke up: the place is not lost on it
        await settle()
        assert crowd.started == ["a", "c"]
        await crowd.end_all()

    run(scene())


def test_given_a_place_and_out_of_time_at_the_same_moment() -> None:
    async def scene() -> None:
        with Clock() as clock:
            line = RequestQueue(8, 1, clock=clock)
            crowd = Crowd(line)
            await crowd.come("a")
            await crowd.come("b", deadline=2)
            clock.now = 2  # the timer is due, and the loop did not run it yet
            line.allow("m", 2)
            await settle()
            assert crowd.started == ["a", "b"], "the place came first"
            await crowd.end_all()
            assert (line.waiting, line.running) == (0, 0)

    run(scene())


def test_out_of_time_and_given_a_place_at_the_same_moment() -> None:
    async def scene() -> None:
        with Clock() as clock:
            line = RequestQueue(8, 1, clock=clock)
            crowd = Crowd(line)
            await crowd.come("a")
            await crowd.come("b", deadline=2)
            clock.now = 2
            await timers()
            assert (line.waiting, crowd.tasks["b"].done()) == (0, False)
            line.allow("m", 2)
            await settle()
            assert isinstance(crowd.tasks["b"].exception(), DeadlineExceeded)
            assert (crowd.started, line.running) == (["a"], 1)
            await crowd.end_all()

    run(scene())


def test_out_of_time_and_cancelled_at_the_same_moment() -> None:
    async def scene() -> None:
        with Clock() as clock:
            crowd = Crowd(RequestQueue(8, 1, clock=clock))
            await crowd.come("a")
            await crowd.come("b", deadline=2)
            clock.now = 2
            await timers()
            assert (crowd.line.waiting, crowd.tasks["b"].done()) == (0, False)
            await crowd.cancel("b")
            assert crowd.tasks["b"].cancelled()
            await crowd.end("a")
            assert (crowd.line.waiting, crowd.line.running) == (0, 0)
            await crowd.end_all()

    run(scene())


def test_an_error_inside_gives_the_place_back() -> None:
    async def scene() -> None:
        line = RequestQueue(8, 1)
        with pytest.raises(ValueError, match="ours"):
            async with line.turn("m"):
                raise ValueError("ours")
        assert line.running == 0

    run(scene())


_STEPS = st.one_of(
    st.tuples(st.just("come"), st.sampled_from("ab"), st.integers(-1, 1), st.sampled_from([math.inf, 0.0005, -1.0])),
    st.tuples(st.just("end"), st.integers(0, 60)),
    st.tuples(st.just("cancel"), st.integers(0, 60)),
    st.tuples(st.just("allow"), st.sampled_from("ab"), st.integers(0, 3)),
    st.tuples(st.just("turns"), st.integers(1, 3)),
    st.tuples(st.just("time")),
)


class Trial:
    """Does what it is told, and looks after every step whether the line still adds up."""

    def __init__(self, max_running: int | None) -> None:
        self.line = RequestQueue(5, 2, max_running)
        self.crowd = Crowd(self.line)
        self.most = {"a": 2, "b": 2}  # running, allowing for those that ran before places were taken away

    async def step(self, kind: str, *more: Any) -> None:
        tasks = list(self.crowd.tasks.values())
        if kind == "come":
            model, priority, wait_s = more
            self.crowd.send(f"{len(tasks)}", model, priority, time.monotonic() + wait_s)
        elif kind == "end" and more[0] < len(tasks):
            self.crowd.ends[f"{more[0]}"].set()
        elif kind == "cancel" and more[0] < len(tasks):
            tasks[more[0]].cancel()
        elif kind == "allow":
            self.line.allow(*more)
            seen = self.line.status()[more[0]]
            self.most[more[0]] = max(seen.running, more[1])
        elif kind == "turns":
            for _ in range(more[0]):
                await asyncio.sleep(0)
        elif kind == "time":
            await asyncio.sleep(0.001)
        self.check()

    def check(self) -> None:
        line = self.line
        assert line.waiting <= line.max_waiting
        assert line.running <= line.max_running
        for model, seen in line.status().items():
            assert 0 <= seen.running <= self.most[model]
            self.most[model] = max(seen.running, seen.places)
            idle = seen.waiting and seen.running < seen.places and line.running < line.max_running
            assert not idle, "someone waits before a free place"

    async def finish(self) -> None:
        for model in "ab":
            self.line.allow(model, 2)
        for end in await self.crowd.end_all():
            assert end is None or isinstance(end, asyncio.CancelledError | DeadlineExceeded | QueueFull)
        assert (self.line.running, self.line.waiting) == (0, 0)
        again = Crowd(self.line)
        for name in ("a1", "a2", "b1", "b2"):
            await again.come(name, model=name[0])
        assert len(again.started) == min(4, self.line.max_running), "every place is still there"
        await again.end_all()


@given(st.lists(_STEPS, max_size=60), st.sampled_from([None, 1, 3]))
@settings(max_examples=150, deadline=None)
def test_no_place_is_lost_and_none_is_taken_twice(steps: list[tuple[Any, ...]], max_running: int | None) -> None:
    async def scene() -> None:
        trial = Trial(max_running)
        for step in steps:
            await trial.step(*step)
        await trial.finish()

    run(scene())


# Callers


def in_a_loop(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_another_callers_first_request_waits_only_for_the_running_ones() -> None:
    async def run() -> None:
        crowd = Crowd(RequestQueue(256, 2))
        for number in range(200):
            await crowd.come(f"ann {number}", caller="ann")
        await crowd.come("bob 0", caller="bob")
        assert crowd.started == ["ann 0", "ann 1"]
        await crowd.end("ann 0")
        assert crowd.started[2:] == ["bob 0"]
        await crowd.end_all()

    in_a_loop(run())


def test_callers_take_turns() -> None:
    async def run() -> None:
        crowd = Crowd(RequestQueue(256, 1))
        await crowd.come("first", caller="ann")
        for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
            await crowd.come(name, caller=name[0])
        order = ["first"]
        while len(order) < 7:
            await crowd.end(order[-1])
            order.append(crowd.started[-1])
        assert order == ["first", "a1", "b1", "c1", "a2", "b2", "a3"]
        await crowd.end_all()

    in_a_loop(run())


def test_priority_goes_before_turns() -> None:
    async def run() -> None:
        crowd = Crowd(RequestQueue(256, 1))
        await crowd.come("a0", caller="ann")
        await crowd.come("b0", caller="bob")
        for name in ("a1", "a2"):
            await crowd.come(name, caller="ann", priority=1)
        for name in ("a0", "a1", "a2"):
            await crowd.end(name)
        assert crowd.started == ["a0", "a1", "a2", "b0"]
        await crowd.end_all()

    in_a_loop(run())


def test_a_caller_that_filled_the_queue_leaves_a_share_to_others() -> None:
    async def run() -> None:
        line = RequestQueue(8, 1)
        crowd = Crowd(line)
        for number in range(9):
            await crowd.come(f"ann {number}", caller="ann")
        with pytest.raises(QueueFull):
            async with line.turn("m", caller="ann"):
                pass
        for number in range(4):  # half of the queue
            await crowd.come(f"bob {number}", caller="bob")
        assert line.waiting == 12
        for caller in ("ann", "bob"):
            with pytest.raises(QueueFull):
                async with line.turn("m", caller=caller):
                    pass
        await crowd.end("ann 0")
        assert crowd.started == ["ann 0", "bob 0"]
        await crowd.end_all()
        assert line.waiting == 0

    in_a_loop(run())


def test_callers_without_requests_are_forgotten() -> None:
    async def run() -> None:
        line = RequestQueue(8, 1)
        crowd = Crowd(line)
        await crowd.come("a0", caller="ann")
        await crowd.come("a1", caller="ann")
        await crowd.come("b0", caller="bob")
        await crowd.end("a0")
        await crowd.cancel("a1")
        await crowd.end("b0")
        assert crowd.started == ["a0", "b0"]
        queue = line._queue("m")
        assert (queue.running_of, queue.last_turn_of, queue.running) == ({}, {}, 0)

    in_a_loop(run())
