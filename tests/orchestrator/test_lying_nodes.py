"""A node that breaks the protocol is a failed leg: the answer comes from another node, and it is right."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from disaggregated_inference.api import CHECKSUM_HEADER, DecodeRequest
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.orchestrator.heartbeat import Heartbeats
from disaggregated_inference.orchestrator.leg_errors import LegFailed
from disaggregated_inference.orchestrator.node_client import NodeClient
from disaggregated_inference.orchestrator.stream_check import TokenStreamCheck
from disaggregated_inference.timeouts import BreakerTimeouts, OrchestratorTimeouts
from tests.support.cluster import Process, config_of
from tests.support.http_stub import served
from tests.support.lying_node import Lie, LyingNode
from tests.support.waiting import until

MODEL = "simulated:tiny"
ASK: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
Events = list[dict[str, Any]]


def event(at: int, **fields: Any) -> Lie:
    """The event at that place, with other fields; None leaves a field out."""

    def lie(events: Events) -> list[Any]:
        changed = events[at] | fields
        events[at] = {name: value for name, value in changed.items() if value is not None}
        return events

    return lie


def last_metrics(**fields: Any) -> Lie:
    return lambda events: [*events[:-1], events[-1] | {"metrics": events[-1]["metrics"] | fields}]


def instead(at: int, *sent: Any) -> Lie:
    return lambda events: [*events[:at], *sent, *events[at:][1:]]


def before(at: int, *sent: Any) -> Lie:
    return lambda events: [*events[:at], *sent, *events[at:]]


def after(*sent: Any) -> Lie:
    return lambda events: [*events, *sent]


def answer_of(client: DisaggregatedClient) -> dict[str, Any]:
    response, metrics = client.generate(**ASK)
    return metrics | {"response": response}


PROGRESS = {"progress": {"total": 5, "cache": 0, "processed": 5, "time_ms": 1}}
SCORES = {"prompt_logprobs": {"start": 0, "tokens": [{"token": 1, "logprob": None}]}}
TOKEN = {"token": 5, "text": "x"}
LIES: dict[str, Lie] = {
    "not JSON": instead(2, b"data: {oops\n\n"),
    "half of an event": instead(2, b'data: {"token": 5, "te\n\n'),
    "not UTF-8": instead(2, b'data: {"token": 5, "text": "\xff\xfe"}\n\n'),
    "no events": instead(2, b"<html>Bad gateway</html>\n\n"),
    "a list": instead(2, b"data: [1, 2]\n\n"),
    "JSON without a floor": instead(2, b'data: {"more": ' + b"[" * 100_000 + b"\n\n"),
    "a token in words": event(2, token="five"),
    "a token with a fraction": event(2, token=5.5),
    "a negative token": event(2, token=-1),
    "a token outside the vocabulary": event(2, token=1 << 20),
    "a token of a hundred digits": instead(2, b'data: {"token": 1%b, "text": "x"}\n\n' % (b"0" * 100)),
    "no token": event(2, token=None),
    "no text": event(2, text=None),
    "text of another token": event(2, text="~"),
    "text that is a number": event(2, text=5),
    "text of two tokens": lambda events: event(2, text=events[2]["text"] + "x")(events),
    "another choice": event(2, index=1),
    "a negative choice": event(2, index=-1),
    "an unknown finish reason": event(-2, finish_reason="done"),
    "the end by length too early": event(3, finish_reason="length"),
    "the end by an end token that is none": event(3, finish_reason="stop"),
    "no finish reason": event(-2, finish_reason=None),
    "a token after the finish reason": before(-1, TOKEN),
    "a token after the end": after(TOKEN),
    "two ends": lambda events: [*events, events[-1]],
    "the end in the middle": lambda events: [*events[:3], events[-1], *events[3:]],
    "no end": lambda events: events[:-1],
    "only the end": lambda events: events[-1:],
    "nothing at all": lambda events: [],
    "a token is missing": lambda events: [*events[:2], *events[3:]],
    "a token comes twice": lambda events: [*events[:2], events[2], *events[2:]],
    "the end without metrics": event(-1, metrics=None),
    "metrics below zero": last_metrics(decode_time=-1.0),
    "metrics in words": last_metrics(kv_bytes="many"),
    "metrics beyond all numbers": last_metrics(total_time=1e300),
    "more cached than there is": last_metrics(cached_tokens=1000),
    "another count of tokens": last_metrics(completion_tokens=3),
    "metrics before the end": lambda events: event(1, metrics=events[-1]["metrics"])(events),
    "metrics of a request": event(1, request_metrics={"tokens": [1]}),
    "a token that is also the end": event(2, done=True),
    "a token that is also an error": event(2, error={"code": "x", "message": "y"}),
    "an error with a wrong type": instead(2, {"error": "no"}),
    "a refusal in the middle": instead(2, {"error": {"code": "bad_request", "message": "no"}}),
    "logprobs without being asked": event(2, logprob=-0.5),
    "progress without being asked": before(0, PROGRESS),
    "prompt logprobs without being asked": before(0, SCORES),
    "thoughts of a token": event(2, thinking="hm"),
    "tool calls of a token": event(2, tool_calls=[{"name": "rm"}]),
}


# The answer may be complete before the lie: it depends on whether the last token came with the end, or before it.
COMPLETE = (
    "no end",
    "a token after the end",
    "two ends",
    "a token after the finish reason",
    "the end without metrics",
    "metrics below zero",
    "metrics in words",
    "metrics beyond all numbers",
    "more cached than there is",
)


@pytest.fixture(scope="module")
def liar() -> Iterator[LyingNode]:
    """In front of the much faster of two nodes: requests go there first, whatever a busy machine measured."""
    fast = Process("fast", "decode", "simulated", MODEL, "--profile", "custom:prefill=50000,decode=2000")
    honest = Process("honest", "decode", "simulated", MODEL, "--profile", "custom:prefill=5000,decode=50")
    try:
        for node in (fast, honest):
            node.ready()
        with LyingNode(fast.port) as found:
            found.config = config_of(fast, honest, local="always", poll_s=0.2)  # type: ignore[attr-defined]
            found.config["decode_servers"][0] |= {"port": found.port, "name": "liar"}  # type: ignore[attr-defined]
            yield found
    finally:
        for node in (fast, honest):
            node.end()


@pytest.fixture
def client(liar: LyingNode) -> Iterator[DisaggregatedClient]:
    liar.lie, liar.bodies = None, {}
    soon = OrchestratorTimeouts(breaker=BreakerTimeouts(longest_open_s=1.0))  # tried out again
    with DisaggregatedClient(liar.config, soon) as made:  # type: ignore[attr-defined]
        assert until(lambda: made.health()["verdict"] == "all up")
        yield made
    liar.lie, liar.bodies = None, {}


@pytest.fixture(scope="module")
def right(liar: LyingNode) -> dict[str, Any]:
    with DisaggregatedClient(liar.config) as made:  # type: ignore[attr-defined]
        return answer_of(made)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIES)
def test_every_deviation_is_a_failed_leg(
    liar: LyingNode,
    client: DisaggregatedClient,
    right: dict[str, Any],
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before, liar.lie = liar.lies, LIES[name]
    with caplog.at_level(logging.WARNING):
        metrics = answer_of(client)
    assert liar.lies == before + 1, "the fault happened"
    assert (metrics["tokens"], metrics["response"]) == (right["tokens"], right["response"])
    assert metrics["finish_reason"] == right["finish_reason"]
    assert metrics["decode_node"] == "honest" or name in COMPLETE
    assert [failover["node"] for failover in metrics["failovers"]] == ["liar"]
    assert sum("a leg failed: liar: " in record.getMessage() for record in caplog.records) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["not JSON", "no end"])
def test_a_node_that_keeps_lying_is_taken_out(
    liar: LyingNode, client: DisaggregatedClient, right: dict[str, Any], name: str
) -> None:
    """60 of 60 answers are right, and the breaker spares most of them the detour."""
    before, liar.lie, states = liar.lies, LIES[name], set()
    for _ in range(60):
        metrics = answer_of(client)
        assert (metrics["tokens"], metrics["response"]) == (right["tokens"], right["response"])
        states |= {node["breaker"] for node in client.status()["nodes"] if node["name"] == "liar"}
    assert states & {"open", "half_open"}, states
    assert 3 <= liar.lies - before < 30
    liar.lie = None
    assert until(lambda: client.generate(**ASK)[1]["decode_node"] == "liar", 120), "one trial brings it back"


@pytest.mark.slow
def test_a_stream_goes_on_elsewhere(liar: LyingNode, client: DisaggregatedClient, right: dict[str, Any]) -> None:
    liar.lie = LIES["text of another token"]
    deltas = list(client.stream(**ASK))
    assert [delta.token for delta in deltas if delta.token is not None] == right["tokens"]
    assert "".join(delta.text for delta in deltas) == right["response"]
    liar.lie = LIES["the end by length too early"]  # what the client has read cannot be taken back
    if client.status()["nodes"][0]["usable"]:
        with pytest.raises(DisaggError, match="liar: its stream breaks the protocol: it ended by length"):
            list(client.stream(**ASK))


def changed(**fields: Any) -> Any:
    return lambda body: msgspec.json.encode(msgspec.json.decode(body) | fields)


RATE = {"size": 1, "samples": 9}
BODIES: dict[str, tuple[str, Any]] = {
    "a status that is no JSON": ("/status", lambda body: body[:-5]),
    "a status that is a list": ("/status", lambda body: b"[]"),
    "slots in words": ("/status", changed(slots="many")),
    "slots below zero": ("/status", changed(slots={"used": 0, "most": -4})),
    "rates below zero": ("/status", changed(rates={"decode": [RATE | {"tokens_per_s": -1.0}]})),
    "a rate beyond all numbers": ("/status", changed(rates={"decode": [RATE | {"tokens_per_s": 1e300}]})),
    "a rate of 0": ("/status", changed(rates={"decode": [RATE | {"tokens_per_s": 0.0}]})),
    "a window below zero": ("/status", changed(context_window=-5)),
    "memory of a hundred digits": ("/status", changed(kv={"limit_bytes": 10**18})),
    "an unknown role": ("/status", changed(role="boss")),
    "an unknown health": ("/status", changed(status="fine")),
    "a model that is no JSON": ("/model", lambda body: b"{"),
    "a vocabulary below zero": ("/model", changed(vocabulary=-1)),
    "a model without a window": ("/model", changed(context_window=0)),
    "a fingerprint in words": ("/model", changed(fingerprint="mine")),
    "a tokenizer that is no JSON": ("/model/tokenizer", lambda body: body[:100]),
    "a tokenizer of another model": ("/model/tokenizer", lambda body: body.replace(b"a", b"b")),
    "a tokenizer without content": ("/model/tokenizer", lambda body: b"{}"),
    "a health that is no JSON": ("/health", lambda body: b"healthy"),
    "a health in words": ("/health", changed(stalled_s="long")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_no_body_of_a_node_fails_a_request(
    liar: LyingNode,
    right: dict[str, Any],
    name: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node is not used, or the lie does no harm."""
    monkeypatch.setenv("DISAGG_HOME", str(tmp_path))  # no tokenizer is cached
    path, alter = BODIES[name]
    before, liar.bodies = liar.lies, {path: alter}
    try:
        with DisaggregatedClient(liar.config) as client:  # type: ignore[attr-defined]
            if path == "/model/tokenizer":
                assert until(lambda: client.health()["verdict"] == "all up")
            answers = [answer_of(client) for _ in range(3)]
            assert [answer["tokens"] for answer in answers] == [right["tokens"]] * 3
            assert [answer["response"] for answer in answers] == [right["response"]] * 3
        assert path == "/health" or liar.lies > before, "the fault happened"
    finally:
        liar.bodies = {}


