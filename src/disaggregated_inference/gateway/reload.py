"""SIGHUP: the gateway reloads config, keys and certificate without disturbing running requests."""

import asyncio
import logging

from starlette.applications import Starlette

from disaggregated_inference.cluster import load_config
from disaggregated_inference.gateway.auth import Keys
from disaggregated_inference.gateway.key_file import read_keys
from disaggregated_inference.http import Certificate, HttpServer
from disaggregated_inference.orchestrator import DisaggregatedInference, in_thread
from disaggregated_inference.timeouts import GatewayTimeouts

log = logging.getLogger(__name__)


class Reloader:
    """A new config gets a new orchestrator, which takes all new requests; the old one ends with its last request. The
    same config changes nothing. An error in any of the files leaves everything as it is."""

    def __init__(
        self,
        app: Starlette,
        config: str | None,
        token_file: str,
        keys: Keys,
        key_file: str,
        certificate: Certificate,
        server: HttpServer,
        timeouts: GatewayTimeouts = GatewayTimeouts(),
    ) -> None:
        self._app, self._config, self._token_file = app, config, token_file
        self._keys, self._key_file = keys, key_file
        self._certificate, self._server, self._timeouts = certificate, server, timeouts
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    def start(self) -> None:
        task = asyncio.create_task(self._reload())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._app.state.core.aclose()

    async def _reload(self) -> None:
        async with self._lock:
            old, new = self._app.state.core, self._load()
            if new is None:
                return
            if new is not old:
                await self._replace(old, new)
        log.warning("the config was reloaded: %s", ", ".join(new.config.names))
        if new is not old:
            await self._retire(old)

    def _load(self) -> DisaggregatedInference | None:
        """All files or none. Returns the running orchestrator where the config has not changed."""
        try:
            read_keys(self._key_file or None)
            self._certificate.require()
            config, old = load_config(self._config, token_file=self._token_file), self._app.state.core
            new = old if config == old.config else DisaggregatedInference(config)
            self._app.state.metrics.count_ended()  # with the names of the keys and nodes that served them
            self._keys.reload(self._key_file or None)
            if self._server.config.ssl:
                self._certificate.load_into(self._server.config.ssl)
        except Exception as error:
            log.error("the config was not reloaded, the old one stays: %s", error)
            return None
        for warning in new.config.warnings:
            log.warning("%s", warning)
        return new

    async def _replace(self, old: DisaggregatedInference, new: DisaggregatedInference) -> None:
        """The new orchestrator first gets the status of its nodes, so that a load balancer finds the gateway ready at
        every moment."""
        try:
            registry = await new.start()
            await asyncio.gather(*(registry.wait_for_status(model) for model in new.config.names))
        except BaseException:
            await new.aclose()
            raise
        self._app.state.metrics.count_ended()
        unneeded, self._app.state.core = new.replace(old), new
        await in_thread(unneeded.close)

    async def _retire(self, old: DisaggregatedInference) -> None:
        """A request picks its orchestrator before its body is read, so the old one waits for those requests, too."""
        try:
            if running := set(self._server.server_state.tasks):
                await asyncio.wait(running, timeout=self._timeouts.reload_body_s)
            await old.idle()
        finally:
            await old.aclose()
