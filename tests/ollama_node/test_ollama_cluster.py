"""Clusters of Ollamas alone: whole requests, failover by text. With other engines: test_mixed_cluster.py."""

import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from disaggregated_client import DisaggregatedClient
from disaggregated_inference.api import GenerateRequest, Role
from disaggregated_inference.errors import BadRequest, ClusterError, DisaggError, PromptLogprobsUnsupported
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node.node import Node
from disaggregated_inference.node.routes import node_app
from disaggregated_inference.orchestrator.text_continuation import CONTINUED_WARNING, estimated_tokens
from tests.support.gateway import served
from tests.support.lying_node import LyingNode
from tests.support.node_pair import Pair
from tests.support.recorded_ollama import LONG_S, Front, OnThread, RecordedOllama
from tests.support.waiting import until

ROLES: dict[str, Role] = {"p": "prefill", "a": "decode", "b": "decode"}


class Farm:
    """Three Ollamas with a node each: one to read prompts, as people configure it, and two to write."""

    def __init__(self, *capabilities: str) -> None:
        self.ollamas = {name: RecordedOllama() for name in ROLES}
        for ollama in self.ollamas.values() if capabilities else ():
            ollama.shown = ollama.shown | {"capabilities": list(capabilities)}
        self.nodes = {name: Front(self.ollamas[name].url, role=role) for name, role in ROLES.items()}
        self.config: dict[str, Any] = {
            "prefill_servers": [self._entry("p")],
            "decode_servers": [self._entry("a"), self._entry("b")],
            "policies": {"local": "never", "poll_s": 0.2},
        }

    def _entry(self, name: str) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": self.nodes[name].port, "name": name, "model": "smollm2"}

    def fail_once(self, fault: str, after: int = 0) -> None:
        """The one that is asked first."""
        for ollama in self.ollamas.values():
            ollama.fault, ollama.fault_after, ollama.on_fault = fault, after, self._failed

    def _failed(self) -> None:
        for ollama in self.ollamas.values():
            ollama.fault = ""

    def asked(self) -> dict[str, int]:
        return {name: len(ollama.asked) for name, ollama in self.ollamas.items()}

    def end(self) -> None:
        for node in self.nodes.values():
            node.end()
        for ollama in self.ollamas.values():
            ollama.end()


@pytest.fixture
def farm() -> Iterator[Farm]:
    farm = Farm()
    yield farm
    farm.end()


@pytest.fixture
def client(farm: Farm) -> Iterator[DisaggregatedClient]:
    with DisaggregatedClient(farm.config) as client:
        assert until(lambda: all(node["usable"] for node in client.health()["nodes"].values()), LONG_S)
        yield client


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 6}


def test_a_request_goes_whole_to_one_node(farm: Farm, client: DisaggregatedClient) -> None:
    text, metrics = client.generate(prompt="count from 3", max_tokens=4)
    assert text == " 4 5 6 7"
    where = metrics["decode_node"]
    assert farm.asked() == {"p": 0, "a": 0, "b": 0} | {where: 1}, "a prefill would have been for nothing"
    assert metrics["plan"] == f"whole on {where}: ollama cannot import KV"
    assert (metrics["method"], metrics["warning"]) == ("local", None)
    assert (metrics["prompt_tokens"], metrics["completion_tokens"], metrics["total_tokens"]) == (3, 4, 7)
    assert metrics["tokens"] is None
    assert metrics["prefill_time"] == pytest.approx(0.474583514)
    speeds = [client.generate(prompt="count from 3", max_tokens=1)[1]["prefill_speed"] for _ in range(3)]
    assert speeds[-1] == 0, "both have held it since: that is no reading"

    deltas = list(client.stream(**CHAT))
    assert [delta.text for delta in deltas[:-2]] == [" 1", " 2", " 3", " 4", " 5", " 6"]
    assert all(delta.token is None for delta in deltas)
    assert deltas[-2].finish_reason == "length"
    both = client.generate(prompt="5", n=2, max_tokens=2)[1]
    assert [choice["text"] for choice in both["choices"]] == [" 6 7", " 6 7"]
    assert both["completion_tokens"] == 4


