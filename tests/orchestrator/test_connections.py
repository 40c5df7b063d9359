"""A kept connection that its node closes as idle, just when the next request goes in: the request is sent again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest

from disaggregated_inference.api import CHECKSUM_HEADER, PrefillRequest, PrefillResponse, checksum_text
from disaggregated_inference.cluster import Server
from disaggregated_inference.http import HttpServer
from disaggregated_inference.orchestrator.connections import NodeConnector, post
from disaggregated_inference.orchestrator.heartbeat import Heartbeats
from disaggregated_inference.orchestrator.leg_errors import LegFailed
from disaggregated_inference.orchestrator.node_client import NodeClient
from disaggregated_inference.timeouts import HttpTimeouts, OrchestratorTimeouts
from tests.support.http_stub import echo_app

_BODY = msgspec.json.encode(PrefillResponse(context="c", ticket="t", prompt_tokens=3))
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n%b: %b\r\nContent-Length: %d\r\n\r\n%b" % (
    CHECKSUM_HEADER.encode(),
    checksum_text(_BODY).encode(),
    len(_BODY),
    _BODY,
)


class ClosingNode:
    """Answers the first request of every connection. The next one finds the connection closed after `wait_s`; the
    client sees the same if the node closed it while the request was on its way."""

    def __init__(self, answered: int = 1, wait_s: float = 0.0) -> None:
        self.answered, self.wait_s, self.requests, self.connections = answered, wait_s, 0, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        for number in range(self.answered + 1):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:  # the client has left
                break
            length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
            self.requests += 1
            if number == self.answered:
                await asyncio.sleep(self.wait_s)
                break
            writer.write(_ANSWER)
        writer.transport.abort()


@asynccontextmanager
async def client_of(node: ClosingNode, connector: aiohttp.TCPConnector) -> AsyncIterator[NodeClient]:
    listening = await asyncio.start_server(node.serve, "127.0.0.1", 0)
    server = Server(name="n", role="prefill", host="127.0.0.1", port=listening.sockets[0].getsockname()[1], model="m")
    async with listening, aiohttp.ClientSession(connector=connector) as session:
        timeouts = OrchestratorTimeouts(closed_connection_s=60.0 if node.wait_s == 0 else 0.01)
        yield NodeClient(server, session, Heartbeats(timeouts), stuck_s=30.0)


async def prefill(client: NodeClient) -> str:
    return await client.prefill(PrefillRequest(tokens=[1, 2, 3]), "r")


def test_a_request_into_a_closed_connection_is_sent_again() -> None:
    async def run() -> None:
        node = ClosingNode()
        async with client_of(node, aiohttp.TCPConnector()) as plain:
            await prefill(plain)
            with pytest.raises(LegFailed, match="cannot be reached"):  # the fault
                await prefill(plain)
        node = ClosingNode()
        async with client_of(node, NodeConnector()) as client:
            for _ in range(5):
                assert await prefill(client) == "c"
        assert (node.connections, node.requests) == (5, 9), "the first of them, and four that were sent twice"

    asyncio.run(run())


def test_all_kept_connections_may_be_closed() -> None:
    async def run() -> None:
        node = ClosingNode()
        async with client_of(node, NodeConnector(limit=0)) as client:
            assert await asyncio.gather(*(prefill(client) for _ in range(6))) == ["c"] * 6
            assert await prefill(client) == "c"

    asyncio.run(run())


def test_a_new_connection_that_breaks_is_a_failure_at_once() -> None:
    """A node that dies of a request does not get it again and again."""

    async def run() -> None:
        node = ClosingNode(answered=0)
        async with client_of(node, NodeConnector()) as client:
            with pytest.raises(LegFailed, match="cannot be reached"):
                await prefill(client)
        assert node.requests == 1

    asyncio.run(run())


def test_a_kept_connection_that_breaks_later_is_a_failure() -> None:
    """The node may have accepted the request."""

    async def run() -> None:
        node = ClosingNode(wait_s=0.2)
        async with client_of(node, NodeConnector()) as client:
            await prefill(client)
            with pytest.raises(LegFailed, match="cannot be reached"):
                await prefill(client)
        assert node.requests == 2

    asyncio.run(run())


def test_a_server_that_closes_its_connections_at_once() -> None:
    """Our own server, with no time for idle connections: every kept one is closing while the next request goes in."""

    async def run() -> None:
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        server = HttpServer(
            echo_app(),
            "127.0.0.1",
            0,
            drain_s=1,
            on_ready=ready.set_result,
            on_stop=lambda: None,
            timeouts=HttpTimeouts(idle_s=0.0),
        )
        serving = asyncio.create_task(server.serve())
        port = await ready
        async with aiohttp.ClientSession(connector=NodeConnector()) as session:
            for number in range(100):
                sent = str(number).encode()
                async with await post(session, f"http://127.0.0.1:{port}/", 60.0, data=sent) as response:
                    assert await response.read() == sent
        server.stop()
        await serving

    asyncio.run(run())
