"""HTTP to one node: what is asked, what comes back, and whose fault it is when it does not.

Nothing here waits without an end. A stream that says nothing for longer than its pulse is a frozen node; a request
whose answer does not begin is looked after by asking the node for its health meanwhile.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import msgspec

from disaggregated_inference.cluster.config import Server
from disaggregated_inference.errors import BadRequest, DisaggError
from disaggregated_inference.orchestrator.heartbeat import Heartbeats, MonitoredStream, StreamSilent

_LOOK_AFTER_S = 0.4
_PROBE_S = 0.45  # for a health that is asked for because something is odd
_MOST_PROBE_S = 4.0  # also for a node that nobody can replace: to give it up would be the end of the request
_PATIENCE = 8  # times as long as it lately took to answer: a busy machine is slow to everybody, a frozen one silent
_FORGOTTEN = 0.9  # what is left of a slow answer after the next one
_BODY_S = 5.0  # for the rest of a small answer that has begun
_DIAL_S = 1.0

# What a decode node says when the other leg is the one that failed.
_OF_THE_PREFILL = frozenset(
    {
        "peer_gone",
        "peer_failed",
        "peer_refused",
        "ticket_refused",
        "protocol_error",
        "checksum_mismatch",
        "version_unsupported",
        "fingerprint_mismatch",
    }
)
# What another node may answer otherwise: it is no node, or was started again as another one, or is too small.
_ITS_OWN = frozenset({"bad_answer", "not_found", "request_too_large"})
_BUSY = frozenset({"node_busy", "kv_memory_full", "queue_full"})


class LegFailed(Exception):
    """One leg of a request failed, and another node may do better."""

    def __init__(self, node: str, code: str, message: str, hard: bool = False) -> None:
        super().__init__(f"{node}: {message}")
        self.message = message
        self.node, self.code, self.hard = node, code, hard  # hard: the node itself is gone, not only this request
        self.silent = False  # nobody said no: it may only be slow
        self.broke = False  # a connection did: it may be that alone

    @property
    def of_prefill(self) -> bool:
        return self.code in _OF_THE_PREFILL


class LegBusy(Exception):
    """It is well, and has no room for this request now."""

    def __init__(self, node: str, message: str, retry_after_s: float) -> None:
        super().__init__(f"{node}: {message}")
        self.node, self.retry_after_s = node, retry_after_s


class NodeRefused(DisaggError):
    """A node says that the request itself is wrong: another node would say the same."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self._code = status, code

    @property
    def code(self) -> str:
        return self._code


class RequestRefused(NodeRefused, BadRequest):
    """For what it asks: who catches a `BadRequest` need not know whether it was refused here or by a node."""


def refused(status: int, code: str, message: str) -> NodeRefused:
    """What is not there (404) or came too late (504) may have been asked for quite rightly."""
    kind = RequestRefused if status in (400, 413, 422) else NodeRefused
    return kind(status, code, message)


class ErrorDetail(msgspec.Struct, frozen=True):
    code: str = "internal_error"
    message: str = "no reason given"


