"""Clients that leave the OpenAI endpoints, and a node that dies under one."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing

import httpx
import openai
import pytest

from tests.support.cluster import Process
from tests.support.gateway import served, simulated_config, simulated_pair
from tests.support.openai_requests import FOR_EVER, QUICK, SIMULATED, SLOW, openai_client
from tests.support.waiting import until


@pytest.fixture(scope="module")
def slow_pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair(SLOW) as pair:
        yield pair


# Who leaves, and who is gone.


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_cancels_the_request(slow_pair: tuple[Process, Process], stream: bool) -> None:
    _, writer = slow_pair
    with served(simulated_config(*slow_pair)) as url, openai_client(url) as asking:
        if stream:
            answer = asking.chat.completions.create(**FOR_EVER, stream=True)
            next(iter(answer))
            assert until(lambda: bool(writer.status()["running"]))
            answer.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                asking.chat.completions.create(**FOR_EVER, timeout=1.0)
        assert until(lambda: all(node.nothing_left() for node in slow_pair))


def test_a_disconnect_before_the_first_event_cancels(slow_pair: tuple[Process, Process]) -> None:
    body = QUICK | {"max_tokens": 2000, "ignore_eos": True, "stream": True}
    body["messages"] = [{"role": "user", "content": "x" * 100_000}]  # five seconds
    ended = _tickets_ended(slow_pair[0])
    with served(simulated_config(*slow_pair)) as url:
        httpx.post(f"{url}/v1/chat/completions", json=QUICK).raise_for_status()
        with closing(http.client.HTTPConnection(url.removeprefix("http://"))) as leaving:
            leaving.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            assert until(lambda: slow_pair[0].status()["tickets"] == 1)
        assert until(lambda: all(node.nothing_left() for node in slow_pair))
        assert _tickets_ended(slow_pair[0]) == ended + 2


def _tickets_ended(node: Process) -> int:
    return sum(node.status()["endings"].values())


def test_a_stream_whose_node_dies_ends_in_an_error(slow_pair: tuple[Process, Process]) -> None:
    """The last test with this pair."""
    reader, writer = slow_pair
    with served(simulated_config(*slow_pair, retries=0)) as url, openai_client(url) as asking:
        answer = iter(asking.chat.completions.create(**FOR_EVER, stream=True))
        next(answer)
        writer.kill()
        with pytest.raises(openai.APIError, match="Decode server unavailable"):
            list(answer)
        assert until(reader.nothing_left)
        with pytest.raises(openai.InternalServerError) as caught:
            asking.chat.completions.create(**QUICK)
        assert (caught.value.status_code, caught.value.type) == (503, "server_error")
        assert [model.id for model in asking.models.list()] == [SIMULATED, "tiny-alias"]