@pytest.mark.parametrize("sums", [True, False])
def test_a_stream_without_line_ends_takes_bounded_memory(sums: bool) -> None:
    sent = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers={CHECKSUM_HEADER: "crc32"} if sums else {})
        await response.prepare(request)
        with suppress(ConnectionError):
            for _ in range(256):
                await response.write(b"x" * (1 << 20))
                sent += 1
        return response

    async def run() -> None:
        async with served("/generate", answer, "POST") as server, aiohttp.ClientSession() as session:
            client, request = NodeClient(server, session, Heartbeats(), 30.0), DecodeRequest(tokens=[1], max_tokens=4)
            says = "no checksum within" if sums else "no checksums: it is an older version, or a proxy drops the header"
            with pytest.raises(LegFailed, match=says) as failed:
                async for _ in client.generate("/generate", request, "r", TokenStreamCheck(request, None)):
                    pass
            assert failed.value.code == "bad_answer"

    asyncio.run(run())
    assert sent < 64


CONTEXTS: dict[str, Any] = {
    "no JSON": lambda body: body[:-3],
    "no context": lambda body: b"{}",
    "a context that is a number": changed(context=5),
    "a context of nonsense": changed(context="nonsense"),
    "a context cut short": lambda body: msgspec.json.encode(cut(msgspec.json.decode(body))),
    "an answer without an end": lambda body: b'{"context": "' + b"x" * (1 << 20),
    "JSON without a floor": lambda body: b'{"more": ' + b"[" * 100_000,
}


