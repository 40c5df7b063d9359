"""Streams that have gone quiet: one look at all of them, a few times a second.

A node says something on every stream four times a second. One that does not is asked for its health: a machine
that is busy answers late, a frozen one does not.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable

import aiohttp

_TICK_S = 0.1
_LATE_S = 0.2  # a tick that comes so late shows that it is this process that was held up
_SILENCE_S = 0.4
_MOST_SILENCE_S = 3.0  # of a stream whose node answers elsewhere: the connection is broken, and nobody told us


class StreamSilent(Exception):
    """Nothing came, and the node does not answer either. `refused`: or somebody said that it is gone. `alive`: it
    does answer, elsewhere."""

    def __init__(self, words: str, refused: bool = False, alive: bool = False) -> None:
        super().__init__(words)
        self.refused, self.alive = refused, alive


class MonitoredStream:
    """One open stream. `heard` costs nothing to speak of: it is called for every token."""

    __slots__ = ("_ask", "_asking", "asked_at", "heard_at", "response")

    def __init__(self, response: aiohttp.ClientResponse, ask: Callable[[], Awaitable[None]], now: float) -> None:
        self.response, self.heard_at, self.asked_at = response, now, now
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None

    def look(self, now: float) -> None:
        quiet = now - max(self.heard_at, self.asked_at) > _SILENCE_S
        if quiet and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._verify())

    async def _verify(self) -> None:
        since = self.heard_at
        try:
            await self._ask()
            self.asked_at = asyncio.get_running_loop().time()
            if self.asked_at - self.heard_at > _MOST_SILENCE_S:
                self.response.content.set_exception(StreamSilent("its stream says nothing, and it answers", alive=True))
        except Exception as error:  # whatever it was, it was no answer
            if self.heard_at == since:
                refused = not getattr(error, "silent", False)
                self.response.content.set_exception(StreamSilent(str(error), refused))


class Heartbeats:
    """All open streams of an orchestrator."""

    def __init__(self) -> None:
        self.open: set[MonitoredStream] = set()
        self.held_up_at = -math.inf

    async def registry(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.look(loop.time(), late=loop.time() > due + _LATE_S)

    def look(self, now: float, late: bool) -> None:
        if late:
            self.held_up_at = now
        for listening in self.open:
            if late:
                listening.asked_at = now  # nobody was listening
            else:
                listening.look(now)
