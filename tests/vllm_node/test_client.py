"""The HTTP client to vLLM: over a port or a Unix socket, with kept connections, and errors that say what to do."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from disaggregated_inference.errors import DisaggError, EngineFailed, EngineUnavailable, ModelNotFound
from disaggregated_inference.vllm_node.client import UNIX, VllmAddress, VllmClient

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Counts the connections that requests came over."""

    def __init__(self, keepalive_s: float = 75.0) -> None:
        self.connections: set[object] = set()
        self.keys: list[str] = []
        app = web.Application()
        app.router.add_get("/health", self._answer)
        app.router.add_get("/version", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        self._runner = web.AppRunner(app, keepalive_timeout=keepalive_s)
        self.status, self.body = 200, '{"version": "0.32.0"}'

    async def _answer(self, request: web.Request) -> web.Response:
        self.connections.add(request.transport)
        self.keys.append(request.headers.get("Authorization", ""))
        return web.Response(status=self.status, text=self.body)

    @asynccontextmanager
    async def at(self, path: Path | None = None) -> AsyncIterator[str]:
        await self._runner.setup()
        site = web.UnixSite(self._runner, str(path)) if path else web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"{UNIX}{path}" if path else f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        finally:
            await self._runner.cleanup()


@pytest.mark.parametrize("unix", [True, False])
def test_a_port_and_a_socket_are_the_same_to_it(unix: bool, tmp_path: Path) -> None:
    async def run() -> None:
        server = Server()
        async with server.at(tmp_path / "s" if unix else None) as url:
            client = VllmClient(lambda: VllmAddress(url, "a-key"))
            assert await client.version() == "0.32.0"
            assert await client.is_healthy()
            assert (await client.compute({})).kv_transfer_params is None
            server.status = 503
            assert not await client.is_healthy()
        assert set(server.keys) == {"Bearer a-key"}
        assert not await client.is_healthy()
        with pytest.raises(EngineUnavailable, match="vLLM does not answer at "):
            await client.compute({})
        with pytest.raises(EngineUnavailable, match="vLLM does not answer at "):
            await client.version()

    asyncio.run(run())


def test_connections_are_kept_for_one_address_and_dropped_for_the_next(tmp_path: Path) -> None:
    """A vLLM that was started again listens elsewhere."""

    async def run() -> None:
        first, second, at = Server(), Server(), [""]
        client = VllmClient(lambda: VllmAddress(at[0]), keep=True)
        async with first.at(tmp_path / "1") as at[0]:
            for _ in range(5):
                await client.compute({})
        async with second.at(tmp_path / "2") as at[0]:
            await asyncio.gather(*(client.compute({}) for _ in range(5)))
            await client.close()
        assert len(first.connections) == 1
        assert second.connections

    asyncio.run(run())


def test_no_request_goes_into_a_connection_that_vllm_is_about_to_close(tmp_path: Path) -> None:
    """vLLM closes idle connections after 5 s by default; here both times are shorter."""
    from disaggregated_inference.timeouts import VllmTimeouts

    assert VllmTimeouts().idle_connection_s <= 2.5

    async def run() -> None:
        server = Server()
        async with server.at(tmp_path / "s") as url:
            client = VllmClient(lambda: VllmAddress(url), VllmTimeouts(idle_connection_s=0.01), keep=True)
            await client.compute({})
            await asyncio.sleep(0.1)
            await client.compute({})
            await client.close()
        assert len(server.connections) == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (404, '{"error": {"message": "The model `x` does not exist."}}', ModelNotFound, "The model `x` does not exist"),
        (401, '{"error": "Unauthorized"}', EngineUnavailable, "set VLLM_API_KEY to the key of that vLLM"),
        (500, "<html>", EngineFailed, "<html>"),
        (200, "<html>", EngineUnavailable, "cannot be decoded"),
    ],
)
def test_what_vllm_refuses_is_a_typed_error(
    status: int, body: str, error: type[DisaggError], words: str, tmp_path: Path
) -> None:
    async def run() -> None:
        server = Server()
        server.status, server.body = status, body
        async with server.at(tmp_path / "s") as url:
            with pytest.raises(error, match=words):
                await VllmClient(lambda: VllmAddress(url)).compute({})

    asyncio.run(run())
