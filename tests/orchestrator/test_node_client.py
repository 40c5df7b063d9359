"""How long a node may take to say that it lives: as long as it took lately, and some more. And what it is told to be
when it says something else."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp import web

from disaggregated_inference.api import CHECKSUM_HEADER, DecodeRequest, ErrorDetail, checksum
from disaggregated_inference.cluster import Policies, Server, load_config
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.orchestrator.heartbeat import Heartbeats, PendingRequest, StreamSilent
from disaggregated_inference.orchestrator.leg_errors import LegFailed, NodeRefused
from disaggregated_inference.orchestrator.node_client import NodeClient
from disaggregated_inference.orchestrator.node_state import NodeState
from disaggregated_inference.orchestrator.registry import NodeRegistry
from disaggregated_inference.orchestrator.stream_check import TextStreamCheck
from disaggregated_inference.timeouts import OrchestratorTimeouts
from tests.support.http_stub import served
from tests.support.waiting import until_async


class Slow:
    """Answers `/health` after `seconds`."""

    seconds, requests = 0.0, 0

    async def answer(self, request: web.Request) -> web.Response:
        self.requests += 1
        await asyncio.sleep(self.seconds)
        return web.json_response({"status": "healthy", "epoch": "e"})


@asynccontextmanager
async def a_slow_node(
    timeouts: OrchestratorTimeouts = OrchestratorTimeouts(), heartbeats: Heartbeats | None = None
) -> AsyncIterator[tuple[Slow, NodeClient]]:
    node = Slow()
    async with served("/health", node.answer) as server, aiohttp.ClientSession() as session:
        legs = NodeClient(server, session, heartbeats or Heartbeats(timeouts), stuck_s=30.0)
        legs.replaceable = lambda: True
        yield node, legs


def test_a_slow_node_gets_more_time_for_its_probe() -> None:
    async def run() -> None:
        async with a_slow_node(OrchestratorTimeouts(probe_s=1.0)) as (node, legs):
            await legs.health()
            legs.latency_s = 0.0  # whatever this machine took
            node.seconds = 1.5
            with pytest.raises(LegFailed, match="does not answer"):
                await legs.health()
            node.seconds = 0.3  # it becomes slow by and by, as a machine does that more and more ask for work
            await legs.health()
            node.seconds = 1.5
            assert (await legs.health()).status == "healthy"

    asyncio.run(run())


def test_a_node_without_replacement_gets_more_time() -> None:
    async def run() -> None:
        async with a_slow_node() as (node, legs):
            await legs.health()
            node.seconds = 1.5
            legs.replaceable = lambda: False
            assert (await legs.health()).status == "healthy"

    asyncio.run(run())


@pytest.mark.parametrize("held_up", [True, False])
def test_a_probe_is_repeated_when_this_process_was_held_up(held_up: bool) -> None:
    """This process was held up while the node answered: that it heard nothing says nothing about the node."""

    async def run() -> None:
        heartbeats = Heartbeats(OrchestratorTimeouts(probe_s=1.5))
        async with a_slow_node(heartbeats=heartbeats) as (node, legs):
            await legs.health()
            node.seconds = 5.0
            asking = asyncio.create_task(legs.health())

            async def asked_twice() -> bool:
                return node.requests == 2

            assert await until_async(asked_twice)
            heartbeats.check(asyncio.get_running_loop().time(), late=held_up)
            node.seconds = 0.0
            if held_up:
                assert (await asking).status == "healthy"
            else:
                with pytest.raises(LegFailed, match="does not answer"):
                    await asking

    asyncio.run(run())


def test_which_nodes_can_replace_a_node() -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            decode = [{"name": name, "host": name, "model": "m"} for name in ("d1", "d2", "b")]
            config = {
                "prefill_servers": [{"name": name, "host": name, "model": "m"} for name in ("p1", "p2")],
                "decode_servers": [*decode[:2], decode[2] | {"role": "both"}],
            }
            nodes = NodeRegistry(load_config(config), session).nodes

            def replaceable(name: str, *usable: str) -> bool:
                for node in nodes.values():
                    node.reachable, node.trouble = node.name in usable, ""
                return nodes[name].client.replaceable()

            assert replaceable("d1", "d1", "d2")
            assert replaceable("d1", "d1", "b")
            assert not replaceable("d1", "d1", "p1", "p2"), "no other node writes"
            assert replaceable("p1", "p1", "p2")
            assert replaceable("p1", "p1", "d1"), "who writes can read"
            assert not replaceable("b", "b", "p1")
            assert not replaceable("p1", "p1")

    asyncio.run(run())


def test_the_time_of_a_probe_is_bounded() -> None:
    async def run() -> None:
        async with a_slow_node(OrchestratorTimeouts(max_probe_s=0.5)) as (node, legs):
            legs.latency_s = 60.0
            node.seconds = 30.0
            with pytest.raises(LegFailed, match="does not answer"):
                await asyncio.wait_for(legs.health(), 25.0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "body", "state", "why"),
    [
        (404, "<!DOCTYPE HTML>", "unreachable", "it does not answer as a node: HTTP 404"),
        (404, '{"detail": "Not Found"}', "unreachable", "it does not answer as a node: HTTP 404"),
        (403, "Forbidden", "unreachable", "it does not answer as a node: HTTP 403"),
        (401, '{"error": {"code": "unauthorized", "message": "no"}}', "wrong token", "it needs a token (401): set"),
        (401, "<html>", "wrong token", "it needs a token (401): set DISAGG_TOKEN"),
        (200, '{"status": "healthy", "role": "prefill"}', "wrong role", "it runs as a prefill node, and the config"),
        (200, '{"status": "healthy", "stalled_s": 99}', "stuck", "its engine has made no progress for 99 s"),
        (200, '{"status": "draining"}', "draining", "it is draining"),
        (200, '{"status": "healthy"}', "healthy", ""),
    ],
)
def test_node_state_for_each_kind_of_response(status: int, body: str, state: str, why: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        about = '{"context_window": 8}' if request.path == "/model" and status == 200 else body
        return web.Response(status=status, text=about)

    async def run() -> None:
        async with served("/{any}", answer) as server, aiohttp.ClientSession() as session:
            node = NodeState(server, "m", session, Heartbeats(), Policies())
            await node.poll()
            assert (node.state, node.why.startswith(why), node.usable) == (state, True, not why)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "code", "bad"),
    [
        (400, "bad_request", True),
        (400, "tokens_refused", True),
        (413, "body_too_large", True),
        (422, "model_unsupported", True),
        (404, "model_not_found", False),
        (504, "deadline_exceeded", False),
    ],
)
def test_a_refusal_by_a_node_is_the_same_error_as_a_local_refusal(status: int, code: str, bad: bool) -> None:
    async def run() -> None:
        async with served("/{any}", an_error(status, code)) as server, aiohttp.ClientSession() as session:
            legs = NodeClient(server, session, Heartbeats(), stuck_s=30.0)
            with pytest.raises(NodeRefused) as refused:
                await legs.get("/model", 5.0)
            assert (refused.value.status, refused.value.code, str(refused.value)) == (status, code, "no")
            assert isinstance(refused.value, BadRequest) == bad

    asyncio.run(run())


def an_error(status: int, code: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"error": {"code": code, "message": "no"}}, status=status)

    return answer


@pytest.mark.parametrize(("code", "bad"), [("bad_request", True), ("deadline_exceeded", False)])
def test_a_refusal_in_a_stream_is_the_same_error_too(code: str, bad: bool) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        error = msgspec.json.encode({"error": ErrorDetail(code, "no")})
        return await events_of(request, b"data: %b\n\n" % error)

    async def run() -> None:
        async with served("/{any}", answer, method="*") as server, aiohttp.ClientSession() as session:
            legs = NodeClient(server, session, Heartbeats(), stuck_s=30.0)
            stream = legs.generate("/generate", DecodeRequest(stream=True), "r", TextStreamCheck())
            with pytest.raises(NodeRefused) as refused:
                _ = [batch async for batch in stream]
            assert (refused.value.code, isinstance(refused.value, BadRequest)) == (code, bad)

    asyncio.run(run())


async def events_of(request: web.Request, events: bytes) -> web.StreamResponse:
    """As a node writes them, with their checksum."""
    response = web.StreamResponse(headers={CHECKSUM_HEADER: "crc32"})
    await response.prepare(request)
    await response.write(b"%b: sum %08x\n\n" % (events, checksum(events, 0)))
    return response


@pytest.mark.parametrize(("status", "code"), [(413, "request_too_large"), (404, "not_found")])
def test_errors_that_another_node_may_not_have_lead_to_failover(status: int, code: str) -> None:
    async def run() -> None:
        async with served("/{any}", an_error(status, code)) as server, aiohttp.ClientSession() as session:
            with pytest.raises(LegFailed) as failed:
                await NodeClient(server, session, Heartbeats(), stuck_s=30.0).get("/model", 5.0)
            assert failed.value.code == code

    asyncio.run(run())


def test_a_node_that_freezes_after_its_last_event_has_answered() -> None:
    """The end of the stream does not come, and the heartbeat notices: the answer is complete all the same."""
    answered = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=503)
        events = b'data: {"token": null, "text": "a", "finish_reason": "stop"}\n\n'
        events += b'data: {"done": true, "metrics": {}}\n\n'
        response = await events_of(request, events)
        answered.set()
        await asyncio.sleep(60)
        return response

    async def run() -> None:
        heartbeats = Heartbeats()
        async with served("/{any}", answer, method="*") as server, aiohttp.ClientSession() as session:
            legs = NodeClient(server, session, heartbeats, stuck_s=30.0)

            async def read() -> list[bool]:
                stream = legs.generate("/generate", DecodeRequest(stream=True), "r", TextStreamCheck())
                return [event.done async for batch in stream for event in batch]

            reading = asyncio.create_task(read())
            await answered.wait()
            while not reading.done():
                heartbeats.check(asyncio.get_running_loop().time() + 10, late=False)
                await asyncio.sleep(0.01)
            assert reading.result() == [False, True]

    asyncio.run(run())


def test_a_silent_node_is_named_once_in_the_error() -> None:
    server = Server(name="d1", role="decode", host="127.0.0.1", port=1, model="m")

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            failure = NodeClient(server, session, Heartbeats(), stuck_s=30.0)._unreachable(
                StreamSilent("it does not answer")
            )
            assert (str(failure), failure.code, failure.node_gone) == ("d1: it does not answer", "unreachable", True)

    asyncio.run(run())


def test_a_request_without_a_response_ends_when_its_node_fails_a_probe() -> None:
    """The request itself would wait for ever. A cancellation from outside is not taken for the probe's."""

    async def run() -> None:
        heartbeats, probes = Heartbeats(OrchestratorTimeouts(watch_s=0.0)), list[str]()

        async def fails() -> None:
            probes.append("fails")
            raise LegFailed("d1", "unreachable", "it does not answer")

        async def wait() -> None:
            with PendingRequest(heartbeats, fails):
                await asyncio.Event().wait()

        async def check() -> None:
            await asyncio.sleep(0.01)
            heartbeats.check(asyncio.get_running_loop().time() + 1.0, late=False)

        waiting = asyncio.create_task(wait())
        await check()
        with pytest.raises(LegFailed, match="does not answer"):
            await waiting
        cancelled = asyncio.create_task(wait())
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert cancelled.cancelled()
        assert probes == ["fails"]
        assert not heartbeats.open

    asyncio.run(run())


def test_a_probe_that_fails_after_the_response_began_ends_nothing() -> None:
    async def run() -> None:
        heartbeats, response, failed = (
            Heartbeats(OrchestratorTimeouts(watch_s=0.0)),
            asyncio.Event(),
            asyncio.Event(),
        )

        async def fails_late() -> None:
            await response.wait()
            failed.set()
            raise LegFailed("d1", "unreachable", "it does not answer")

        with PendingRequest(heartbeats, fails_late):
            heartbeats.check(asyncio.get_running_loop().time() + 1.0, late=False)
            await asyncio.sleep(0.01)
        response.set()
        await failed.wait()
        await asyncio.sleep(0.01)  # a cancellation would come here

    asyncio.run(run())
