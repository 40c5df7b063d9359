"""SIGHUP: config, keys and certificate are read again, and nobody who is being served notices."""

import asyncio
import logging

import uvicorn
from starlette.applications import Starlette

from disaggregated_inference.cluster.config import load_config
from disaggregated_inference.gateway.auth import Keys
from disaggregated_inference.gateway.key_file import read_keys
from disaggregated_inference.http.tls import Certificate
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.orchestrator.threads import in_thread

log = logging.getLogger(__name__)

_NEWS_S = 3.0  # for the nodes of a new config to say that they are there
_BEGIN_S = 60.0  # for a request whose body is still on its way


class Reloader:
    """A new config is a new orchestrator for new requests; the old one ends when its last request has. One that says
    what it said before changes nothing, and what is wrong with any of the files leaves everything as it is."""

    def __init__(
        self,
        app: Starlette,
        config: str | None,
        keys: Keys,
        key_file: str,
        certificate: Certificate,
        server: uvicorn.Server,
    ) -> None:
        self._app, self._config, self._keys, self._key_file = app, config, keys, key_file
        self._certificate, self._server = certificate, server
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()

    def begin(self) -> None:
        task = asyncio.create_task(self._reload())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._app.state.core.aclose()

    async def _reload(self) -> None:
        async with self._one_at_a_time:
            old, fresh = self._app.state.core, self._read()
            if fresh is None:
                return
            if fresh is not old:
                await self._replaced(old, fresh)
        log.warning("the config was read again: %s", ", ".join(fresh.config.names))
        if fresh is not old:
            await self._retired(old)

    async def _replaced(self, old: DisaggregatedInference, fresh: DisaggregatedInference) -> None:
        try:
            await _heard(fresh)
        except BaseException:
            await fresh.aclose()
            raise
        unneeded, self._app.state.core = fresh.inherit(old), fresh
        await in_thread(unneeded.close)

    def _read(self) -> DisaggregatedInference | None:
        """All of it or nothing; where the config is what it was, the orchestrator that is there."""
        try:
            read_keys(self._key_file or None)
            self._certificate.require()
            config, old = load_config(self._config), self._app.state.core
            fresh = old if config == old.config else DisaggregatedInference(config)
            self._keys.reload(self._key_file or None)
            if self._server.config.ssl:
                self._certificate.load_into(self._server.config.ssl)
        except Exception as error:
            log.error("the config was not read again, the old one stays: %s", error)
            return None
        for warning in fresh.config.warnings:
            log.warning("%s", warning)
        return fresh

    async def _retired(self, old: DisaggregatedInference) -> None:
        """Requests know their orchestrator before it knows them: while their bodies are read."""
        try:
            if begun := set(self._server.server_state.tasks):
                await asyncio.wait(begun, timeout=_BEGIN_S)
            await old.idle()
        finally:
            await old.aclose()


async def _heard(fresh: DisaggregatedInference) -> None:
    """Before anyone asks it: or the gateway would not be ready for a moment, and a load balancer would see it."""
    watch = await fresh.start()
    await asyncio.gather(*(watch.heard_of(model, _NEWS_S) for model in fresh.config.names))