def test_what_cannot_be_is_refused_as_the_node_says(farm: Farm, client: DisaggregatedClient) -> None:
    with pytest.raises(BadRequest, match="takes text"):
        client.generate(tokens=[1, 2, 3])
    with pytest.raises(DisaggError, match="logprobs"):
        client.generate(prompt="x", logprobs=2)
    with pytest.raises(PromptLogprobsUnsupported, match="takes text and scores no prompts; leave it out") as unable:
        client.generate(prompt="x", prompt_logprobs=2)
    assert (unable.value.status, unable.value.code) == (501, "prompt_logprobs_unsupported")
    with pytest.raises(DisaggError, match="do not fit") as error:
        client.generate(prompt="word " * 20000, max_tokens=2)
    assert error.value.code == "context_too_long"
    assert farm.asked() == {"p": 0, "a": 0, "b": 0}


def test_before_the_first_text_another_node_begins_anew(farm: Farm, client: DisaggregatedClient) -> None:
    farm.fail_once("runner")
    text, metrics = client.generate(prompt="1", max_tokens=2)
    assert (text, metrics["warning"], metrics["attempts"]) == (" 2 3", None, 2)
    assert metrics["failovers"][0]["code"] == "engine_failed"
    assert metrics["failovers"][0]["node"] != metrics["decode_node"]
    for ollama in farm.ollamas.values():
        ollama.models = []
    with pytest.raises(ClusterError):
        client.generate(prompt="1", max_tokens=2, timeout=2)  # it waits as long as it has time


@pytest.mark.parametrize("fault", ["die", "cut"])
@pytest.mark.parametrize("ask", [{"prompt": "0", "max_tokens": 6}, CHAT], ids=["prompt", "messages"])
def test_after_it_another_node_goes_on_from_the_text(
    farm: Farm, client: DisaggregatedClient, ask: dict[str, Any], fault: str
) -> None:
    farm.fail_once(fault, after=2)
    text, metrics = client.generate(**ask)
    assert text == " 1 2 3 4 5 6", "no gap and no repetition"
    assert (metrics["warning"], metrics["attempts"]) == (CONTINUED_WARNING, 2)
    assert metrics["completion_tokens"] == 6
    assert metrics["prompt_tokens"] in (1, 2, 3)


def test_a_node_that_breaks_the_protocol_is_a_failed_leg(farm: Farm, caplog: pytest.LogCaptureFixture) -> None:
    """Each lie of such a node is in tests/orchestrator/test_stream_check.py."""
    with LyingNode(farm.nodes["a"].port) as liar:
        liar.lie = lambda events: [*events[:2], {"token": 5, "text": " 9"}, *events[2:]]
        farm.config["decode_servers"][0]["port"] = liar.port  # of equal nodes, the first
        with DisaggregatedClient(farm.config) as client, caplog.at_level(logging.WARNING):
            assert until(lambda: all(node["usable"] for node in client.health()["nodes"].values()), LONG_S)
            breaker = "closed"
            for _ in range(12):
                before = liar.lies
                text, metrics = client.generate(**CHAT)
                assert (text, metrics["decode_node"]) == (" 1 2 3 4 5 6", "b")
                failed = [(each["node"], each["code"]) for each in metrics["failovers"]]
                assert failed == [("a", "bad_answer")] * (liar.lies - before)
                breaker = next(node["breaker"] for node in client.status()["nodes"] if node["name"] == "a")
                if breaker != "closed":
                    break
    assert (breaker in ("open", "half_open"), liar.lies) == (True, 3)
    said = "a leg failed: a: its stream breaks the protocol: it sends tokens, and was asked for text"
    assert [record.getMessage() for record in caplog.records].count(said) == 3


def test_what_cannot_be_gone_on_with_fails_with_the_reason(farm: Farm, client: DisaggregatedClient) -> None:
    farm.fail_once("die", after=2)
    for ollama in farm.ollamas.values():
        ollama.continues = False
    with pytest.raises(ClusterError, match=r"unexpected EOF.*cannot continue"):
        client.generate(**CHAT)


