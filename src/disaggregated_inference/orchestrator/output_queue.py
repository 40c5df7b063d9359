"""From the task that serves a request to whoever reads its answer. Every token comes through here, so it is less than
an asyncio.Queue: one writer that never waits, one reader that takes all there is."""

import asyncio
from collections.abc import Iterable

from disaggregated_inference.orchestrator.node_client import Delta


class OutputQueue:
    def __init__(self) -> None:
        self._came: list[Delta] = []
        self._closed = False
        self._waiting: asyncio.Future[None] | None = None

    def put(self, deltas: Iterable[Delta]) -> None:
        self._came += deltas
        self._wake()

    def close(self, *_: object) -> None:
        """No more comes."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[Delta]:
        """All that has come, at least something; nothing at the end."""
        if not self._came and not self._closed:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        came, self._came = self._came, []
        return came