def cut(answer: dict[str, Any]) -> dict[str, Any]:
    return answer | {"context": answer["context"][:-10]}


@pytest.fixture(scope="module")
def lying_reader() -> Iterator[tuple[LyingNode, dict[str, Any]]]:
    """In front of the only prefill node."""
    pace = ("--profile", "custom:prefill=5000,decode=500", "--prefix-memory", "0")
    reader, writer = (
        Process(name, role, "simulated", MODEL, *pace) for name, role in (("p", "prefill"), ("d", "decode"))
    )
    try:
        for node in (reader, writer):
            node.ready()
        with LyingNode(reader.port) as found:
            config = config_of(reader, writer, local="never", poll_s=0.2)
            config["prefill_servers"][0]["port"] = found.port
            yield found, config
    finally:
        for node in (reader, writer):
            node.end()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_prefill_node_that_lies_is_done_without(
    lying_reader: tuple[LyingNode, dict[str, Any]], right: dict[str, Any], name: str
) -> None:
    reader, config = lying_reader
    with DisaggregatedClient(config) as client:
        assert until(lambda: client.health()["verdict"] == "all up")
        before, reader.bodies = reader.lies, {"/prefill": CONTEXTS[name]}
        try:
            metrics = answer_of(client)
        finally:
            reader.bodies = {}
    assert reader.lies > before, "the fault happened"
    assert (metrics["tokens"], metrics["response"]) == (right["tokens"], right["response"])
    assert {failover["node"] for failover in metrics["failovers"]} == {"p"}
    assert metrics["method"] == "fallback"
