"""A failed request, and a failed connection to a node, are freed at once: a frame that its own error holds would keep
all that the request had, and the buffers of its TLS connection, until a garbage collection."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from disaggregated_inference.api import CHECKSUM_HEADER, DecodeRequest
from disaggregated_inference.cluster import Server
from disaggregated_inference.errors import NoDecodeNode
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.orchestrator.connections import NodeConnector
from disaggregated_inference.orchestrator.heartbeat import Heartbeats, PendingRequest
from disaggregated_inference.orchestrator.leg_errors import LegFailed
from disaggregated_inference.orchestrator.node_client import NodeClient
from disaggregated_inference.orchestrator.stream_check import TextStreamCheck
from disaggregated_inference.timeouts import OrchestratorTimeouts
from tests.support.cluster import free_port
from tests.support.garbage import garbage
from tests.support.http_stub import served


def test_a_request_that_fails() -> None:
    node = {"name": "d1", "host": "127.0.0.1", "port": free_port(), "model": "m"}

    async def run() -> list[str]:
        async with DisaggregatedInference({"prefill_servers": [], "decode_servers": [node]}) as core:
            with garbage() as found:
                for _ in range(3):
                    with pytest.raises(NoDecodeNode):
                        await core.generate("hello")
            return found

    assert asyncio.run(run()) == []


def test_a_node_that_cannot_be_reached() -> None:
    server = Server(name="d1", role="decode", host="127.0.0.1", port=free_port(), model="m")

    async def run() -> list[str]:
        async with aiohttp.ClientSession(connector=NodeConnector()) as session:
            client = NodeClient(server, session, Heartbeats(), stuck_s=30.0)
            with garbage() as found:
                with pytest.raises(LegFailed, match="cannot be reached"):
                    await client.get("/status", 5.0)
                client.cancel_prefill("t")
                await client.flush()
            return found

    assert asyncio.run(run()) == []


def test_a_stream_that_breaks_off() -> None:
    async def breaks_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={CHECKSUM_HEADER: "crc32"})
        await response.prepare(request)
        await response.write(b": alive\n\n")
        assert request.transport
        request.transport.abort()
        return response

    async def run() -> list[str]:
        async with (
            served("/decode", breaks_off, "POST") as server,
            aiohttp.ClientSession(connector=NodeConnector()) as session,
        ):
            client = NodeClient(server, session, Heartbeats(), stuck_s=30.0)
            with garbage() as found, pytest.raises(LegFailed, match="broke off"):
                async for _ in client.generate("/decode", DecodeRequest(), "r", TextStreamCheck()):
                    pass
            return found

    assert asyncio.run(run()) == []


def test_a_request_whose_node_fails_a_probe() -> None:
    async def run() -> list[str]:
        heartbeats = Heartbeats(OrchestratorTimeouts(watch_s=0.0))

        async def fails() -> None:
            raise LegFailed("d1", "unreachable", "it does not answer")

        async def wait() -> None:
            with PendingRequest(heartbeats, fails):
                await asyncio.Event().wait()

        with garbage() as found:
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0)
            heartbeats.check(asyncio.get_running_loop().time() + 1.0, late=False)
            with pytest.raises(LegFailed, match="does not answer"):
                await waiting
            del waiting
        return found

    assert asyncio.run(run()) == []
