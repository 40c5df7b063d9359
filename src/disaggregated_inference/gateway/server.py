"""`disagg gateway`: from a command line to a running server."""

import asyncio
import gc
import logging
import signal
from contextlib import suppress

import msgspec

from disaggregated_inference.api import StartLine
from disaggregated_inference.cluster import load_config
from disaggregated_inference.gateway import dashboard
from disaggregated_inference.gateway.app import gateway_app
from disaggregated_inference.gateway.auth import Keys, require_keys
from disaggregated_inference.gateway.memory_release import keep_releasing
from disaggregated_inference.gateway.openai.errors import error_body
from disaggregated_inference.gateway.reload import Reloader
from disaggregated_inference.gateway.tracing import Collector
from disaggregated_inference.http import Announce, Certificate, HttpServer, announce_as_json, require_free_port
from disaggregated_inference.logs import log_to_stderr
from disaggregated_inference.models import default_home
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.private_files import warn_of_open
from disaggregated_inference.timeouts import HttpTimeouts

log = logging.getLogger(__name__)

_YOUNG_OBJECTS = 10_000  # before a garbage collection: a few hundred streams hold that many live objects at a time


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    config: str | None = None
    token_file: str = ""
    host: str = "127.0.0.1"
    port: int = 8080
    keys: str = ""
    insecure: bool = False
    tls_cert: str = ""
    tls_key: str = ""
    cors: tuple[str, ...] = ()
    keepalive_s: float = HttpTimeouts().keepalive_s
    read_s: float = HttpTimeouts().read_s
    drain_s: int = 60
    otlp: str = ""
    log_level: str = "warning"

    def url(self, port: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls_cert else 'http'}://{host}:{port}"

    def ready_line(self, port: int) -> StartLine:
        return StartLine(event="ready", port=port, url=self.url(port), dashboard=self.url(port) + dashboard.PATH)


def run_gateway(settings: GatewaySettings, announce: Announce = announce_as_json) -> None:
    """Until a signal. SIGHUP reloads config, keys and certificate; running requests are not disturbed."""
    log_to_stderr(settings.log_level)
    warn_of_open(default_home())
    keys, certificate = Keys.load(settings.keys or None), Certificate(settings.tls_cert, settings.tls_key)
    require_keys(settings.host, keys, settings.insecure)
    certificate.require()
    require_free_port(settings.host, settings.port)
    gc.freeze()  # what exists now lives as long as the process: no need to check it again and again
    gc.set_threshold(_YOUNG_OBJECTS)
    asyncio.run(_serve(settings, keys, certificate, Collector(settings.otlp), announce))


async def _serve(
    settings: GatewaySettings, keys: Keys, certificate: Certificate, collector: Collector, announce: Announce
) -> None:
    core = DisaggregatedInference(load_config(settings.config, token_file=settings.token_file))
    for warning in core.config.warnings:
        log.warning("%s", warning)
    app = gateway_app(core, keys, tuple(origin.rstrip("/") for origin in settings.cors))  # browsers send no slash
    traces = collector.traces(app)

    def on_stop() -> None:
        announce(StartLine(event="stopping"))
        app.state.draining = True
        app.state.feed.close()

    server = HttpServer(
        app,
        settings.host,
        settings.port,
        settings.drain_s,
        on_ready=lambda port: announce(settings.ready_line(port)),
        on_stop=on_stop,
        on_drain_end=lambda: reloader.close(),
        describe=error_body,
        certificate=certificate,
        timeouts=HttpTimeouts(read_s=settings.read_s, keepalive_s=settings.keepalive_s),
    )
    reloader = Reloader(app, settings.config, settings.token_file, keys, settings.keys, certificate, server)
    with suppress(NotImplementedError, AttributeError):  # where there is no SIGHUP
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.start)
    releasing = asyncio.create_task(keep_releasing())
    try:
        await core.start()
        await server.serve()
    finally:
        releasing.cancel()
        await reloader.close()
        if traces:  # also those of the last requests
            await traces.close()
