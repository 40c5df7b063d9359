"""HTTP/1.1 with a deadline for request heads and a limit of connections. uvicorn has no such deadline: a client that
sends a byte now and then would keep its connection for ever, and a thousand such clients would keep all others out
(slowloris)."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from disaggregated_inference.errors import BadRequest, DisaggError, IdentityRefused, RequestTooSlow, ServerBusy
from disaggregated_inference.http.limits import Connections

DescribeHeadError = Callable[[DisaggError], Any]
RequirePeer = Callable[[bytes | None], object]  # raises IdentityRefused for a client's certificate


class HeadDeadlineProtocol(H11Protocol):
    """A request head must be complete within `read_s` of the connection's start, or of the first byte after the last
    response. No clock runs while a request is being answered. This is h11 also where httptools is installed: httptools
    accepts heads of any length, and drops the response to a request that garbage follows."""

    def __init__(
        self,
        *args: Any,
        read_s: float,
        error_body: DescribeHeadError,
        connections: Connections,
        require_peer: RequirePeer | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._require_peer = require_peer
        self._read_s, self._error_body, self._connections = read_s, error_body, connections
        self._received = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if reason := self._connections.opened(self._address):
            self._send_error("Service Unavailable", ServerBusy(reason))
            self.transport.close()
        self._update_timer()

    def data_received(self, data: bytes) -> None:
        self._received = True
        self._connections.idle_ended(self)
        super().data_received(data)
        self._update_timer()

    def handle_events(self) -> None:
        """All requests pass here, also those that came during the answer to another one."""
        require_peer, begins, last = self._require_peer, not self._is_answering, self.cycle
        if not require_peer or not (begins and self.conn.trailing_data[0]) or self._is_welcome(require_peer):
            super().handle_events()
        if self.cycle is not last:
            _close_after_two_lengths(self.scope["headers"])  # type: ignore[arg-type]

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _is_welcome(self, require_peer: RequirePeer) -> bool:
        """Before each request: a certificate may have been revoked since the connection was opened."""
        tls = self.transport.get_extra_info("ssl_object")
        try:
            require_peer(tls.getpeercert(binary_form=True) if tls else None)
        except IdentityRefused as error:
            self._send_error("Forbidden", error)
            self.transport.close()
            return False
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_answering or self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:  # a part of the next request's head came during this response
            self._update_timer()
        else:
            self._connections.idle_began(self, self._address)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connections.closed(self._address)
        self._connections.idle_ended(self)
        self._stop_timer()

    def send_400_response(self, msg: str) -> None:
        """For data that is not HTTP. Once a response has started, nothing more can be sent."""
        if not self.cycle or self.cycle.response_complete or not self.cycle.response_started:
            self._send_error("Bad Request", BadRequest("this is not an HTTP request"))
        self.transport.close()

    def _update_timer(self) -> None:
        """The timer also runs where a response came before the end of its request: the rest of that request is read
        and dropped, but not for ever."""
        if self.transport.is_closing() or self._is_answering:
            self._stop_timer()
        elif not self._timer:
            self._timer = self.loop.call_later(self._read_s, self._expire)
            self._connections.head_began(self, self._address)

    def _stop_timer(self) -> None:
        self._connections.head_ended(self)
        if self._timer:
            self._timer.cancel()
            self._timer = None

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def drop(self) -> None:
        """It is idle, or its head is not complete, and too many others have come since. A polite end of TLS would wait
        for the client."""
        self._stop_timer()
        self.transport.abort()

    def _expire(self) -> None:
        """A silent connection is closed silently: its client might take an error for its first response."""
        self._stop_timer()
        if self._received and not self.cycle:
            message = f"the request head was not complete within {self._read_s:g} s"
            self._send_error("Request Timeout", RequestTooSlow(message))
        self.transport.close()

    def _send_error(self, reason: str, error: DisaggError) -> None:
        body = msgspec.json.encode(self._error_body(error))
        head = f"HTTP/1.1 {error.status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)


def _close_after_two_lengths(headers: list[tuple[bytes, bytes]]) -> None:
    """A body with both lengths, in chunks and by number, ends elsewhere for a proxy that reads the other one. What
    follows it may be a request that the proxy never saw: the connection ends (RFC 9112, 6.1)."""
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        headers.append((b"connection", b"close"))
