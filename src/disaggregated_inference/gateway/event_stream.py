"""What happens in the cluster, to all who listen: server-sent events, one look a second however many they are."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from disaggregated_inference.errors import QueueFull
from disaggregated_inference.orchestrator import DisaggregatedInference

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_QUIET_S = 5.0  # a status that says nothing new comes no more often than this: it keeps the connection alive
_MOST_WAITING = 256  # events before a listener that does not read; then it is let go
_MOST_LISTENERS = 64
_RESTLESS = ("heard_s_ago", "warmth")  # of a node: they always change, and say nothing new


class Subscriber:
    def __init__(self) -> None:
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_WAITING)

    def put(self, some: bytes) -> bool:
        """False: it did not read for too long, and this was the end."""
        if self.events.full():
            self.end()
            return False
        self.events.put_nowait(some)
        return True

    def end(self) -> None:
        """Nothing more: what waits is let go, and so is the memory that it takes."""
        while not self.events.empty():
            self.events.get_nowait()
        self.events.put_nowait(None)


class EventStream:
    """`core` is asked for each time: a new config brings another one."""

    def __init__(self, core: Callable[[], DisaggregatedInference]) -> None:
        self._core = core
        self.listeners: set[Subscriber] = set()
        self._looking: asyncio.Task[None] | None = None
        core().on_end.append(self.ended)

    def require_room(self) -> None:
        if len(self.listeners) >= _MOST_LISTENERS:
            raise QueueFull(f"{_MOST_LISTENERS} listen already", round(_QUIET_S))

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """Events until whoever listens leaves or is too slow."""
        listener = Subscriber()
        self.listeners.add(listener)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        try:
            yield event("status", await self._core().status())
            while (some := await listener.events.get()) is not None:
                yield some
        finally:
            self._leave(listener)

    def close(self) -> None:
        """Every stream ends: the server is stopping."""
        for listener in list(self.listeners):
            listener.end()
            self._leave(listener)

    def ended(self, record: dict[str, Any]) -> None:
        """A record of the history."""
        if self.listeners:
            self._tell(list(self.listeners), event("request", record))

    def _tell(self, listeners: list[Subscriber], some: bytes) -> None:
        for listener in listeners:
            if not listener.put(some):
                self._leave(listener)

    def _leave(self, listener: Subscriber) -> None:
        self.listeners.discard(listener)
        if not self.listeners and self._looking:
            self._looking.cancel()
            self._looking = None

    async def _look(self) -> None:
        said, said_at = b"", time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                status = await self._core().status()
            except Exception:  # the next look may see more
                log.exception("the cluster's status is not known")
                continue
            now, steady = time.monotonic(), _steady(status)
            if steady != said or now - said_at >= _QUIET_S:
                said, said_at = steady, now
                self._tell(list(self.listeners), event("status", status))


def event(name: str, content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(content))


def _steady(status: dict[str, Any]) -> bytes:
    """Of a status, what is news when it changes."""
    nodes = [{name: value for name, value in node.items() if name not in _RESTLESS} for node in status["nodes"]]
    return msgspec.json.encode(status | {"nodes": nodes})
