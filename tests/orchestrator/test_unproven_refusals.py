"""A refusal ends a request. So it counts only if its checksum proves that the node meant it, and this request."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from disaggregated_inference.api import CHECKSUM_HEADER, PrefillRequest, checksum_text
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.orchestrator.heartbeat import Heartbeats
from disaggregated_inference.orchestrator.leg_errors import LegFailed, NodeRefused
from disaggregated_inference.orchestrator.node_client import NodeClient
from disaggregated_inference.timeouts import OrchestratorTimeouts
from tests.support.cluster import Process, config_of
from tests.support.http_stub import served
from tests.support.tcp_proxy import FaultyProxy

_REFUSAL = b'{"error":{"code":"bad_request","message":"max_tokens: too many"}}'
_DAMAGED = b'{"error":{"cofe":"request_damaged","message":"the request body was damaged"}}'  # the code is lost


@pytest.mark.parametrize(
    ("body", "checksum", "kind"),
    [
        (_REFUSAL, checksum_text(_REFUSAL), NodeRefused),
        (_REFUSAL, "", LegFailed),
        (_REFUSAL, "12345678", LegFailed),
        (_DAMAGED, checksum_text(_DAMAGED.replace(b"cofe", b"code")), LegFailed),
    ],
)
def test_a_refusal_needs_its_checksum(body: bytes, checksum: str, kind: type[Exception]) -> None:
    async def answer(request: web.Request) -> web.Response:
        headers = {CHECKSUM_HEADER: checksum} if checksum else {}
        return web.Response(body=body, status=400, headers=headers, content_type="application/json")

    async def run() -> None:
        async with served("/prefill", answer, "POST") as server, aiohttp.ClientSession() as session:
            client = NodeClient(server, session, Heartbeats(OrchestratorTimeouts()), stuck_s=30.0)
            with pytest.raises(kind):
                await client.prefill(PrefillRequest(tokens=[1], ticket="t"), "r")

    asyncio.run(run())


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_context_needs_its_checksum(is_damaged: bool) -> None:
    """With another prompt's hash in it the decode node would refuse the request, and be right."""
    sent = b'{"context":"a1b2","ticket":"t","prompt_tokens":1}'
    arrives = sent.replace(b"b2", b"b3") if is_damaged else sent

    async def answer(request: web.Request) -> web.Response:
        headers = {CHECKSUM_HEADER: checksum_text(sent)}
        return web.Response(body=arrives, headers=headers, content_type="application/json")

    async def run() -> str:
        async with served("/prefill", answer, "POST") as server, aiohttp.ClientSession() as session:
            client = NodeClient(server, session, Heartbeats(OrchestratorTimeouts()), stuck_s=30.0)
            return await client.prefill(PrefillRequest(tokens=[1], ticket="t"), "r")

    if is_damaged:
        with pytest.raises(LegFailed, match="checksum"):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == "a1b2"


class _HeadProxy(FaultyProxy):
    """Makes the first request line of a POST unreadable: the node answers that this is no HTTP request."""

    def to_target(self, data: bytes) -> bytes:
        if self.struck.is_set() or not data.startswith(b"POST "):
            return data
        self.struck.set()
        return data.replace(b" HTTP/1.1\r\n", b" HUTP/1.1\r\n", 1)


@pytest.mark.slow
def test_a_damaged_head_fails_over_and_a_wrong_request_is_refused() -> None:
    nodes = [Process(name, "decode", "simulated", "simulated:tiny", "--profile", "instant") for name in ("d1", "d2")]
    try:
        for node in nodes:
            node.ready()
        config = config_of(*nodes, local="always", poll_s=0.2)
        lines = [_HeadProxy(("127.0.0.1", node.port)) for node in nodes]
        for entry, line in zip(config["decode_servers"], lines, strict=True):
            entry["port"] = line.address[1]
        with DisaggregatedClient(config) as client:
            _, metrics = client.generate(model="simulated:tiny", prompt="hello", max_tokens=5, temperature=0)
            assert any(line.struck.is_set() for line in lines)
            assert metrics["completion_tokens"] == 5
            assert {failover["code"] for failover in metrics["failovers"]} == {"bad_answer"}
            with pytest.raises(BadRequest, match="9999"):
                client.generate(model="simulated:tiny", tokens=[9999], max_tokens=5)  # a node finds this out
        for line in lines:
            line.close()
    finally:
        for node in nodes:
            node.end()
