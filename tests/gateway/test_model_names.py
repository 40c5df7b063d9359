"""No answer under a false name: what `model` and `x-disagg-model` are in each API, and nodes with another name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from tests.support.cluster import Process, free_port
from tests.support.gateway import gateway_process, served, simulated_config, simulated_pair
from tests.support.waiting import until

MODEL, ALIAS, PART = "simulated:tiny", "tiny-alias", "tiny"
HELLO = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"messages": HELLO, "max_tokens": 2}
# The whole name fits: in any case, by an alias, or with the prefix of some programs. It is repeated: programs compare.
NAMES = [(name, name) for name in (MODEL, "Simulated:TINY", ALIAS, f"disaggregated:{MODEL}")]
NAMES += [(PART, MODEL), (f"{MODEL}-instruct", MODEL), ("disaggregated:tiny", MODEL)]
# Path, and what it needs besides the model.
STREAMS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 2}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 16}),
    ("/v1/messages", CHAT),
    ("/api/chat", {"messages": HELLO, "options": {"num_predict": 2}}),
    ("/api/generate", {"prompt": "Hello", "options": {"num_predict": 2}}),
]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair() as pair:
        yield pair


@pytest.fixture(scope="module")
def url(pair: tuple[Process, Process]) -> Iterator[str]:
    """Beside the model there is another, whose node is away."""
    config = simulated_config(*pair)
    config["decode_servers"].append({"host": "127.0.0.1", "port": free_port(), "model": "simulated:away"})
    with served(config) as url:
        yield url


def models_in(answer: httpx.Response) -> set[str]:
    """Every `model` of a body, or of the events or lines of a stream. Responses and messages have theirs one deeper."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith(("data: {", "{"))]
    found = [json.loads(line) for line in lines]
    inner = [each.get("response") for each in found if isinstance(each.get("response"), dict)]
    inner += [each["message"] for each in found if isinstance(each.get("message"), dict)]
    return {each["model"] for each in found + inner if "model" in each}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), STREAMS, ids=[path for path, _ in STREAMS])
@pytest.mark.parametrize(("asked", "shown"), NAMES)
def test_the_response_has_the_name_only_if_it_is_whole(
    url: str, path: str, body: dict[str, Any], asked: str, shown: str, stream: bool
) -> None:
    answer = httpx.post(url + path, json=body | {"model": asked, "stream": stream}, timeout=60)
    assert answer.status_code == 200
    assert models_in(answer) == {shown}
    assert answer.headers["x-disagg-model"] == MODEL


def test_official_clients_see_the_real_name(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        assert client.chat.completions.create(model=PART, **CHAT).model == MODEL
        assert client.responses.create(model=PART, input="Hello", max_output_tokens=16).model == MODEL
        assert client.models.retrieve(PART).id == MODEL
        assert client.models.retrieve(ALIAS).id == ALIAS
    with anthropic.Anthropic(base_url=url, api_key="none") as messages:
        assert messages.messages.create(model=PART, **CHAT).model == MODEL
    with ollama.Client(url) as local:
        assert local.chat(PART, HELLO).model == MODEL
        assert local.chat(f"{ALIAS}:latest", HELLO).model == f"{ALIAS}:latest"
        assert local.generate(PART).model == MODEL, "without a prompt: whether it is loaded"


def test_a_response_without_a_name_has_the_real_one(pair: tuple[Process, Process]) -> None:
    with served(simulated_config(*pair)) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=60)
        assert (models_in(answer), answer.headers["x-disagg-model"]) == ({MODEL}, MODEL)


@pytest.mark.parametrize(("path", "body"), STREAMS, ids=[path for path, _ in STREAMS])
def test_a_part_of_two_models_is_refused_with_both(url: str, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(url + path, json=body | {"model": "simulated"}, timeout=60)
    assert answer.status_code == 404
    words = '"simulated" may be simulated:tiny or simulated:away: write the full name; the cluster has'
    assert words in answer.text.replace('\\"', '"')
    short = httpx.post(url + path, json=body | {"model": "ti"}, timeout=60)
    assert short.status_code == 404
    assert 'no model "ti"; the cluster has simulated:tiny, simulated:away' in short.text.replace('\\"', '"')


def test_a_node_that_is_away_is_named_in_the_error_of_every_api(url: str) -> None:
    words = "Decode server unavailable - request failed: 127.0.0.1:"
    for path, body in STREAMS:
        answer = httpx.post(url + path, json=body | {"model": "simulated:away"}, timeout=60)
        assert answer.status_code == 503
        assert words in answer.text
        assert ": it cannot be reached: connection refused" in answer.text


def test_another_name_is_a_warning_in_every_view_of_the_gateway(pair: tuple[Process, Process], tmp_path: Path) -> None:
    config = simulated_config(*pair)
    for server in config["prefill_servers"] + config["decode_servers"]:
        server["model"] = "qwen"
    del config["models"]
    with gateway_process(tmp_path, config) as gateway:
        assert until(lambda: gateway.log_text().count("it names its model simulated:tiny, the cluster file qwen") == 2)
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=CHAT | {"model": "qwen"}, timeout=60)
        assert answer.status_code == 200
        assert answer.headers["x-disagg-warning"].startswith("d1: it names its model simulated:tiny")
        ready = httpx.get(f"{gateway.url}/ready").json()
        cluster = httpx.get(f"{gateway.url}/cluster").json()
        metrics = httpx.get(f"{gateway.url}/metrics").text
    assert ready["status"] == "ready"
    assert ready["warnings"] == cluster["warnings"]
    assert [warning.partition(":")[0] for warning in cluster["warnings"]] == ["p1", "d1"]
    assert cluster["verdict"] == "all up; another model name on p1, d1"
    assert [(node["model"], node["node_model"]) for node in cluster["nodes"]] == [("qwen", MODEL)] * 2
    assert (cluster["history"][0]["model"], cluster["history"][0]["node_model"]) == ("qwen", MODEL)
    info = 'disagg_node_info{engine="simulated",model="qwen",node="d1",node_model="simulated:tiny",role="decode"} 1.0'
    assert info in metrics
    assert 'disagg_node_misnamed{node="d1"} 1.0' in metrics
    assert "disagg_fallback_total{" not in metrics, "another name is no fallback"


@pytest.mark.parametrize("stream", [False, True])
def test_every_api_tells_of_the_fallback(pair: tuple[Process, Process], stream: bool) -> None:
    config = simulated_config(*pair)
    config["prefill_servers"][0]["port"] = free_port()  # nothing answers there
    with served(config) as url:
        for path, body in STREAMS:
            answer = httpx.post(url + path, json=body | {"model": MODEL, "stream": stream}, timeout=60)
            assert answer.status_code == 200
            assert answer.headers["x-disagg-warning"] == "Using fallback mode - slower performance", path
        assert "disagg_fallback_total{" in httpx.get(f"{url}/metrics").text
