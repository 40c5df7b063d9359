"""Server-sent events about the cluster. One poll of the status serves all subscribers."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import msgspec

from disaggregated_inference.api import ClusterStatus, RequestRecord
from disaggregated_inference.errors import QueueFull
from disaggregated_inference.gateway.cluster.visibility import seen_request, seen_status, seen_summary
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.timeouts import GatewayTimeouts

log = logging.getLogger(__name__)

_MAX_QUEUED = 1024  # events for a subscriber that does not read; then it is dropped
_MAX_QUEUED_BYTES = 2 << 20


class Subscriber:
    """`caller`: whose requests it sees; None: everyone's."""

    def __init__(self, caller: str | None = None) -> None:
        self.caller = caller
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_QUEUED)
        self._queued_bytes = 0

    def put(self, event: bytes) -> bool:
        """False: the subscriber did not read for too long, and its stream ends."""
        if self.events.full() or (self._queued_bytes and self._queued_bytes + len(event) > _MAX_QUEUED_BYTES):
            self.end()
            return False
        self.events.put_nowait(event)
        self._queued_bytes += len(event)
        return True

    async def take(self) -> bytes:
        """All events that wait, in one piece; empty at the end."""
        found = [await self.events.get()]
        while not self.events.empty():
            found.append(self.events.get_nowait())
        self._queued_bytes = 0
        return b"".join(event for event in found if event) if None not in found else b""

    def end(self) -> None:
        """Events that were not sent are dropped, and their memory is freed."""
        while not self.events.empty():
            self.events.get_nowait()
        self.events.put_nowait(None)


class EventStream:
    """`core` is called each time: a new config brings another orchestrator. A key that sees its own requests alone has
    a quarter of the places, all such keys together three quarters: no key keeps the others or the operators out."""

    def __init__(
        self,
        core: Callable[[], DisaggregatedInference],
        timeouts: GatewayTimeouts = GatewayTimeouts(),
        max_subscribers: int = 64,
    ) -> None:
        self._core, self._timeouts, self._max_subscribers = core, timeouts, max_subscribers
        self.subscribers: set[Subscriber] = set()
        self._polling: asyncio.Task[None] | None = None
        self._status: dict[bool, bytes] = {}  # the newest, encoded once for those that see all, once for the others
        self._status_at = -math.inf
        self._summing: asyncio.TimerHandle | None = None
        self._news: set[str] = set()  # callers whose requests ended since the last summary
        core().on_end.append(self.ended)

    def require_room(self, caller: str | None = None) -> None:
        if why := self._why_full(caller):
            raise QueueFull(why, round(self._timeouts.event_quiet_s))

    def _why_full(self, caller: str | None) -> str:
        """Empty: there is room."""
        others = [each.caller for each in self.subscribers if each.caller is not None]
        if caller is not None and others.count(caller) >= max(1, self._max_subscribers // 4):
            return f"this key has {others.count(caller)} event streams already"
        is_full = caller is not None and len(others) >= max(1, self._max_subscribers * 3 // 4)
        if is_full or len(self.subscribers) >= self._max_subscribers:
            return f"all {self._max_subscribers} event streams are in use"
        return ""

    async def listen(self, caller: str | None = None) -> AsyncGenerator[bytes, None]:
        """Events until the client leaves or is too slow. Requests: of this caller; None: all. Events that come within
        `event_batch_s` are sent together: 50 subscribers cost little while hundreds of requests end. Ends at once if
        others have taken the last place since `require_room`."""
        if self._why_full(caller):
            return
        subscriber = Subscriber(caller)
        self.subscribers.add(subscriber)
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll())
        try:
            yield await self._snapshot(caller is None)
            while events := await subscriber.take():
                yield events
                await asyncio.sleep(self._timeouts.event_batch_s)
        finally:
            self._remove(subscriber)

    async def _snapshot(self, sees_all: bool) -> bytes:
        """The status for a new subscriber: of the last poll, if that was a moment ago."""
        if time.monotonic() - self._status_at >= self._timeouts.event_poll_s:
            self._keep(await self._core().cluster_status())
        return self._status[sees_all]

    def _keep(self, status: ClusterStatus) -> None:
        seen = {True: status, False: seen_status(status, "")}
        self._status = {sees_all: encode_event("status", each) for sees_all, each in seen.items()}
        self._status_at = time.monotonic()

    def close(self) -> None:
        """Ends every stream: the server is stopping."""
        if self._summing:
            self._summing.cancel()
        for subscriber in list(self.subscribers):
            subscriber.end()
            self._remove(subscriber)

    def ended(self, record: RequestRecord) -> None:
        """Medians of many requests are no news of one: the summary comes a moment later, for all that ended by then."""
        seeing = [each for each in self.subscribers if each.caller in (None, record.caller)]
        if not seeing:
            return
        row = record.row()
        for caller in {each.caller for each in seeing}:
            event = encode_event("request", seen_request(row, caller))
            self._publish(event, [each for each in seeing if each.caller == caller])
        self._news.add(record.caller)
        if self._summing is None:
            loop = asyncio.get_running_loop()
            self._summing = loop.call_later(self._timeouts.event_poll_s, self.send_summary)

    def send_summary(self) -> None:
        core, news, self._news, self._summing = self._core(), self._news, set(), None
        for caller in {each.caller for each in self.subscribers if each.caller is None or each.caller in news}:
            event = encode_event("summary", seen_summary(core, caller))
            self._publish(event, [each for each in self.subscribers if each.caller == caller])

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
                status = await self._core().cluster_status()
            except Exception:  # the next poll may succeed
                log.exception("the cluster's status is not known")
                continue
            now, news = time.monotonic(), _without_changing_fields(status)
            if news != sent or now - sent_at >= self._timeouts.event_quiet_s:
                sent, sent_at = news, now
                self._keep(status)
                for sees_all, event in self._status.items():
                    self._publish(event, [each for each in self.subscribers if (each.caller is None) == sees_all])


def encode_event(name: str, content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(content))


def _without_changing_fields(status: ClusterStatus) -> bytes:
    """These always change and are no news."""
    nodes = tuple(msgspec.structs.replace(node, heard_s_ago=None, warmth=0.0, readings=None) for node in status.nodes)
    return msgspec.json.encode(msgspec.structs.replace(status, nodes=nodes, uptime=None))
