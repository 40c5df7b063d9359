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


class Silent(Exception):
    """Nothing came, and the node does not answer either. `refused`: or somebody said that it is gone."""

    def __init__(self, words: str, refused: bool = False) -> None:
        super().__init__(words)
        self.refused = refused


class Listening:
    """One open stream. `heard` costs nothing to speak of: it is called for every token."""

    __slots__ = ("_ask", "_asking", "heard_at", "response")

    def __init__(self, response: aiohttp.ClientResponse, ask: Callable[[], Awaitable[None]], now: float) -> None:
        self.response, self.heard_at = response, now
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None

    def suspect(self) -> None:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._verify())

    async def _verify(self) -> None:
        since = self.heard_at
        try:
            await self._ask()
            self.heard_at = asyncio.get_running_loop().time()
        except Exception as error:  # whatever it was, it was no answer
            if self.heard_at == since:
                refused = not getattr(error, "silent", False)
                self.response.content.set_exception(Silent(str(error), refused))


class Pulses:
    """All open streams of an orchestrator."""

    def __init__(self) -> None:
        self.open: set[Listening] = set()
        self.held_up_at = -math.inf

    async def watch(self) -> None:
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
                listening.heard_at = now  # nobody was listening
            elif now - listening.heard_at > _SILENCE_S:
                listening.suspect()
