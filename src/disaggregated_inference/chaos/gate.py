"""Clients pass a gate before each request. A closed gate lets the running ones end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from disaggregated_inference.timeouts import ChaosTimeouts


class Gate:
    """`idle_s`: for running requests to end."""

    def __init__(self, idle_s: float = ChaosTimeouts().idle_s) -> None:
        self.inside, self._idle_s = 0, idle_s
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        await self._open.wait()
        self.inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.inside -= 1
            if not self.inside:
                self._empty.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[bool]:
        """Yields whether all requests have ended."""
        self._open.clear()
        try:
            async with asyncio.timeout(self._idle_s):
                await self._empty.wait()
            is_idle = True
        except TimeoutError:
            is_idle = False
        try:
            yield is_idle
        finally:
            self._open.set()
