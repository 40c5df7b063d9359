"""vLLM writes the whole answer: the tokens of the torch engine, the events of every node, typed errors."""

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.engines import Engine, load_engine
from disaggregated_inference.models import ModelFiles
from tests.support.cluster import Process, config_of
from tests.support.engines import ENGINE_OPTIONS
from tests.support.handoff import alone, prompt_of
from tests.support.orchestrator_cluster import answered, ask_of
from tests.support.vllm_served import CHUNK
from tests.support.waiting import until

pytestmark = pytest.mark.slow
ANSWER = 20


@pytest.fixture(scope="module")
def oracle(served_folder: Path) -> Engine:
    return load_engine("torch", ModelFiles("llama", served_folder), **ENGINE_OPTIONS["torch"])


@pytest.fixture(scope="module")
def ask(served: Process) -> Callable[..., tuple[int, Any]]:
    """Status and document of a request."""
    import urllib.error
    import urllib.request

    def post(path: str, **body: Any) -> tuple[int, Any]:
        request = urllib.request.Request(f"http://127.0.0.1:{served.port}{path}", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=240) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    return post


@pytest.mark.parametrize("length", [1, 31, CHUNK, CHUNK + 1, 300, 1500])
def test_greedy_tokens_are_those_of_torch(length: int, ask: Callable[..., Any], oracle: Engine) -> None:
    prompt = prompt_of(length, seed=3)
    status, answer = ask("/generate", tokens=prompt, max_tokens=ANSWER, ignore_eos=True)
    assert status == 200, answer
    assert answer["tokens"] == alone(oracle, prompt, ANSWER)
    assert answer["metrics"]["prompt_tokens_recomputed"] == length
    assert (answer["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", ANSWER)


def test_a_prompt_that_vllm_has_cached_is_not_computed_again(ask: Callable[..., Any], oracle: Engine) -> None:
    prompt = prompt_of(400, seed=4)
    first, second = (ask("/generate", tokens=prompt, max_tokens=4)[1] for _ in range(2))
    assert first["tokens"] == second["tokens"] == alone(oracle, prompt, 4)[: len(first["tokens"])]
    assert second["usage"]["cached_tokens"] > 300
    salted = ask("/generate", tokens=prompt, max_tokens=4, cache_salt="of-another-caller")[1]
    assert salted["usage"]["cached_tokens"] == 0


def test_end_tokens_and_stop_strings_end_the_answer(ask: Callable[..., Any], served_folder: Path) -> None:
    tokenizer, prompt = ModelFiles("llama", served_folder).tokenizer, prompt_of(40, seed=5)
    whole = ask("/generate", tokens=prompt, max_tokens=60, ignore_eos=True)[1]
    ended = ask("/generate", tokens=prompt, max_tokens=60, ignore_eos=True, logit_bias={"1": 100})[1]
    assert set(ended["tokens"]) == {1}, "an end token like any other"
    ended = ask("/generate", tokens=prompt, max_tokens=60, logit_bias={"1": 100})[1]
    assert (ended["tokens"], ended["finish_reason"], ended["generated_text"]) == ([1], "stop", "")
    ended = ask("/generate", tokens=prompt, max_tokens=60, logit_bias={"1": 100}, min_tokens=3)[1]
    assert len(ended["tokens"]) == 4, "no end token before min_tokens"
    text = whole["generated_text"]
    assert text == "".join(map(tokenizer.stream().push, whole["tokens"])) or text
    stop = next(text[at : at + 2] for at in range(len(text) // 2, len(text)) if "\ufffd" not in text[at : at + 2])
    stopped = ask("/generate", tokens=prompt, max_tokens=60, ignore_eos=True, stop=stop)[1]
    assert (stopped["finish_reason"], stopped["generated_text"]) == ("stop", text[: text.index(stop)])
    assert stopped["tokens"] == whole["tokens"][: len(stopped["tokens"])]


def test_sampled_answers_choices_and_logprobs(ask: Callable[..., Any]) -> None:
    body = {"tokens": prompt_of(30, seed=6), "max_tokens": 8, "temperature": 1.0, "seed": 11, "ignore_eos": True}
    both, again = (ask("/generate", **body, n=2, logprobs=3)[1]["choices"] for _ in range(2))
    assert [choice["tokens"] for choice in both] == [choice["tokens"] for choice in again], "one seed, one answer"
    assert both[0]["tokens"] != both[1]["tokens"]
    second = ask("/generate", **body, choice=1)[1]
    assert second["tokens"] == both[1]["tokens"], "a choice alone has its own seed"
    for token, shown in zip(both[0]["tokens"], both[0]["logprobs"], strict=True):
        assert shown["token"] == token
        assert len(shown["top_logprobs"]) == 3
        assert shown["logprob"] <= shown["top_logprobs"][0]["logprob"] < 0.01


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/generate", {"tokens": [5], "max_tokens": 4000}, 400, "context_too_long"),
        ("/generate", {"tokens": [512], "max_tokens": 4}, 400, "tokens_refused"),
        ("/generate", {"tokens": [], "max_tokens": 4}, 400, "bad_request"),
        ("/generate", {"tokens": [5], "format": {"type": "json_object"}}, 501, "not_offered"),
        ("/generate", {"tokens": [5], "prompt_logprobs": 0}, 501, "prompt_logprobs_unsupported"),
        ("/generate", {"tokens": [5], "context": "x"}, 400, "bad_request"),
        ("/generate", {"tokens": [5] * 40, "max_tokens": 1900, "timeout_s": 0.3}, 504, "deadline_exceeded"),
        ("/unload", {}, 501, "not_offered"),
        ("/decode", {"tokens": [5]}, 404, "not_found"),
    ],
)
def test_errors_are_typed(path: str, body: dict[str, Any], status: int, code: str, ask: Callable[..., Any]) -> None:
    found, document = ask(path, **body, **({"ignore_eos": True} if path == "/generate" else {}))
    assert (found, document["error"]["code"]) == (status, code), document


def test_a_client_that_leaves_ends_its_request(served: Process, ask: Callable[..., Any]) -> None:
    body = json.dumps({"tokens": [5] * 40, "max_tokens": 1900, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        connection.sendall(head + body)
        received = b""
        while b'"token"' not in received:
            data = connection.recv(4096)
            assert data
            received += data
        if running := served.status()["running"]:  # a busy machine may look when all is written
            assert running == 1
    assert until(lambda: served.status()["running"] == 0, 60)
    assert ask("/generate", tokens=[5], max_tokens=1)[0] == 200


# Through the orchestrator


@pytest.fixture(scope="module")
def writer(served_folder: Path, served: Process) -> Iterator[Process]:
    node = Process("mac-1", "decode", "torch", str(served_folder), "--dtype", "float32", "--threads", "1")
    yield node.ready()
    node.end()


def test_all_three_ways_give_the_same_tokens(served: Process, writer: Process, oracle: Engine) -> None:
    prompt = prompt_of(150, seed=8)
    right = alone(oracle, prompt, ANSWER)
    methods = {"disaggregated_torch", "local", "whole_vllm"}
    wanted = {"never": {"disaggregated_torch"}, "always": {"local"}, "auto": methods}
    for local, possible in wanted.items():
        with DisaggregatedClient(config_of(served, writer, local=local)) as client:
            tokens, metrics = answered(client, prompt, ANSWER)
        assert tokens == right
        assert metrics["method"] in possible
        if local == "never":
            assert metrics["prompt_tokens_recomputed"] == 0


def test_without_a_decode_node_vllm_serves_whole_answers(served: Process, writer: Process, oracle: Engine) -> None:
    prompt = prompt_of(100, seed=9)
    config = config_of(served, writer)
    config["decode_servers"][0]["port"] = 1  # nothing is there
    with DisaggregatedClient(config) as client:
        tokens, metrics = answered(client, prompt, ANSWER)
        assert tokens == alone(oracle, prompt, ANSWER)
        assert metrics["method"] == "whole_vllm"
        assert metrics["warning"] == "no decode node: spark-1 wrote the answer alone"
        assert metrics["prefill_node"] == metrics["decode_node"] == "spark-1"
        assert client.health()["verdict"] == "decode down: prefill nodes write the answers"
        pieces = [piece for piece in client.stream(**ask_of(prompt, ANSWER)) if piece]
        assert pieces