def test_a_thought_that_was_begun_is_not_gone_on_with(farm: Farm, client: DisaggregatedClient) -> None:
    farm.fail_once("die", after=1)
    for ollama in farm.ollamas.values():
        ollama.says = [{"content": "", "thinking": "hm"}, {"content": "so"}]
    with pytest.raises(ClusterError, match="unexpected EOF"):
        client.generate(**CHAT)
    assert sum(farm.asked().values()) == 1
    assert client.generate(**CHAT)[1]["thinking"] == "hm"


def test_nodes_of_one_model_all_take_text_or_none_does(
    farm: Farm, nodes: Callable[..., Pair], tiny_folder: Callable[[str], Path]
) -> None:
    _, writer = nodes()
    odd = OnThread(node_app(Node(ModelFiles("llama", tiny_folder("llama")), writer.kv_memory, None, writer), None))
    entry = {"host": "127.0.0.1", "port": odd.port, "name": "odd", "model": "smollm2"}
    config = farm.config | {"decode_servers": [*farm.config["decode_servers"], entry]}
    try:
        with DisaggregatedClient(config) as client:
            assert until(lambda: client.health()["nodes"]["odd"]["state"] == "mismatch", LONG_S)
            assert "it takes tokens, not text only" in client.health()["nodes"]["odd"]["why"]
            assert client.generate(prompt="1", max_tokens=1)[0] == " 2"
    finally:
        odd.end()


def _ask(url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LONG_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_every_api_of_the_gateway_serves_it(farm: Farm) -> None:
    with served(farm.config) as url:
        status, body = _ask(url, "/v1/chat/completions", {"model": "smollm2"} | CHAT)
        answer = json.loads(body)
        assert answer["choices"][0]["message"]["content"] == " 1 2 3 4 5 6"
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
        assert answer["usage"]["completion_tokens"] == 6
        _, body = _ask(url, "/v1/chat/completions", {"model": "smollm2", "stream": True} | CHAT)
        chunks = [json.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == " 1 2 3 4 5 6"
        _, body = _ask(url, "/v1/completions", {"model": "smollm2", "prompt": "7", "max_tokens": 2})
        assert json.loads(body)["choices"][0]["text"] == " 8 9"
        _, body = _ask(url, "/api/chat", {"model": "smollm2", "stream": False, "options": {"num_predict": 2}} | CHAT)
        assert json.loads(body)["message"]["content"] == " 1 2"
        _, body = _ask(url, "/v1/messages", {"model": "smollm2"} | CHAT)
        assert json.loads(body)["content"][0]["text"] == " 1 2 3 4 5 6"
        status, body = _ask(url, "/v1/messages/count_tokens", {"model": "smollm2", "messages": CHAT["messages"]})
        assert status == 422
        assert b"does not export its tokenizer" in body
        _tools(farm, url)


@pytest.mark.parametrize("capabilities", [("completion",), ("completion", "vision", "insert", "tools")])
def test_the_gateway_tells_what_the_model_can(capabilities: tuple[str, ...]) -> None:
    farm = Farm(*capabilities)
    try:
        with served(farm.config) as url:
            shown = json.loads(_ask(url, "/api/show", {"model": "smollm2"})[1])
            assert shown["capabilities"] == [name for name in capabilities if name != "insert"]
            assert shown["template"] == ""
            with urllib.request.urlopen(f"{url}/api/tags", timeout=LONG_S) as response:
                tags = json.load(response)["models"]
            assert [(model["details"], model["size"]) for model in tags] == [(shown["details"], 91728202)]
            kinds = [shown["details"][name] for name in ("format", "family", "parameter_size", "quantization_level")]
            assert kinds == ["gguf", "llama", "134.52M", "Q4_1"]
            status, body = _ask(url, "/api/chat", {"model": "smollm2", "think": True} | CHAT)
            assert (status, b"does not support thinking" in body) == (400, True)
            _pictures(farm, url, "vision" in capabilities)
    finally:
        farm.end()


def _pictures(farm: Farm, url: str, sees: bool) -> None:
    picture = "aGVsbG8="
    in_url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture}}
    text = {"type": "text", "text": "What?"}
    asked = {"type": "input_text", "text": "What?"}
    shown = {"type": "input_image", "image_url": f"data:image/png;base64,{picture}", "detail": "auto"}
    for path, ask in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [text, in_url]}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [block, text]}], "max_tokens": 2}),
        ("/v1/responses", {"input": [{"role": "user", "content": [asked, shown]}]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "What?", "images": [picture]}]}),
        ("/api/generate", {"prompt": "What?", "images": [picture]}),
    ):
        for ollama in farm.ollamas.values():
            ollama.asked.clear()
        status, body = _ask(url, path, {"model": "smollm2", "stream": False} | ask)
        sent = [body["messages"] for ollama in farm.ollamas.values() for body in ollama.asked]
        assert sent == ([[{"role": "user", "content": "What?", "images": [picture]}]] if sees else [])
        assert (status, b"text only" in body) == ((200, False) if sees else (400, True))


