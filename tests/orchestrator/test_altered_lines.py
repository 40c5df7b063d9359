"""One bit of the HTTP line between orchestrator and node is flipped, at every kind of place: no answer is wrong."""

import asyncio
import random
import re
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import aiohttp
import msgspec
import pytest

from disaggregated_inference.api import (
    CHECKSUM_HEADER,
    ChecksumReader,
    DecodeRequest,
    ModelInfo,
    PrefillRequest,
    StreamDamaged,
    StreamEvent,
    checksum,
    checksum_text,
)
from disaggregated_inference.chaos.tcp_proxy import TcpProxy
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.cluster import Server
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.orchestrator.heartbeat import Heartbeats
from disaggregated_inference.orchestrator.leg_errors import LegBusy, LegFailed
from disaggregated_inference.orchestrator.node_client import NodeClient
from disaggregated_inference.orchestrator.stream_check import TokenStreamCheck
from disaggregated_inference.timeouts import BreakerTimeouts, OrchestratorTimeouts
from tests.support.alterations import TIMES, altered, http_parts
from tests.support.cluster import Process, config_of
from tests.support.tcp_proxy import FaultyProxy
from tests.support.waiting import until

CASES = 60
# A node that failed is asked again at once: the next flipped bit needs it.
SOON = OrchestratorTimeouts(
    breaker=BreakerTimeouts(first_open_s=0.02, longest_open_s=0.02), poll_missing_s=0.02, come_back_s=0.02
)
ASK: dict[str, Any] = {"model": "simulated:tiny", "prompt": "hello", "max_tokens": 12, "temperature": 0}


class RequestProxy(FaultyProxy):
    """Flips a bit on the way to the node instead."""

    def pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(self._disturbed(data))
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def pump_back(self, source: socket.socket, target: socket.socket) -> None:
        super().pump(source, target)


@pytest.mark.slow
@pytest.mark.parametrize("proxy", [FaultyProxy, RequestProxy])
def test_no_flipped_bit_changes_an_answer(proxy: type[FaultyProxy]) -> None:
    node = Process("d1", "decode", "simulated", "simulated:tiny", "--profile", "instant")
    places = random.Random(5)
    try:
        node.ready()
        config = config_of(node, local="always", poll_s=0.2)
        with DisaggregatedClient(config) as client:
            _, expected = client.generate(**ASK)
        with proxy(("127.0.0.1", node.port)) as line:
            config["decode_servers"][0]["port"] = line.address[1]
            with DisaggregatedClient(config, SOON) as client:
                client.generate(**ASK)  # fetches the tokenizer
                before = line.passed
                client.generate(**ASK)
                size, struck, right = line.passed - before, 0, 0
                for _ in range(CASES):
                    assert until(lambda: client.status()["nodes"][0]["usable"], 60)
                    line.struck.clear()
                    line.at, line.fault = line.passed + places.randrange(size), "flip"
                    with suppress(DisaggError):  # a length that grew: the node waits for the rest
                        _, metrics = client.generate(**ASK, timeout=4)
                        assert metrics["tokens"] == expected["tokens"]
                        assert metrics["finish_reason"] == expected["finish_reason"]
                        right += 1
                    struck += line.struck.is_set()
                    line.fault = "none"
        assert struck > CASES // 3
        assert right > CASES // 2
    finally:
        node.end()


class DigitProxy(TcpProxy):
    """Alters the first digit of a field of the node's JSON, as long as `field` is set."""

    field, altered = b"", 0

    def to_client(self, data: bytes) -> bytes:
        if not (self.field and (found := re.search(rb'"%b":(\d)' % self.field, data))):
            return data
        self.altered += 1
        at = found.start(1)
        return data[:at] + (b"2" if data[at] != ord("2") else b"3") + data[at + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("field", [b"context_window", b"most", b"stalled_s"])  # of /model, of /status, of both
def test_a_changed_digit_in_what_a_node_says_of_itself(field: bytes) -> None:
    """It is never believed: a number of /model would stay until the node restarts."""
    node = Process("d1", "decode", "simulated", "simulated:tiny", "--profile", "instant")
    try:
        node.ready()
        line = DigitProxy(("127.0.0.1", node.port))
        config = config_of(node, local="always", poll_s=0.1)
        config["decode_servers"][0]["port"] = line.address[1]
        line.field = field
        with DisaggregatedClient(config, SOON) as client:
            assert until(lambda: line.altered > 3, 60)
            [said] = client.status()["nodes"]
            assert (said["usable"], said["state"]) == (False, "unreachable")
            assert "damaged on the way: its checksum differs" in said["why"]
            with pytest.raises(DisaggError):
                client.generate(**ASK, timeout=0.5)
            line.field = b""
            assert until(lambda: client.status()["nodes"][0]["usable"], 60)
            _, answer = client.generate(**ASK)
            assert answer["completion_tokens"] == 12
            altered, line.field = line.altered, field  # a node that was used until now
            if field != b"context_window":  # a node that is known is not asked for its model again
                assert until(lambda: not client.status()["nodes"][0]["usable"], 60)
                assert line.altered > altered
        line.close()
    finally:
        node.end()


def test_a_reader_passes_on_what_is_proven() -> None:
    parts, so_far, sent = [b'data: {"a": ": sum 1"}\n\n', b": alive 0.1\n\n", b"data: 2\n\ndata: 3\n\n"], 0, b""
    for part in parts:
        so_far = checksum(part, so_far)
        sent += b"%b: sum %08x\n\n" % (part, so_far)
    for size in range(1, len(sent) + 1):
        reader = ChecksumReader()
        assert b"".join(reader.feed(sent[at : at + size]) for at in range(0, len(sent), size)) == b"".join(parts)
    for at in range(len(sent)):
        reader, altered = ChecksumReader(), sent[:at] + bytes([sent[at] ^ 1]) + sent[at + 1 :]
        with suppress(StreamDamaged):
            assert b"".join(parts).startswith(reader.feed(altered))


REQUEST = DecodeRequest(tokens=[5, 6, 7], max_tokens=12, ignore_eos=True, stream=True)
MODEL = ModelInfo(context_window=1000, vocabulary=1 << 16)


def recorded(port: int, asked: str = "POST /generate", request: msgspec.Struct | None = REQUEST) -> bytes:
    """A node's whole answer, as it is on the line."""
    body = msgspec.json.encode(request) if request else b""
    head = f"{asked} HTTP/1.1\r\nHost: n\r\n{CHECKSUM_HEADER}: {checksum_text(body)}\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", port), 60) as line:
        line.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return b"".join(iter(lambda: line.recv(1 << 16), b""))


