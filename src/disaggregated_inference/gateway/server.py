"""`disagg gateway`: from a command line to a running server."""

import asyncio
import gc
import json
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import msgspec
import uvicorn

from disaggregated_inference.cluster.config import load_config
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.app import gateway_app
from disaggregated_inference.gateway.auth import Keys, require_keys
from disaggregated_inference.gateway.reload import Reloader
from disaggregated_inference.gateway.tracing import Collector, Traces
from disaggregated_inference.http.deadlines import READ_S, protocol_within
from disaggregated_inference.http.tls import Certificate
from disaggregated_inference.logs import log_to_stderr
from disaggregated_inference.orchestrator import DisaggregatedInference

log = logging.getLogger(__name__)

_YOUNG_OBJECTS = 10_000  # before garbage is looked for: a few hundred streams make as many at a time, all in use
_LAST_WORDS_S = 5  # after the drain, for answers to end in an error that says why


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    config: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    keys: str = ""
    insecure: bool = False
    tls_cert: str = ""
    tls_key: str = ""
    cors: tuple[str, ...] = ()
    keepalive_s: float = 5.0
    read_s: float = READ_S
    drain_s: int = 60
    otlp: str = ""
    log_level: str = "warning"


def run_gateway(asked: GatewaySettings) -> None:
    """Until a signal. SIGHUP reads config, keys and certificate again; what is under way ends as it began."""
    log_to_stderr(asked.log_level)
    keys, certificate = Keys.load(asked.keys or None), Certificate(asked.tls_cert, asked.tls_key)
    require_keys(asked.host, keys, asked.insecure)
    certificate.require()
    _require_free(asked.host, asked.port)
    gc.freeze()  # what is here now stays: it need not be looked at again and again
    gc.set_threshold(_YOUNG_OBJECTS)
    asyncio.run(_serve(asked, keys, certificate, Collector(asked.otlp)))


def _require_free(host: str, port: int) -> None:
    """In words, and before anything begins: uvicorn tells it to a log and leaves."""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as trying:
                trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    trying.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as asyncio does
                trying.bind(address)
    except OSError as error:
        raise BadRequest(f"cannot listen on {host}:{port}: {error.strerror or error}; give --host or --port") from error


async def _serve(asked: GatewaySettings, keys: Keys, certificate: Certificate, collector: Collector) -> None:
    core = DisaggregatedInference(load_config(asked.config))
    for warning in core.config.warnings:
        log.warning("%s", warning)
    origins = tuple(origin.rstrip("/") for origin in asked.cors)  # browsers send none
    app = gateway_app(core, keys, origins, asked.keepalive_s, asked.read_s)
    config = uvicorn.Config(
        app,
        host=asked.host,
        port=asked.port,
        http=protocol_within(asked.read_s),
        ws="none",
        lifespan="off",  # there is none; uvicorn would call its end an error where it is sudden
        log_config=None,
        log_level=asked.log_level,
        access_log=False,
        timeout_graceful_shutdown=asked.drain_s + _LAST_WORDS_S,
        ssl_certfile=certificate.cert or None,
        ssl_keyfile=certificate.key or None,
    )
    traces = Traces(app, collector) if collector.url else None
    server = _GatewayServer(config, asked)
    reloading = Reloader(app, asked.config, keys, asked.keys, certificate, server)
    with suppress(NotImplementedError, AttributeError):  # where there is no SIGHUP
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloading.begin)
    server.end_all = reloading.close
    try:
        await core.start()
        await server.serve()
    finally:
        await reloading.close()
        if traces:  # the last requests' too
            await traces.close()


class _GatewayServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, asked: GatewaySettings) -> None:
        super().__init__(config)
        self._asked, self._loop = asked, asyncio.get_running_loop()
        self.end_all: Callable[[], Awaitable[None]] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, and a drained gateway has done what it was told: nothing is raised again. The second
        one means now."""
        if self.should_exit:
            self.force_exit = True
            self._loop.call_soon_threadsafe(self._cut)
        self.should_exit = True

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport:
                connection.transport.abort()

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        app: Any = self.config.app
        app.state.draining = True
        app.state.feed.close()
        late = asyncio.create_task(self._end_late())
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    async def _end_late(self) -> None:
        """Whoever is not done by then is told so, in the shape of their API, before the connection ends."""
        await asyncio.sleep(self._asked.drain_s)
        log.warning("some requests were not done within %d s, and are ended", self._asked.drain_s)
        if self.end_all:
            await self.end_all()

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            sys.stdout.write(json.dumps({"event": "ready", "port": port, "url": self._url(port)}) + "\n")
            sys.stdout.flush()

    def _url(self, port: int) -> str:
        host = f"[{self._asked.host}]" if ":" in self._asked.host else self._asked.host
        return f"{'https' if self._asked.tls_cert else 'http'}://{host}:{port}"
