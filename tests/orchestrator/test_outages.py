"""A request waits for a decode node of its model as long as it has time, says so, and goes on where it was."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.errors import NoDecodeNode
from disaggregated_inference.orchestrator import Delta
from tests.support.cluster import Process, config_of, free_port
from tests.support.gateway import served
from tests.support.waiting import until

pytestmark = pytest.mark.slow

MODEL = "simulated:tiny"
ASK: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
WAITING = f"waiting for a decode node of {MODEL}"
LONG_S = 7.0  # an outage: more than the five seconds that once ended every answer
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "temperature": 0}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"stream": True},
    "/v1/completions": {"model": MODEL, "prompt": "hi", "max_tokens": 30, "temperature": 0, "stream": True},
    "/v1/responses": {"model": MODEL, "input": "hi", "max_output_tokens": 30, "temperature": 0, "stream": True},
    "/v1/messages": CHAT | {"stream": True},
}


@pytest.fixture(scope="module")
def only() -> Iterator[Process]:
    node = Process("only", "decode", "simulated", MODEL, "--profile", "custom:prefill=5000,decode=40")
    try:
        yield node.ready()
    finally:
        node.end()


@pytest.fixture
def client(only: Process) -> Iterator[DisaggregatedClient]:
    with DisaggregatedClient(config_of(only, local="always", poll_s=0.2)) as made:
        assert until(lambda: made.health()["verdict"] == "all up")
        yield made


def gone(client: DisaggregatedClient, node: Process) -> None:
    node.kill()
    assert until(lambda: client.status()["nodes"][0]["state"] == "unreachable")


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [delta.token for delta in deltas if delta.token is not None]


@pytest.mark.parametrize(("deaths", "away_s"), [((20,), LONG_S), ((0, 10, 40), 0.0)])
def test_an_answer_goes_on_where_it_was(
    only: Process, client: DisaggregatedClient, deaths: tuple[int, ...], away_s: float
) -> None:
    """The only node of the model dies before the first token, in the middle, and again."""
    _, expected = client.generate(**ASK)
    left, deltas = list(deaths), list[Delta]()
    if left[0] == 0:
        gone(client, only)
        left.pop(0)
    for delta in client.stream(**ASK, timeout=120):
        deltas.append(delta)
        if delta.waiting:  # told before the node comes back, so there was time to wait
            assert delta.waiting == WAITING
            time.sleep(away_s)
            only.start()
            only.ready()
        if left and len(tokens_of(deltas)) == left[0]:
            left.pop(0)
            gone(client, only)
    assert tokens_of(deltas) == expected["tokens"]
    assert sum(bool(delta.waiting) for delta in deltas) == len(deaths), "once for each outage"
    assert {failover["node"] for failover in (deltas[-1].metrics or {})["failovers"]} <= {"only"}


def test_a_whole_answer_waits_too(only: Process, client: DisaggregatedClient, caplog: pytest.LogCaptureFixture) -> None:
    """It runs when its node dies, and nothing tells its client."""
    _, expected = client.generate(**ASK)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: client.generate(**ASK, timeout=120))
        assert until(lambda: only.status()["running"] or running.done())
        only.kill()
        assert until(lambda: "the request waits for one" in caplog.text or running.done())
        only.start()
        only.ready()
        _, metrics = running.result(120)
    assert metrics["tokens"] == expected["tokens"]
    assert [failover["node"] for failover in metrics["failovers"]] == ["only"]


def test_the_words_when_the_time_is_over(only: Process, client: DisaggregatedClient) -> None:
    gone(client, only)
    with pytest.raises(NoDecodeNode, match=r"^Decode server unavailable - request failed: only: it cannot be reached"):
        client.generate(**ASK, timeout=1.5)
    only.start()
    only.ready()


def test_what_was_never_there_cannot_come_back() -> None:
    config = {"decode_servers": [{"host": "127.0.0.1", "port": free_port(), "name": "never", "model": MODEL}]}
    with DisaggregatedClient(config) as client, pytest.raises(NoDecodeNode, match="never: it cannot be reached"):
        client.generate(**ASK, timeout=600)


@pytest.mark.parametrize("path", STREAMS)
def test_streams_of_the_gateway_say_that_they_wait(only: Process, path: str) -> None:
    """As a comment, which clients skip: the events are those of an undisturbed stream."""
    with served(config_of(only, local="always", poll_s=0.2)) as url:
        lines = []
        for disturbed in (False, True):
            lines.append(list[str]())
            with httpx.stream("POST", url + path, json=STREAMS[path], timeout=120) as answer:
                for line in answer.iter_lines():
                    lines[-1].append(line)
                    if disturbed and only.alive and sum(text.startswith("data") for text in lines[-1]) > 12:
                        only.kill()
                        disturbed = False
                    if line == f": {WAITING}":
                        time.sleep(LONG_S if path == "/v1/chat/completions" else 0.0)
                        only.start()
                        only.ready()
        assert lines[1].count(f": {WAITING}") == 1
        assert f": {WAITING}" not in lines[0]
        assert written(lines[1]) == written(lines[0])
        assert written(lines[0])


def written(lines: list[str]) -> str:
    """All text of a stream, whatever the API calls it."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(map(_text, events))


def _text(event: dict[str, Any]) -> str:
    if choices := event.get("choices"):
        return str(choices[0].get("text") or choices[0].get("delta", {}).get("content") or "")
    delta = event.get("delta", "")
    return delta if isinstance(delta, str) else str(delta.get("text", ""))
