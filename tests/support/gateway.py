"""A gateway on a thread or as a process, small clusters behind it, and scripted deltas."""

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from disaggregated_inference.api import RequestRecord
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.gateway.auth import Caller
from disaggregated_inference.gateway.chat import ChatDelta, ChatRequest
from disaggregated_inference.gateway.tool_parsers.base import ContentDelta
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.timeouts import HttpTimeouts
from tests.support.cluster import Process, config_of, ready_line
from tests.support.command import read_output
from tests.support.waiting import until

_FLOAT32 = ("--dtype", "float32", "--kv-memory", "256M")
_START_S = 30.0
_RECORD = RequestRecord(prompt_tokens=9, completion_tokens=5, total_tokens=14, cached_tokens=4)


@contextmanager
def served(
    config: dict[str, Any], *adapters: ModuleType, cors: tuple[str, ...] = (), early_error_s: float = 0.0
) -> Iterator[str]:
    """The base URL of a gateway without API keys: with all adapters, or with those that are named. `early_error_s`: how
    long streams wait for an error that has a status of its own, where nodes on a busy machine may take long."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        gateway = _Gateway(config, adapters, cors, sock, early_error_s)
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
    def __init__(
        self,
        config: dict[str, Any],
        adapters: tuple[ModuleType, ...],
        cors: tuple[str, ...],
        sock: socket.socket,
        early_error_s: float,
    ) -> None:
        super().__init__(daemon=True)
        self._early_error_s = early_error_s
        self._config, self._adapters, self._cors, self._sock = config, adapters, cors, sock
        self._server: uvicorn.Server | None = None
        self.failed: BaseException | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.failed = error

    async def _serve(self) -> None:
        async with DisaggregatedInference(self._config) as core:
            app = _app(core, self._adapters, self._cors, self._early_error_s)
            settings = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1)
            self._server = uvicorn.Server(settings)
            await self._server.serve(sockets=[self._sock])

    @property
    def serving(self) -> bool:
        return self._server is not None and self._server.started

    def stop(self) -> None:
        if self._server:
            self._server.should_exit = True


class GatewayProcess:
    """`disagg gateway` on a free port. Its config is a file that a test may rewrite."""

    def __init__(self, folder: Path, config: dict[str, Any], *arguments: str) -> None:
        self.config = folder / "cluster.json"
        self.config.write_text(json.dumps(config))
        command = [sys.executable, "-m", "disaggregated_inference", "gateway", "--config", str(self.config)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in end
        self.process = subprocess.Popen([*command, "--port", "0", *arguments], stdout=subprocess.PIPE, stderr=self._log)
        self.url = ""

    def ready(self) -> "GatewayProcess":
        assert self.process.stdout
        ready = ready_line(self.process.stdout)
        assert ready, self.log_text()
        self.url = ready["url"]
        return self

    def log_text(self) -> str:
        return read_output(self._log)

    def send_signal(self, signal: int) -> None:
        self.process.send_signal(signal)

    def ended(self) -> int:
        """Its exit code."""
        return self.process.wait(_START_S)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()
        if self.process.stdout:
            self.process.stdout.close()


@contextmanager
def gateway_process(folder: Path, config: dict[str, Any], *arguments: str) -> Iterator[GatewayProcess]:
    gateway = GatewayProcess(folder, config, *arguments)
    try:
        yield gateway.ready()
    finally:
        gateway.end()


@contextmanager
def smollm2_pair() -> Iterator[tuple[Process, Process]]:
    """The embedded model: prefill on torch, decode on MLX. In float32 every engine gives the same tokens."""
    with _pair(("torch", "mlx"), "smollm2", *_FLOAT32) as pair:
        yield pair


@contextmanager
def simulated_pair(profile: str = "instant") -> Iterator[tuple[Process, Process]]:
    """No inference, with the timing of the profile. A completion is a row of numbers."""
    with _pair(("simulated", "simulated"), "simulated:tiny", "--profile", profile, "--kv-memory", "256M") as pair:
        yield pair


def simulated_config(*nodes: Process, **policies: Any) -> dict[str, Any]:
    """A config with an alias for the model."""
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


def _app(
    core: DisaggregatedInference, adapters: tuple[ModuleType, ...], cors: tuple[str, ...], early_error_s: float
) -> Any:
    if adapters:
        return app_of(core, *adapters, early_error_s=early_error_s)
    from disaggregated_inference.gateway.app import gateway_app
    from disaggregated_inference.gateway.auth import Keys

    return gateway_app(core, Keys(), cors)


def app_of(core: DisaggregatedInference, *adapters: ModuleType, early_error_s: float = 0.0) -> Any:
    """Some adapters without API keys. Errors have the shape of the first adapter."""
    app = Starlette(routes=[route for adapter in adapters for route in adapter.routes()])
    timeouts = HttpTimeouts(keepalive_s=0.2)
    app.state.core, app.state.http_timeouts = (
        core,
        msgspec.structs.replace(timeouts, early_error_s=early_error_s or timeouts.early_error_s),
    )

    def refused(request: Request, error: Exception) -> Response:
        from disaggregated_inference.http import json_response

        return json_response(adapters[0].error_body(error), getattr(error, "status", 500))

    app.add_exception_handler(DisaggError, refused)
    return _with_caller(app)


def _with_caller(app: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def with_caller(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["state"] = dict(scope.get("state", {})) | {"caller": Caller()}
        await app(scope, receive, send)

    return with_caller


class Script:
    """Replaces `stream_chat` in an API: it records the requests and returns the deltas of a test."""

    def __init__(self) -> None:
        self.requests: list[ChatRequest] = []
        self.deltas: list[ChatDelta] = []
        self.error: Exception | None = None
        self.wait_s = 0.0

    def replies(self, *content: ContentDelta, finish: Any = "stop") -> None:
        self.deltas = [ChatDelta(content=(piece,), token=7) for piece in content] + [
            ChatDelta(finish_reason=finish),
            ChatDelta(record=_RECORD),
        ]

    async def stream_chat(self, core: Any, chat: ChatRequest, on_plan: Any = None) -> AsyncIterator[list[ChatDelta]]:
        self.requests.append(chat)
        await asyncio.sleep(self.wait_s)
        for delta in self.deltas:
            yield [delta]
        if self.error:
            raise self.error