class Replay:
    """A server that answers every request with `answer`, and hangs up."""

    answer = b""

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError):
            if (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
                await reader.read(1 << 16)
            writer.write(self.answer)
            await writer.drain()


SMALL = {
    "POST /prefill": PrefillRequest(tokens=[5, 6, 7], ticket="t", wait=False),
    "GET /status": None,
    "GET /model": None,
}


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[str, bytes]]:
    """Of real nodes: the streams of a decode node, and what a prefill node says."""
    nodes = [
        Process(name, role, "simulated", "simulated:tiny", "--profile", "instant")
        for name, role in (("p1", "prefill"), ("d1", "decode"))
    ]
    try:
        reader, writer = (node.ready().port for node in nodes)
        found = {asked: recorded(reader, asked, request) for asked, request in SMALL.items()}
        context = msgspec.json.decode(found["POST /prefill"].partition(b"\r\n\r\n")[2])["context"]
        handed = msgspec.structs.replace(REQUEST, context=context)
        found["POST /generate"] = recorded(writer)
        found["POST /decode"] = recorded(writer, "POST /decode", handed)
        assert all(b" 200 " in whole.partition(b"\r\n")[0] for whole in found.values())
        yield found
    finally:
        for node in nodes:
            node.end()


def output_of(events: list[StreamEvent]) -> list[tuple[int | None, str, str | None]]:
    return [(event.token, event.text, event.finish_reason) for event in events if not event.done]


async def read(path: str, server: Server, session: aiohttp.ClientSession) -> list[StreamEvent]:
    client, events = NodeClient(server, session, Heartbeats(), 30.0), list[StreamEvent]()
    async for batch in client.generate(path, REQUEST, "r", TokenStreamCheck(REQUEST, MODEL)):
        events += batch
    return events


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/generate", "/decode"])
def test_altered_answers_are_failed_legs(answers: dict[str, bytes], path: str) -> None:
    """The client of the orchestrator reads recorded bytes of a node, altered in every class of position."""
    whole = answers[f"POST {path}"]

    async def run() -> None:
        replay, failed = Replay(), 0
        listening = await asyncio.start_server(replay.take, "127.0.0.1", 0)
        server = Server(
            name="n", role="decode", host="127.0.0.1", port=listening.sockets[0].getsockname()[1], model="m"
        )
        async with listening, aiohttp.ClientSession() as session:
            replay.answer = whole
            expected = output_of(await read(path, server, session))
            assert len(expected) == 12
            parts = http_parts(whole, "key", "value", "checksum", "length", "line")
            for replay.answer in altered(whole, 1000, seed=6, parts=parts):
                try:
                    assert output_of(await read(path, server, session)) == expected
                except (LegFailed, LegBusy):  # any other error would end the request
                    failed += 1
        assert failed > 800 * TIMES

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("asked", SMALL)
def test_altered_small_answers(answers: dict[str, bytes], asked: str) -> None:
    """The context of a prefill, and what a node says of itself: as it was sent, or a failed leg."""
    whole = answers[asked]

    async def taken(client: NodeClient) -> object:
        if request := SMALL[asked]:
            return await client.prefill(request, "r")
        return await client.get(asked.partition(" ")[2], 30.0)

    async def run() -> None:
        replay, failed = Replay(), 0
        listening = await asyncio.start_server(replay.take, "127.0.0.1", 0)
        server = Server(
            name="n", role="prefill", host="127.0.0.1", port=listening.sockets[0].getsockname()[1], model="m"
        )
        async with listening, aiohttp.ClientSession() as session:
            client, replay.answer = NodeClient(server, session, Heartbeats(), 30.0), whole
            expected = await taken(client)
            parts = http_parts(whole, "key", "value", "checksum", "length")
            for replay.answer in altered(whole, 400, seed=8, parts=parts):
                try:
                    assert await taken(client) == expected
                except (LegFailed, LegBusy):
                    failed += 1
        assert failed > 250 * TIMES

    asyncio.run(run())