class Progress(msgspec.Struct, frozen=True):
    """How much of a prompt the node that will write has. By llama.cpp's names."""

    total: int
    cache: int  # held before the request came
    processed: int  # those included
    time_ms: int


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What a stream brings: the next piece of text of one choice. The last one of all has the metrics."""

    text: str = ""
    token: int | None = None
    choice: int = msgspec.field(default=0, name="index")
    logprob: float | None = None
    top_logprobs: tuple[dict[str, int | float], ...] = ()
    finish_reason: str | None = None
    thinking: str = ""  # of a node that takes text, which tells thoughts and calls apart by itself
    tool_calls: tuple[dict[str, Any], ...] = ()
    metrics: dict[str, Any] | None = None
    progress: Progress | None = None  # before the first token, where it was asked for: then there is nothing else


class TokenEvent(Delta, frozen=True, gc=False):
    """One line of a decode node's stream: a token, which goes to the client as it is; the end, an error, or how far the
    reading is."""

    done: bool = False
    error: ErrorDetail | None = None


class NodeHealth(msgspec.Struct, frozen=True):
    status: str = "unhealthy"
    epoch: str = ""
    stalled_s: float = 0.0


_events = msgspec.json.Decoder(list[TokenEvent])


class NodeClient:
    """Requests to one node, over one pool of connections that all nodes share."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, heartbeats: Heartbeats, stuck_s: float) -> None:
        self.server, self._session, self._heartbeats, self._stuck_s = server, session, heartbeats, stuck_s
        self._headers = {"Authorization": f"Bearer {server.token}"} if server.token else {}
        self.epoch = ""  # in which its status was last seen: started again, it may hold another model
        self._probe: asyncio.Task[NodeHealth] | None = None
        self.replaceable: Callable[[], bool] = lambda: False  # whether another node could do its work now
        self._slowness_s = 0.0  # of its answers to small questions, lately
        self.heard_at = -math.inf  # when it last said anything on a stream
        self._telling: set[asyncio.Task[None]] = set()

    async def get(self, path: str, timeout_s: float) -> bytes:
        """A small question. Whatever goes wrong is a failed leg."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=min(_DIAL_S, timeout_s))
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        try:
            async with self._session.get(self.server.url + path, headers=self._headers, timeout=timeout) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._gone(error) from error
        self._slowness_s = max(loop.time() - asked_at, self._slowness_s * _FORGOTTEN)
        if response.status >= 400 and path != "/health":
            raise self._said(response.status, body)
        return body

    async def health(self) -> NodeHealth:
        """One question at a time, whoever asks."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._health())
        return await asyncio.shield(self._probe)

    async def _health(self) -> NodeHealth:
        asked_at = asyncio.get_running_loop().time()
        try:
            body = await self.get("/health", self._patience_s())
        except LegFailed as error:
            if not error.silent or self._heartbeats.held_up_at < asked_at:
                raise
            body = await self.get("/health", self._patience_s())  # it was this process that did not listen
        try:
            return msgspec.json.decode(body, type=NodeHealth)
        except msgspec.DecodeError as error:
            raise LegFailed(self.server.name, "bad_answer", f"its health cannot be read: {error}") from error

    def _patience_s(self) -> float:
        usual_s = _PATIENCE * self._slowness_s if self.replaceable() else math.inf
        return min(_MOST_PROBE_S, max(_PROBE_S, usual_s))

    async def prefill(self, body: dict[str, Any], request_id: str) -> str:
        """Begin; returns the context to fetch from."""
        try:
            async with self._post("/prefill", body, request_id) as response:
                answer = msgspec.json.decode(await self._read(response))
        except NodeRefused as error:
            if error.status != 504:
                raise
            raise LegFailed(self.server.name, error.code, str(error)) from error  # others may have memory for it
        context: str = answer["context"]
        return context

    def cancel_soon(self, ticket: str) -> None:
        """Nobody will come for this cache. In the background: whoever says so may be cancelled itself."""
        task = asyncio.create_task(self._cancel(ticket))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def told(self) -> None:
        """Until nothing is being said in the background any more."""
        await asyncio.gather(*self._telling, return_exceptions=True)

    async def _cancel(self, ticket: str) -> None:
        timeout = aiohttp.ClientTimeout(total=2.0)
        try:
            url = f"{self.server.url}/prefill/{ticket}"
            async with self._session.delete(url, headers=self._headers, timeout=timeout):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError):
            return  # the ticket's lease ends it

    async def write(self, path: str, body: dict[str, Any], request_id: str) -> AsyncGenerator[list[TokenEvent], None]:
        """The events of an answer, as many at a time as have come."""
        async with self._post(path, body | {"stream": True}, request_id) as response:
            loop = asyncio.get_running_loop()
            listening = MonitoredStream(response, self._require_life, loop.time())
            self._heartbeats.open.add(listening)
            try:
                rest = b""
                while True:
                    data = await self._some(response)
                    listening.heard_at = self.heard_at = loop.time()
                    *lines, rest = (rest + data).split(b"\n\n")
                    if events := self._parsed(lines):
                        yield events
                        if events[-1].done:
                            await self._rest(response)
                            return
                        if events[-1].error:
                            raise self._failure(events[-1].error)
                    elif not data:
                        raise LegFailed(self.server.name, "stream_ended", "the stream ended in the middle", hard=True)
            finally:
                self._heartbeats.open.discard(listening)

    def _parsed(self, lines: list[bytes]) -> list[TokenEvent]:
        """Tokens, and perhaps the end, or an error."""
        told = [line[6:] for line in lines if line.startswith(b"data: ")]
        if not told:
            self._require_progress(lines)
        return _events.decode(b"[%b]" % b",".join(told))  # all at once: that is half of the work

    async def _rest(self, response: aiohttp.ClientResponse) -> None:
        """To the very end, so that the connection can serve again; a node that fails now has done its work."""
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with asyncio.timeout(_BODY_S):
                await response.content.read()

    async def _require_life(self) -> None:
        looking = await self.health()
        if looking.stalled_s > self._stuck_s:
            message = f"its engine has made no progress for {looking.stalled_s:.0f} s"
            raise LegFailed(self.server.name, "stuck", message, hard=True)

    def _require_progress(self, comments: list[bytes]) -> None:
        """`: alive 31.2`: so long has its engine been at one thing."""
        for line in comments:
            told = line[7:].strip().replace(b".", b"", 1)
            seconds = float(line[7:]) if line.startswith(b": alive") and told.isdigit() else 0.0
            if seconds > self._stuck_s:
                message = f"its engine has made no progress for {seconds:.0f} s"
                raise LegFailed(self.server.name, "stuck", message, hard=True)

    @asynccontextmanager
    async def _post(self, path: str, body: dict[str, Any], request_id: str) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = self._headers | {"X-Request-Id": request_id, "Content-Type": "application/json"}
        if self.epoch:
            headers["X-Node-Epoch"] = self.epoch
        timeout = aiohttp.ClientTimeout(total=None, connect=_DIAL_S)
        asking = asyncio.ensure_future(
            self._session.post(
                self.server.url + path, data=msgspec.json.encode(body), headers=headers, timeout=timeout
            ).__aenter__()
        )
        try:
            response = await self._looked_after(asking)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._gone(error) from error
        try:
            if response.status != 200:
                raise self._said(response.status, await self._read(response), response.headers.get("Retry-After"))
            yield response
        finally:
            response.close()  # not kept for others unless it was read to its end

    async def _looked_after(self, asking: "asyncio.Future[aiohttp.ClientResponse]") -> aiohttp.ClientResponse:
        """The node may take its time; but not be frozen, or stuck, meanwhile."""
        try:
            while not (await asyncio.wait({asking}, timeout=_LOOK_AFTER_S))[0]:
                await self._require_life()
            return asking.result()
        except BaseException:
            asking.cancel()
            if asking.done() and not asking.cancelled() and not asking.exception():
                asking.result().close()
            raise

    async def _some(self, response: aiohttp.ClientResponse) -> bytes:
        """What has come, at least something; who watches the pulses ends it where nothing does."""
        try:
            return await response.content.readany()
        except (aiohttp.ClientError, StreamSilent, OSError) as error:
            raise self._gone(error) from error

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            async with asyncio.timeout(_BODY_S):
                return await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> LegFailed:
        if isinstance(error, StreamSilent):  # somebody asked meanwhile, and has found the words
            words = str(error).removeprefix(f"{self.server.name}: ")
            if error.alive:
                return LegFailed(self.server.name, "stream_ended", words)
            failure = LegFailed(self.server.name, "unreachable", words, hard=True)
            failure.silent = not error.refused
            return failure
        cause = getattr(error, "os_error", None) or error  # aiohttp's own words name sockets and sessions
        reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        words = "it does not answer" if isinstance(error, TimeoutError) else f"it cannot be reached: {reason}"
        if isinstance(error, aiohttp.ClientPayloadError):
            words = "it broke off in the middle of its answer"
        failure = LegFailed(self.server.name, "unreachable", words, hard=True)
        failure.silent = isinstance(error, TimeoutError)
        failure.broke = not failure.silent and not isinstance(error, aiohttp.ClientConnectorError)
        return failure

    def _said(self, status: int, body: bytes, retry_after: str | None = None) -> Exception:
        try:
            failure = msgspec.convert(msgspec.json.decode(body)["error"], ErrorDetail)
        except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError):
            code = "unauthorized" if status in (401, 403) else "bad_answer"
            failure = ErrorDetail(code, f"it does not answer as a node: HTTP {status}")
        if failure.code in _BUSY:
            wait_s = float(retry_after) if retry_after and retry_after.isdigit() else 1.0
            return LegBusy(self.server.name, failure.message, wait_s)
        if status in (400, 404, 413, 422, 504) and failure.code not in _ITS_OWN:
            return refused(status, failure.code, failure.message)
        return LegFailed(self.server.name, failure.code, failure.message)

    def _failure(self, failure: ErrorDetail) -> Exception:
        """An error in the middle of a stream."""
        if failure.code in _BUSY:
            return LegBusy(self.server.name, failure.message, 1.0)
        if failure.code in ("deadline_exceeded", "bad_request", "context_too_long"):
            return refused(504 if failure.code == "deadline_exceeded" else 400, failure.code, failure.message)
        return LegFailed(self.server.name, failure.code, failure.message)
