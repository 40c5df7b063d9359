"""`disagg gateway`: from a command line to a running server."""

import asyncio
import json
import logging
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette

from disaggregated_inference.cluster.config import load_config
from disaggregated_inference.errors import BadRequest, DisaggError
from disaggregated_inference.gateway.app import gateway_app
from disaggregated_inference.gateway.auth import Keys, require_keys
from disaggregated_inference.orchestrator import DisaggregatedInference

log = logging.getLogger(__name__)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    config: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    keys: str = ""
    insecure: bool = False
    tls_cert: str = ""
    tls_key: str = ""
    cors: tuple[str, ...] = ()
    drain_s: int = 60


def run_gateway(asked: Settings) -> None:
    """Until a signal. SIGHUP reads config and keys again; what is under way ends as it began."""
    keys = Keys.load(asked.keys or None)
    require_keys(asked.host, keys, asked.insecure)
    for option, path in (("--tls-cert", asked.tls_cert), ("--tls-key", asked.tls_key)):
        if path and not Path(path).is_file():
            raise BadRequest(f"{option} {path}: no such file")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn drains on it, then raises it again for whoever was before
    asyncio.run(_serve(asked, keys))


async def _serve(asked: Settings, keys: Keys) -> None:
    core = DisaggregatedInference(load_config(asked.config))
    for warning in core.config.warnings:
        log.warning("%s", warning)
    app = gateway_app(core, keys, asked.cors)
    config = uvicorn.Config(
        app,
        host=asked.host,
        port=asked.port,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=asked.drain_s,
        ssl_certfile=asked.tls_cert or None,
        ssl_keyfile=asked.tls_key or None,
    )
    server = _Server(config, asked)
    reloading = Reloading(app, asked, keys)
    with suppress(NotImplementedError, AttributeError):  # where there is no SIGHUP
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloading.begin)
    try:
        await core.start()
        await server.serve()
    finally:
        await reloading.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, asked: Settings) -> None:
        super().__init__(config)
        self._asked = asked

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        app: Any = self.config.app
        app.state.draining = True
        app.state.feed.close()
        await super().shutdown(sockets)

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            scheme = "https" if self._asked.tls_cert else "http"
            about = {"event": "ready", "port": port, "url": f"{scheme}://{self._asked.host}:{port}"}
            sys.stdout.write(json.dumps(about) + "\n")
            sys.stdout.flush()


class Reloading:
    """A new config is a new orchestrator for new requests; the old one ends when its last request has."""

    def __init__(self, app: Starlette, asked: Settings, keys: Keys) -> None:
        self._app, self._asked, self._keys = app, asked, keys
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        task = asyncio.create_task(self._reload())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload(self) -> None:
        try:
            fresh = DisaggregatedInference(load_config(self._asked.config))
            self._keys.reload(self._asked.keys or None)
        except (DisaggError, OSError) as error:
            log.error("the config was not read again, the old one stays: %s", error)
            return
        old, self._app.state.core = self._app.state.core, fresh
        fresh.on_end += old.on_end
        await fresh.start()
        log.warning("the config was read again: %s", ", ".join(fresh.config.names))
        await old.idle()
        await old.aclose()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._app.state.core.aclose()