def test_a_guess_counts_all_that_may_be_read() -> None:
    plain = {"role": "user", "content": "x"}
    call = {"function": {"name": "f", "arguments": {"x": "word " * 300}}}
    few = estimated_tokens(GenerateRequest(messages=[plain]))
    for more in ({"thinking": "word " * 300}, {"tool_calls": [call]}, {"images": ["aGk="]}):
        assert estimated_tokens(GenerateRequest(messages=[plain | more])) >= few + 500
    assert estimated_tokens(GenerateRequest(messages=[plain], template={"tools": [call]})) >= few + 500


def test_tools_and_loading_are_told_through_the_gateway(farm: Farm) -> None:
    """An answer whose length was not given leaves room for its tools, too; what it took to load is not lost."""
    for ollama in farm.ollamas.values():
        ollama.load_ns = 30_000_000_000
    tool = {"type": "function", "function": {"name": "f", "description": "word " * 4400, "parameters": {}}}
    ask = {"model": "smollm2", "stream": False, "messages": CHAT["messages"], "tools": [tool]}
    with served(farm.config) as url:
        status, body = _ask(url, "/api/chat", ask)
        assert status == 200, body
        sent = [body for ollama in farm.ollamas.values() for body in ollama.asked]
        assert 1 < sent[-1]["options"]["num_predict"] < 900
        assert json.loads(body)["load_duration"] >= 30_000_000_000
        assert json.loads(body)["prompt_eval_count"] > 4400
        tool["function"]["description"] *= 2  # type: ignore[index]
        status, body = _ask(url, "/api/chat", ask)
        assert (status, b"do not fit" in body) == (400, True)
        assert sum(ollama.dropped for ollama in farm.ollamas.values()) == 0


def _tools(farm: Farm, url: str) -> None:
    """Its own tool calls are passed on; what it cannot be made to do is refused."""
    call = {"function": {"name": "look", "arguments": {"at": 1}}}
    for ollama in farm.ollamas.values():
        ollama.says = [{"content": "", "thinking": "hm"}, {"content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    ask = {"model": "smollm2", "tools": tools} | CHAT
    choice = json.loads(_ask(url, "/v1/chat/completions", ask)[1])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at":1}'}
    sent = [body for ollama in farm.ollamas.values() for body in ollama.asked]
    assert any(body.get("tools") == tools for body in sent)
    back = [*CHAT["messages"], choice["message"], {"role": "tool", "content": "2", "tool_call_id": "x"}]
    assert _ask(url, "/v1/chat/completions", ask | {"messages": back})[0] == 200
    sent = [body for ollama in farm.ollamas.values() for body in ollama.asked if len(body.get("messages", ())) == 3]
    assert sent[0]["messages"][1]["tool_calls"][0]["function"] == call["function"]
    assert _ask(url, "/v1/chat/completions", ask | {"tool_choice": "required"})[0] == 400
