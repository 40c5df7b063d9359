"""From the task that runs a request to the reader of its answer. Every token passes through here, so it does less
than an asyncio.Queue: one writer that never waits, one reader that takes all there is."""

import asyncio
from collections.abc import Iterable

from disaggregated_inference.api import Delta


class OutputQueue:
    def __init__(self) -> None:
        self._items: list[Delta] = []
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, deltas: Iterable[Delta]) -> None:
        self._items += deltas
        self._wake()

    def close(self, *_: object) -> None:
        """No more will come."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Delta]:
        """All that has come, at least one; empty at the end."""
        if not self._items and not self._closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items, self._items = self._items, []
        return items
