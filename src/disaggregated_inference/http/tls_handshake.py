"""The start of a TLS connection. asyncio's own servers know no connection before its handshake has ended: with this one
it counts from the first moment, as one with an unfinished head."""

import asyncio
import ssl
from collections.abc import Callable

from disaggregated_inference.http.limits import Connections


class TlsHandshake(asyncio.Protocol):
    """Takes a plain connection and gives an encrypted one to the protocol that `serve` makes. `drop` ends it before."""

    def __init__(
        self, serve: Callable[[], asyncio.Protocol], context: ssl.SSLContext, connections: Connections, limit_s: float
    ) -> None:
        self._serve, self._context, self._connections, self._limit_s = serve, context, connections, limit_s
        self._served: asyncio.Protocol | None = None
        self._early, self._lost = b"", False
        self._counted = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if isinstance(peer, tuple) else ""
        self._task = asyncio.get_running_loop().create_task(self._shake_hands())
        if self._connections.opened(self._address):
            self.drop()  # there is no way to tell why without a handshake
        else:
            self._connections.head_began(self, self._address)

    async def _shake_hands(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            encrypted = await loop.start_tls(
                self._transport, self, self._context, server_side=True, ssl_handshake_timeout=self._limit_s
            )
        except OSError:  # also ssl's errors, and the end of the time
            encrypted = None
        self._leave()
        if encrypted and not self._lost:
            self._hand_over(encrypted)

    def _hand_over(self, encrypted: asyncio.Transport) -> None:
        self._served = self._serve()
        self._served.connection_made(encrypted)
        encrypted.set_protocol(self._served)
        if self._early:
            self._served.data_received(self._early)

    def data_received(self, data: bytes) -> None:
        """Between the end of the handshake and the next turn of the event loop."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._leave()
        if self._served:
            self._served.connection_lost(exc)

    def drop(self) -> None:
        """Too many others have come since."""
        self._leave()
        self._task.cancel()
        self._transport.abort()

    def _leave(self) -> None:
        if self._counted:
            self._counted = False
            self._connections.head_ended(self)
            self._connections.closed(self._address)
