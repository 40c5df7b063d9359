"""HTTP to one node: requests and event streams, each within a time limit.

No call waits without a limit. A stream that is silent for longer than its heartbeat has its node probed, and so does a
request whose response does not begin.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import aiohttp
import msgspec

from disaggregated_inference.api import (
    CHECKSUM_HEADER,
    ChecksumReader,
    DecodeRequest,
    NodeHealth,
    PrefillRequest,
    PrefillResponse,
    StreamDamaged,
    StreamEvent,
    body_is_proven,
    checksum_text,
)
from disaggregated_inference.cluster import Server
from disaggregated_inference.orchestrator.connections import post, send, without_frames
from disaggregated_inference.orchestrator.heartbeat import Heartbeats, MonitoredStream, PendingRequest, StreamSilent
from disaggregated_inference.orchestrator.leg_errors import LegFailed, NodeRefused
from disaggregated_inference.orchestrator.node_failures import (
    UNREADABLE,
    failure_in_stream,
    failure_of_answer,
    failure_of_line,
)
from disaggregated_inference.orchestrator.stream_check import BadEvents, StreamCheck

_PATIENCE = 8  # times its recent latency: a busy machine is slow for all clients, a frozen one is silent
_OLD = "it is an older version, or a proxy drops the header X-Checksum"
_DECAY = 0.9  # what is left of a slow answer after the next one
_MAX_BODY_BYTES = 256 << 20  # of a small request's answer; a tokenizer has some tens of MB
_MAX_ERROR_BYTES = 1 << 20
_MAX_EVENT_BYTES = 16 << 20

_event = msgspec.json.Decoder(StreamEvent)
_events = msgspec.json.Decoder(list[StreamEvent])


class NodeClient:
    """Requests to one node, over a connection pool that all nodes share."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, heartbeats: Heartbeats, stuck_s: float) -> None:
        self.server, self._session, self._heartbeats, self._stuck_s = server, session, heartbeats, stuck_s
        self._timeouts = heartbeats.timeouts
        self._dial_timeout = aiohttp.ClientTimeout(total=None, connect=self._timeouts.dial_s)
        self._headers = {"Authorization": f"Bearer {server.token}"} if server.token else {}
        self._asking = self._headers | {CHECKSUM_HEADER: checksum_text(b"")}  # of requests without a body
        self.epoch = ""  # of its last status: after a restart the node may hold another model
        self.replaceable: Callable[[], bool] = lambda: False  # whether another node could do its work now
        self.last_data_at = -math.inf  # when it last sent anything on a stream
        self.latency_s = 0.0  # of its recent answers to small requests
        self._probe: asyncio.Task[NodeHealth] | None = None
        self._cancels: set[asyncio.Task[None]] = set()

    async def get(self, path: str, timeout_s: float) -> bytes:
        """A small request. Every failure is a `LegFailed`: also an answer whose checksum does not fit."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=min(self._timeouts.dial_s, timeout_s))
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        try:
            options = {"headers": self._asking, "timeout": timeout, "allow_redirects": False}
            url, closed_s = self.server.url + path, self._timeouts.closed_connection_s
            async with await send(self._session, "GET", url, closed_s, **options) as response:
                body = await self._bounded(response, _MAX_BODY_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise failure_of_line(self.server, error) from without_frames(error)
        self.latency_s = max(loop.time() - sent_at, self.latency_s * _DECAY)
        if response.status != 200 and path != "/health":
            raise failure_of_answer(self.server, response.status, body)
        self._require_proven(response, body)
        return body

    def _require_proven(self, response: aiohttp.ClientResponse, body: bytes) -> None:
        if CHECKSUM_HEADER not in response.headers:
            raise self._bad_answer(f"it does not answer as a node: its answer has no checksum, so {_OLD}")
        if not body_is_proven(response.headers, body):
            raise self._bad_answer("its answer was damaged on the way: its checksum differs")

    async def health(self) -> NodeHealth:
        """One probe at a time, shared by all callers."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._fetch_health())
        return await asyncio.shield(self._probe)

    async def _fetch_health(self) -> NodeHealth:
        sent_at = asyncio.get_running_loop().time()
        try:
            body = await self.get("/health", self._probe_timeout_s())
        except LegFailed as error:
            if not error.timed_out or self._heartbeats.held_up_at < sent_at:
                raise
            body = await self.get("/health", self._probe_timeout_s())  # this process itself was paused meanwhile
        try:
            return msgspec.json.decode(body, type=NodeHealth)
        except UNREADABLE as error:
            raise self._bad_answer(f"its health cannot be read: {error}") from error

    def _probe_timeout_s(self) -> float:
        usual_s = _PATIENCE * self.latency_s if self.replaceable() else math.inf
        return min(self._timeouts.max_probe_s, max(self._timeouts.probe_s, usual_s))

    async def prefill(self, request: PrefillRequest, request_id: str) -> str:
        """Start a prefill; returns the context that the decode node fetches with."""
        try:
            async with self._post("/prefill", request, request_id) as response:
                body = await self._read(response)
                self._require_proven(response, body)
        except NodeRefused as error:
            if error.status != 504:
                raise
            raise LegFailed(self.server.name, error.code, str(error)) from error  # another node may have memory
        try:
            return msgspec.json.decode(body, type=PrefillResponse).context
        except UNREADABLE as error:
            raise self._bad_answer(f"its answer cannot be read: {error}") from error

    def cancel_prefill(self, ticket: str) -> None:
        """In the background, since the caller itself may be cancelled."""
        task = asyncio.create_task(self._cancel(ticket))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def flush(self) -> None:
        """Wait for background requests."""
        await asyncio.gather(*self._cancels, return_exceptions=True)

    async def _cancel(self, ticket: str) -> None:
        timeout = aiohttp.ClientTimeout(total=self._timeouts.cancel_s)
        try:
            url, options = f"{self.server.url}/prefill/{ticket}", {"headers": self._headers, "timeout": timeout}
            async with await send(self._session, "DELETE", url, self._timeouts.closed_connection_s, **options):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            without_frames(error)  # the ticket's lease ends it

    async def generate(
        self, path: str, request: DecodeRequest, request_id: str, check: StreamCheck
    ) -> AsyncGenerator[list[StreamEvent], None]:
        """The events of an answer, as many at a time as have arrived, once `check` has passed them."""
        async with self._post(path, request, request_id) as response:
            loop = asyncio.get_running_loop()
            stream = MonitoredStream(response, self._require_alive, loop.time(), self._timeouts)
            self._heartbeats.open.add(stream)
            try:
                rest, proven, receive = b"", self._proven(response), response.content.readany
                while True:
                    try:
                        data = await receive()  # the heartbeat ends the wait on a silent stream
                    except (aiohttp.ClientError, StreamSilent, OSError) as error:
                        raise failure_of_line(self.server, error) from without_frames(error)
                    stream.last_data_at = self.last_data_at = loop.time()
                    *lines, rest = (rest + self._feed(proven, data)).split(b"\n\n")
                    if len(rest) > _MAX_EVENT_BYTES:
                        raise self._bad_answer(f"an event of its stream has no end within {_MAX_EVENT_BYTES} bytes")
                    if events := self._parse(lines, check):
                        yield events
                        if events[-1].done:
                            self._require_nothing(rest + self._feed(proven, await self._drain(response)))
                            return
                        if events[-1].error:
                            raise failure_in_stream(self.server, events[-1].error, check.began)
                    elif not data:
                        raise LegFailed(self.server.name, "stream_ended", "its stream ended too early", node_gone=True)
            finally:
                self._heartbeats.open.discard(stream)

    def _proven(self, response: aiohttp.ClientResponse) -> ChecksumReader:
        """What of the stream is proven by its checksums."""
        if CHECKSUM_HEADER not in response.headers:
            raise self._bad_answer(f"its stream has no checksums: {_OLD}")
        return ChecksumReader()

    def _feed(self, proven: ChecksumReader, data: bytes) -> bytes:
        try:
            return proven.feed(data)
        except StreamDamaged as error:
            raise self._bad_answer(str(error)) from error

    def _parse(self, lines: list[bytes], check: StreamCheck) -> list[StreamEvent]:
        """Tokens, and perhaps the end or an error. One decode call for all of them costs half."""
        data = [line[6:] for line in lines if line.startswith(b"data: ")]
        if len(data) < len(lines):
            self._read_comments([line for line in lines if not line.startswith(b"data: ")])
        try:
            events = [_event.decode(data[0])] if len(data) == 1 else _events.decode(b"[%b]" % b",".join(data))
            check.check(events)
        except UNREADABLE as error:
            raise self._bad_answer(f"its stream cannot be read: {error}") from error
        except BadEvents as error:
            raise self._bad_answer(f"its stream breaks the protocol: {error}", tainted=error.tainted) from error
        return events

    async def _drain(self, response: aiohttp.ClientResponse) -> bytes:
        """To the very end, so that the connection can be reused. A node that fails now has done its work, also one
        that freezes: the heartbeat still watches this stream."""
        rest = b""
        with suppress(aiohttp.ClientError, StreamSilent, TimeoutError, OSError):
            async with asyncio.timeout(self._timeouts.small_body_s):
                while len(rest) < _MAX_ERROR_BYTES and (part := await response.content.readany()):
                    rest += part
        return rest

    def _require_nothing(self, rest: bytes) -> None:
        if any(line and not line.startswith(b":") for line in rest.split(b"\n\n")):
            raise self._bad_answer("its stream goes on after its end")

    async def _require_alive(self) -> None:
        self._require_unstuck((await self.health()).stalled_s)

    def _read_comments(self, comments: list[bytes]) -> None:
        """`: alive 31.2`: the engine has been at one call for 31.2 s."""
        for line in comments:
            if not line.startswith(b":"):
                raise self._bad_answer("its stream is not made of events")
            seconds = line[7:].strip()
            if line.startswith(b": alive") and seconds.replace(b".", b"", 1).isdigit():
                self._require_unstuck(float(seconds))

    def _require_unstuck(self, stalled_s: float) -> None:
        if stalled_s > self._stuck_s:
            message = f"its engine has made no progress for {stalled_s:.0f} s"
            raise LegFailed(self.server.name, "stuck", message, node_gone=True)

    @asynccontextmanager
    async def _post(self, path: str, request: msgspec.Struct, request_id: str) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = self._headers | {"X-Request-Id": request_id, "Content-Type": "application/json"}
        if self.epoch:
            headers["X-Node-Epoch"] = self.epoch
        url, body = self.server.url + path, msgspec.json.encode(request)
        headers[CHECKSUM_HEADER] = checksum_text(body)
        try:
            with PendingRequest(self._heartbeats, self._require_alive):
                options = {"data": body, "headers": headers, "timeout": self._dial_timeout, "allow_redirects": False}
                response = await post(self._session, url, self._timeouts.closed_connection_s, **options)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise failure_of_line(self.server, error) from without_frames(error)
        try:
            if response.status != 200:
                raise await self._refused(response)
            yield response
        finally:
            response.close()  # the connection is kept only if the response was read to its end

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            async with asyncio.timeout(self._timeouts.small_body_s):
                return await self._bounded(response, _MAX_BODY_BYTES if response.status == 200 else _MAX_ERROR_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise failure_of_line(self.server, error) from without_frames(error)

    async def _bounded(self, response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
        body = bytearray()
        while part := await response.content.readany():
            body += part
            if len(body) > limit_bytes:
                raise self._bad_answer(f"its answer has more than {limit_bytes} bytes")
        return bytes(body)

    def _bad_answer(self, message: str, *, tainted: bool = False) -> LegFailed:
        return LegFailed(self.server.name, "bad_answer", message, tainted=tainted)

    async def _refused(self, response: aiohttp.ClientResponse) -> Exception:
        """A refusal ends the request: its checksum must prove it. What is not proven is tried elsewhere."""
        body = await self._read(response)
        error = failure_of_answer(self.server, response.status, body, response.headers.get("Retry-After"))
        is_believed = not isinstance(error, NodeRefused) or body_is_proven(response.headers, body)
        return error if is_believed else self._bad_answer(f"its refusal has no checksum that fits: {error}")
