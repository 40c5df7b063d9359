"""Rounds of concurrent requests, for the benchmarks of the gateway and the orchestrator."""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from disaggregated_inference.errors import DisaggError
from disaggregated_inference.timeouts import BenchTimeouts


class CountsTokens(Protocol):
    @property
    def tokens(self) -> int: ...


StreamT = TypeVar("StreamT", bound=CountsTokens)
Item = TypeVar("Item")
Done = TypeVar("Done")


class Round(NamedTuple, Generic[StreamT]):
    """Streams of one contender, and the time that they took together."""

    streams: list[StreamT]
    cpu_s: float
    wall_s: float

    @property
    def tokens(self) -> int:
        return sum(stream.tokens for stream in self.streams)

    @property
    def request_cpu_s(self) -> float:
        return self.cpu_s / len(self.streams)


Rounds = dict[tuple[str, int], list[Round[StreamT]]]  # by contender and tokens per completion


async def alternate(
    contenders: Iterable[str], tokens: int, repeats: int, measure: Callable[[str, int, int], Awaitable[Round[StreamT]]]
) -> Rounds[StreamT]:
    """`measure(contender, tokens, repeat)` for all contenders in turn, so that noise of the machine hits all of them.
    Repeat 0 is the warm-up. Completions of one token are measured as well: they show the cost of a request."""
    rounds: Rounds[StreamT] = defaultdict(list)
    for repeat, name, count in itertools.product(range(repeats + 1), contenders, (1, tokens)):
        measured = await measure(name, count, repeat)
        if repeat:
            rounds[name, count].append(measured)
    return rounds


async def closed_loop(items: Iterable[Item], at_once: int, handle: Callable[[Item], Awaitable[Done]]) -> list[Done]:
    """`at_once` clients; each takes the next item when its last one has ended."""
    waiting, done = iter(items), list[Done]()

    async def client() -> None:
        for item in waiting:
            done.append(await handle(item))

    await asyncio.gather(*(client() for _ in range(at_once)))
    return done


@asynccontextmanager
async def open_streams(
    requests: Iterable[Coroutine[Any, Any, object]],
    all_started: Callable[[], bool],
    timeouts: BenchTimeouts = BenchTimeouts(),
) -> AsyncIterator[None]:
    """The body runs once all requests stream; afterwards they are cancelled."""
    tasks = [asyncio.create_task(request) for request in requests]
    deadline = time.monotonic() + timeouts.start_s
    try:
        while not all_started():
            await asyncio.sleep(0.02)
            for task in tasks:
                if task.done():
                    task.result()
            if time.monotonic() > deadline:
                raise DisaggError(f"not every stream started within {timeouts.start_s:g} s")
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
