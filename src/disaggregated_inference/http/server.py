"""The HTTP server of every process: uvicorn with deadlines, a ready line, and a drain before it stops."""

import asyncio
import json
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, Literal

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from disaggregated_inference.api import StartLine
from disaggregated_inference.http.body_writer import has_chunks, offered_body_writer
from disaggregated_inference.http.chunked_head import ChunkedHeads
from disaggregated_inference.http.limits import Connections, HttpLimits, UnfinishedBodies, within_file_limit
from disaggregated_inference.http.protocol import DescribeHeadError, HeadDeadlineProtocol, RequirePeer
from disaggregated_inference.http.responses import error_body
from disaggregated_inference.http.tls import Certificate
from disaggregated_inference.http.tls_handshake import TlsHandshake
from disaggregated_inference.struct_types import build_struct_types
from disaggregated_inference.timeouts import HttpTimeouts

log = logging.getLogger(__name__)

_ACCEPTED_AT_ONCE = 16  # asyncio takes this many connections before it tells of the first: each is a file descriptor
_WAITING = 2048  # connections that the system keeps until they are accepted


class _Mounted:
    """uvicorn's connections keep the app that they began with: this one passes every request to the present one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = getattr(send, "__self__", None)
        if not (isinstance(cycle, RequestResponseCycle) and has_chunks(scope)):
            return await self.app(scope, receive, send)
        with offered_body_writer(scope, cycle):
            await self.app(scope, receive, ChunkedHeads(cycle).send)


class HttpServer(uvicorn.Server):
    """Serves until a signal, or until `app.state.stop()`. Then `on_stop` is called, and requests get `drain_s` seconds
    to finish. `on_drain_end` may end the rest with proper errors; the server cancels what is left after that."""

    def __init__(
        self,
        app: Starlette,
        host: str,
        port: int,
        drain_s: int,
        *,
        on_ready: Callable[[int], None],
        on_stop: Callable[[], object],
        on_drain_end: Callable[[], Awaitable[None]] | None = None,
        describe: DescribeHeadError = error_body,
        certificate: Certificate | None = None,
        peers: ssl.SSLContext | None = None,
        require_peer: RequirePeer | None = None,
        lifespan: Literal["auto", "off"] = "off",
        timeouts: HttpTimeouts = HttpTimeouts(),
        limits: HttpLimits = HttpLimits(),
    ) -> None:
        """`peers`: mutual TLS instead of a public certificate; `require_peer` then sees each client's certificate."""
        limits = within_file_limit(limits)
        self._connections = Connections(limits)
        last_words_s = timeouts.last_words_s if on_drain_end else 0
        self._mounted = _Mounted(app)
        config = uvicorn.Config(
            self._mounted,
            host=host,
            port=port,
            http=partial(  # type: ignore[arg-type]
                HeadDeadlineProtocol,
                read_s=timeouts.read_s,
                error_body=describe,
                connections=self._connections,
                require_peer=require_peer,
            ),
            ws="none",
            lifespan=lifespan,
            log_config=None,
            log_level="warning",
            access_log=False,
            backlog=_ACCEPTED_AT_ONCE,
            timeout_keep_alive=round(timeouts.idle_s),
            timeout_graceful_shutdown=drain_s + round(last_words_s),
            ssl_certfile=certificate.cert or None if certificate else None,
            ssl_keyfile=certificate.key or None if certificate else None,
        )
        if peers:
            config.load()
            config.ssl = peers
        build_struct_types()
        super().__init__(config)
        self._timeouts, self._unfinished_bodies = timeouts, UnfinishedBodies(limits)
        self.mount(app)
        self._drain_s, self._signalled = drain_s, False
        self._on_ready, self._on_stop, self._on_drain_end = on_ready, on_stop, on_drain_end
        self._loop: asyncio.AbstractEventLoop | None = None

    def mount(self, app: Starlette) -> None:
        """Serve this app from now on, also on open connections."""
        app.state.stop, app.state.http_timeouts = self.stop, self._timeouts
        app.state.unfinished_bodies = self._unfinished_bodies
        self._mounted.app = app

    def stop(self) -> None:
        """Drain, then stop, as the first signal does."""
        self.should_exit = True

    def call_soon(self, function: Callable[[], None]) -> None:
        """On the event loop, from another thread. After the end of the server nothing happens."""
        assert self._loop
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # after the drain, when uvicorn restores it: no sudden end
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; the second one closes all connections. None is raised again: the exit code is 0."""
        if self._signalled and self._loop:
            self.force_exit = True
            self._loop.call_soon_threadsafe(self._close_connections)
        self._signalled = self.should_exit = True

    def _close_connections(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport:
                connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.ssl:
            loop = asyncio.get_running_loop()
            loop.create_server = partial(self._create_tls_server, loop.create_server)  # type: ignore[method-assign]
        await super().startup(sockets)
        for server in self.servers if self.started else ():
            for listener in server.sockets:
                with listener.dup() as same:
                    same.listen(_WAITING)
        if self.started:
            self._on_ready(self.servers[0].sockets[0].getsockname()[1])

    async def _create_tls_server(
        self,
        create_server: Callable[..., Awaitable[asyncio.Server]],
        serve: Callable[[], asyncio.Protocol],
        *,
        ssl: ssl.SSLContext,
        **options: Any,
    ) -> asyncio.Server:
        """asyncio's own would count connections after their handshake, and give that a minute."""

        def begin() -> TlsHandshake:
            return TlsHandshake(serve, ssl, self._connections, self._timeouts.handshake_s)

        return await create_server(begin, **options)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        draining = asyncio.create_task(self._end_late_requests())
        try:
            await super().shutdown(sockets)
        finally:
            draining.cancel()

    async def _end_late_requests(self) -> None:
        await asyncio.sleep(self._drain_s)
        log.warning("the server ends requests that were not done within %d s", self._drain_s)
        if self._on_drain_end:
            await self._on_drain_end()


Announce = Callable[[StartLine], None]  # where a starting server is


def announce_as_json(line: StartLine) -> None:
    """One line on standard output for every step; a program can wait for `ready`. It may have left: the server goes
    on. How much of a step is done is for people."""
    if line.part is not None:
        return
    try:
        sys.stdout.write(json.dumps(msgspec.to_builtins(line)) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails at its end
