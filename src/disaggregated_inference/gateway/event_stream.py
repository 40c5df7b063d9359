"""Server-sent events about the cluster. One poll of the status serves all subscribers."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import msgspec

from disaggregated_inference.api import RequestRecord
from disaggregated_inference.errors import QueueFull
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.timeouts import GatewayTimeouts

log = logging.getLogger(__name__)

_MAX_QUEUED = 256  # events for a subscriber that does not read; then it is dropped
_CHANGING_FIELDS = ("heard_s_ago", "warmth")  # of a node: they always change and are no news


class Subscriber:
    """`caller`: whose requests it sees; None: everyone's."""

    def __init__(self, caller: str | None = None) -> None:
        self.caller = caller
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_QUEUED)

    def put(self, event: bytes) -> bool:
        """False: the subscriber did not read for too long, and its stream ends."""
        if self.events.full():
            self.end()
            return False
        self.events.put_nowait(event)
        return True

    def end(self) -> None:
        """Events that were not sent are dropped, and their memory is freed."""
        while not self.events.empty():
            self.events.get_nowait()
        self.events.put_nowait(None)


class EventStream:
    """`core` is called each time: a new config brings another orchestrator."""

    def __init__(
        self,
        core: Callable[[], DisaggregatedInference],
        timeouts: GatewayTimeouts = GatewayTimeouts(),
        max_subscribers: int = 64,
    ) -> None:
        self._core, self._timeouts, self._max_subscribers = core, timeouts, max_subscribers
        self.subscribers: set[Subscriber] = set()
        self._polling: asyncio.Task[None] | None = None
        core().on_end.append(self.ended)

    def require_room(self) -> None:
        if len(self.subscribers) >= self._max_subscribers:
            message = f"all {self._max_subscribers} event streams are in use"
            raise QueueFull(message, round(self._timeouts.event_quiet_s))

    async def listen(self, caller: str | None = None) -> AsyncGenerator[bytes, None]:
        """Events until the client leaves or is too slow. Requests: of this caller; None: all."""
        subscriber = Subscriber(caller)
        self.subscribers.add(subscriber)
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll())
        try:
            yield encode_event("status", await self._core().status())
            while (event := await subscriber.events.get()) is not None:
                yield event
        finally:
            self._remove(subscriber)

    def close(self) -> None:
        """Ends every stream: the server is stopping."""
        for subscriber in list(self.subscribers):
            subscriber.end()
            self._remove(subscriber)

    def ended(self, record: RequestRecord) -> None:
        seeing = [each for each in self.subscribers if each.caller in (None, record.caller)]
        if seeing:
            self._publish(encode_event("request", record.row()), seeing)

    def _publish(self, event: bytes, subscribers: Iterable[Subscriber]) -> None:
        for subscriber in list(subscribers):
            if not subscriber.put(event):
                self._remove(subscriber)

    def _remove(self, subscriber: Subscriber) -> None:
        self.subscribers.discard(subscriber)
        if not self.subscribers and self._polling:
            self._polling.cancel()
            self._polling = None

    async def _poll(self) -> None:
        sent, sent_at = b"", time.monotonic()
        while True:
            await asyncio.sleep(self._timeouts.event_poll_s)
            try:
                status = await self._core().status()
            except Exception:  # the next poll may succeed
                log.exception("the cluster's status is not known")
                continue
            now, news = time.monotonic(), _without_changing_fields(status)
            if news != sent or now - sent_at >= self._timeouts.event_quiet_s:
                sent, sent_at = news, now
                self._publish(encode_event("status", status), self.subscribers)


def encode_event(name: str, content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(content))


def _without_changing_fields(status: dict[str, Any]) -> bytes:
    nodes = [{name: value for name, value in node.items() if name not in _CHANGING_FIELDS} for node in status["nodes"]]
    return msgspec.json.encode(status | {"nodes": nodes})
