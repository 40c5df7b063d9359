"""A gateway on a thread of this process, and small clusters to put behind it."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from disaggregated_inference.errors import DisaggError
from disaggregated_inference.gateway.auth import Caller
from disaggregated_inference.orchestrator import DisaggregatedInference
from tests.cluster import Process, config_of
from tests.conftest import until

_FLOAT32 = ("--dtype", "float32", "--kv-memory", "256M")
_START_S = 30.0


@contextmanager
def served(config: dict[str, Any], *adapters: ModuleType) -> Iterator[str]:
    """The base URL of the whole gateway without keys; where adapters are named, of nothing but them."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        gateway = _Gateway(config, adapters, sock)
        gateway.start()
        try:
            assert until(lambda: gateway.serving or not gateway.is_alive(), _START_S)
            assert gateway.serving, gateway.failed
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            gateway.stop()
            gateway.join(_START_S)
        assert not gateway.failed, gateway.failed


class _Gateway(threading.Thread):
    def __init__(self, config: dict[str, Any], adapters: tuple[ModuleType, ...], sock: socket.socket) -> None:
        super().__init__(daemon=True)
        self._config, self._adapters, self._sock = config, adapters, sock
        self._server: uvicorn.Server | None = None
        self.failed: BaseException | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.failed = error

    async def _serve(self) -> None:
        async with DisaggregatedInference(self._config) as core:
            settings = uvicorn.Config(
                _app(core, self._adapters), log_level="warning", ws="none", timeout_graceful_shutdown=1
            )
            self._server = uvicorn.Server(settings)
            await self._server.serve(sockets=[self._sock])

    @property
    def serving(self) -> bool:
        return self._server is not None and self._server.started

    def stop(self) -> None:
        if self._server:
            self._server.should_exit = True


@contextmanager
def smollm2_pair() -> Iterator[tuple[Process, Process]]:
    """The embedded model: torch reads, MLX writes. What they say is real, and the same in float32 on every engine."""
    with _pair(("torch", "mlx"), "smollm2", *_FLOAT32) as pair:
        yield pair


@contextmanager
def simulated_pair(profile: str = "instant") -> Iterator[tuple[Process, Process]]:
    """No inference, but timing as the profile says; an answer is a row of numbers."""
    with _pair(("simulated", "simulated"), "simulated:tiny", "--profile", profile, "--kv-memory", "256M") as pair:
        yield pair


def simulated_config(*nodes: Process, **policies: Any) -> dict[str, Any]:
    """With an alias, as people have them."""
    return config_of(*nodes, **policies) | {"models": {"simulated:tiny": {"aliases": ["tiny-alias"]}}}


@contextmanager
def _pair(engines: tuple[str, str], model: str, *arguments: str) -> Iterator[tuple[Process, Process]]:
    reader = Process("p1", "prefill", engines[0], model, *arguments)
    writer = Process("d1", "decode", engines[1], model, *arguments)
    try:
        yield reader.ready(), writer.ready()
    finally:
        reader.end()
        writer.end()


def _app(core: DisaggregatedInference, adapters: tuple[ModuleType, ...]) -> Any:
    if adapters:
        return app_of(core, *adapters)
    from disaggregated_inference.gateway.app import gateway_app
    from disaggregated_inference.gateway.auth import Keys

    return gateway_app(core, Keys())


def app_of(core: DisaggregatedInference, *adapters: ModuleType) -> Any:
    """Some adapters without keys; errors in the first one's shape."""
    app = Starlette(routes=[route for adapter in adapters for route in adapter.routes()])
    app.state.core = core

    def refused(request: Request, error: Exception) -> Response:
        from disaggregated_inference.gateway.answers import json_response

        return json_response(adapters[0].error_body(error), getattr(error, "status", 500))

    app.add_exception_handler(DisaggError, refused)
    return _as_anyone(app)


def _as_anyone(app: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def with_caller(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["state"] = dict(scope.get("state", {})) | {"caller": Caller()}
        await app(scope, receive, send)

    return with_caller
