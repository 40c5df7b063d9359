"""What a node's HTTP does before an answer is begun: bodies that do not come, grammars that take long, refusals."""

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disaggregated_inference.api import DecodeMetrics, GenerationParams, OutputFormat
from disaggregated_inference.engines import Engine
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node.choice import Choice
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.generation import Generation
from disaggregated_inference.node.node import Node
from disaggregated_inference.node.routes import node_app
from disaggregated_inference.node.structured_output import GrammarCompiler
from disaggregated_inference.timeouts import HttpTimeouts
from tests.support.choice_text import written
from tests.support.node_pair import Pair
from tests.support.recorded_ollama import Front, OnThread
from tests.support.waiting import until

SLOW = {"type": "regex", "pattern": "a{3}"}


@pytest.fixture
def writer(nodes: Callable[..., Pair]) -> DecodeNode:
    return nodes()[1]


@pytest.fixture
def served(writer: DecodeNode, tiny_folder: Callable[[str], Path]) -> Iterator[OnThread]:
    app = OnThread(node_app(Node(ModelFiles("llama", tiny_folder("llama")), writer.kv_memory, None, writer), None))
    yield app
    app.end()


def ended(served: OnThread) -> dict[str, float]:
    """Requests by outcome, as Prometheus is told."""
    with socket.create_connection(("127.0.0.1", served.port)) as sock:
        sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = b"".join(iter(lambda: sock.recv(1 << 16), b"")).decode()
    lines = [line for line in text.splitlines() if line.startswith("disagg_requests_total{")]
    return {line.split('outcome="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


def begun(served: OnThread, body: bytes, announced: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", served.port))
    sock.sendall(f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {announced}\r\n\r\n".encode() + body)
    return sock


@pytest.fixture
def impatient(
    request: pytest.FixtureRequest, writer: DecodeNode, tiny_folder: Callable[[str], Path]
) -> Iterator[OnThread]:
    """Nodes of both kinds that wait 0.2 s for a request."""
    timeouts = HttpTimeouts(read_s=0.2)
    if request.param == "engine":
        node = Node(ModelFiles("llama", tiny_folder("llama")), writer.kv_memory, None, writer)
        server = OnThread(node_app(node, None), timeouts)
    else:
        server = Front("http://127.0.0.1:1", http=timeouts)
    yield server
    server.end()


@pytest.mark.parametrize("impatient", ["engine", "ollama"], indirect=True)
def test_a_head_that_does_not_arrive(impatient: OnThread) -> None:
    """Half-sent heads must not hold connections for ever: a thousand of them would shut the node off."""
    with socket.create_connection(("127.0.0.1", impatient.port)) as silent:
        silent.settimeout(20)
        with socket.create_connection(("127.0.0.1", impatient.port)) as sock:
            sock.settimeout(20)
            sock.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
            head, _, body = b"".join(iter(lambda: sock.recv(1 << 16), b"")).partition(b"\r\n\r\n")
        assert silent.recv(1) == b""
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == "request_too_slow"


@pytest.mark.parametrize("impatient", ["engine", "ollama"], indirect=True)
def test_a_body_that_does_not_arrive(impatient: OnThread) -> None:
    with begun(impatient, b"{", 1000) as sock:
        sock.settimeout(20)
        head, _, body = b"".join(iter(lambda: sock.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["code"] == "request_too_slow"
    assert ended(impatient) == {"request_too_slow": 1}


def test_who_leaves_in_the_middle_of_a_body_is_no_fault(served: OnThread, caplog: pytest.LogCaptureFixture) -> None:
    begun(served, b"{", 1000).close()
    assert until(lambda: "cancelled" in ended(served))
    assert all(record.levelno < logging.ERROR for record in caplog.records)


class SlowGrammars:
    """Every grammar waits until the test says so."""

    def __init__(self, grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.waiting, self._first_state = threading.Event(), threading.Event(), grammars.first_state
        monkeypatch.setattr(grammars, "first_state", self._slowly)

    def _slowly(self, grammar: str) -> Any:
        self.waiting.set()
        assert self.go.wait(30)
        return self._first_state(grammar)


@pytest.fixture
def slow(writer: DecodeNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowGrammars]:
    grammars = SlowGrammars(writer.grammars, monkeypatch)
    yield grammars
    grammars.go.set()


def test_a_grammar_has_no_more_time_than_its_request(served: OnThread, slow: SlowGrammars) -> None:
    status, answer = served.ask("/generate", {"tokens": [5], "format": SLOW, "timeout_s": 0.2})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert ended(served) == {"deadline_exceeded": 1}


def test_who_leaves_does_not_wait_for_a_grammar(served: OnThread, slow: SlowGrammars, writer: DecodeNode) -> None:
    asked = json.dumps({"tokens": [5], "format": SLOW}).encode()
    with begun(served, asked, len(asked)):
        assert slow.waiting.wait(20)
    assert until(lambda: ended(served) == {"cancelled": 1})
    assert not any(compilation.waiting for compilation in writer.grammars.compiling.values())


def test_other_requests_do_not_wait_for_a_grammar(served: OnThread, slow: SlowGrammars, writer: DecodeNode) -> None:
    answers: list[Any] = []

    def ask(number: int) -> None:
        form = {"type": "regex", "pattern": f"a{{{number // 2 + 3}}}"}
        answers.append(served.ask("/generate", {"tokens": [5], "max_tokens": 20, "format": form, "timeout_s": 60}))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    assert slow.waiting.wait(20)
    assert until(lambda: sum(len(each.waiting) for each in list(writer.grammars.compiling.values())) == 8)
    begun_at = time.perf_counter()
    assert served.ask("/generate", {"tokens": [5], "max_tokens": 2, "timeout_s": 20})[0] == 200
    waited = time.perf_counter() - begun_at
    slow.go.set()
    for thread in threads:
        thread.join(30)
    assert {status for status, _ in answers} == {200}
    assert all(answer["metrics"]["total_time"] > waited for _, answer in answers), "it counts from the beginning"
    assert all(answer["metrics"]["admission_time"] < answer["metrics"]["total_time"] for _, answer in answers)


def test_refusals_are_counted_once(served: OnThread, writer: DecodeNode) -> None:
    wrong: list[dict[str, Any]] = [
        {"tokens": []},
        {"tokens": [5], "n": 99},
        {"tokens": [5], "format": {"type": "regex"}},
    ]
    for body in wrong:
        assert served.ask("/generate", body)[0] == 400
    assert served.ask("/generate", {"tokens": [5], "max_tokens": 9000})[0] == 400
    assert served.ask("/generate", {"tokens": [5], "max_tokens": 3000, "timeout_s": 0.01})[0] == 504
    assert served.ask("/nothing")[0] == 404
    writer.kv_memory.draining = True
    assert served.ask("/generate", {"tokens": [5]})[0] == 503
    assert ended(served) == {"bad_request": 3, "context_too_long": 1, "deadline_exceeded": 1, "node_draining": 1}


def test_null_is_as_if_it_were_not_there(served: OnThread) -> None:
    asked = {"tokens": [5, 6], "max_tokens": 3}
    nulls = asked | {"stop": None, "logit_bias": None, "seed": None, "logprobs": None, "format": None}
    assert served.ask("/generate", nulls)[1]["tokens"] == served.ask("/generate", asked)[1]["tokens"]


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens"])
def test_a_refusal_names_the_field_that_was_sent(served: OnThread, name: str) -> None:
    status, answer = served.ask("/generate", {"tokens": [5], name: 0})
    assert (status, answer["error"]["message"]) == (400, f"{name} must be at least 1")


def test_a_stop_string_that_straddles_min_tokens(smollm2: ModelFiles) -> None:
    text = "1. 1\n2. "
    tokens = smollm2.tokenizer.encode(text)
    for least in range(len(tokens) + 1):
        rules = GenerationParams(stop=("1\n",), min_tokens=least, max_tokens=len(tokens))
        ends = len(smollm2.tokenizer.encode("1. 1\n"))
        assert written(smollm2, tokens, rules) == (("1. ", "stop") if least <= ends else (text, "length"))


def test_the_last_character_may_be_the_one_for_no_character(smollm2: ModelFiles) -> None:
    tokens = smollm2.tokenizer.encode("so \ufffd\ufffd")
    assert written(smollm2, tokens, GenerationParams(max_tokens=len(tokens))) == ("so \ufffd\ufffd", "length")
    ended = [*tokens, smollm2.spec.eos_tokens[0]]
    assert written(smollm2, ended, GenerationParams()) == ("so \ufffd\ufffd", "stop")
    half = smollm2.tokenizer.encode("so 你")[:-1]
    assert written(smollm2, half, GenerationParams(max_tokens=len(half))) == ("so ", "length")


def test_an_end_token_ends_what_is_complete(smollm2: ModelFiles) -> None:
    end, rules = smollm2.spec.eos_tokens[0], GenerationParams(format=OutputFormat(type="regex", pattern="ab?"))
    assert written(smollm2, [*smollm2.tokenizer.encode("a"), end], rules) == ("a", "stop")
    with pytest.raises(BadRequest, match="does not fit"):
        written(smollm2, [end], rules)


@pytest.mark.parametrize("form", [{"type": "choice", "choices": ("yes",)}, {"type": "regex", "pattern": "yes?"}])
def test_what_was_written_elsewhere_may_be_complete(smollm2: ModelFiles, form: dict[str, Any]) -> None:
    """Nothing but the end is left to write, and nothing is told twice."""
    end, yes = smollm2.spec.eos_tokens[0], smollm2.tokenizer.encode("yes")
    rules = GenerationParams(
        format=OutputFormat(**form), written=(*yes, end) if form["type"] == "regex" else tuple(yes)
    )
    answer = Generation(rules, DecodeMetrics(1))
    grammars = GrammarCompiler(smollm2.tokenizer, smollm2.spec.vocabulary, smollm2.spec.eos_tokens)
    assert rules.format
    choice = Choice(answer, 0, [1], smollm2.tokenizer, smollm2.spec.eos_tokens, grammars.start(rules.format))
    choice.sample(np.zeros(smollm2.spec.vocabulary, np.float32))
    assert (choice.error, choice.finish_reason) == (None, "stop")
    answer.put(None)
    assert [(piece.text, piece.finish_reason) for piece in answer.events()] == [("", "stop")]


def slow_load(writer: DecodeNode, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From now on, loading takes until the event is set, or a few seconds."""
    go, load = threading.Event(), writer.scheduler._load

    def slowly() -> Engine:
        go.wait(30)
        return load()

    monkeypatch.setattr(writer.scheduler, "_load", slowly)
    return go


def test_a_request_that_waits_for_a_load_takes_no_thread(
    served: OnThread, writer: DecodeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, answers = slow_load(writer, monkeypatch), list[int]()
    assert served.ask("/unload", {})[0] == 200
    threads = [threading.Thread(target=lambda: answers.append(served.ask("/load", {})[0])) for _ in range(40)]
    for thread in threads:
        thread.start()
    assert until(lambda: writer.scheduler.loading and len(writer.scheduler._calls) > 38)
    begun_at = time.perf_counter()
    assert served.ask("/model")[0] == 200
    assert time.perf_counter() - begun_at < 10
    go.set()
    for thread in threads:
        thread.join(30)
    assert answers == [200] * 40


def test_a_load_is_told_at_once(served: OnThread, writer: DecodeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """That its time is over, in line or not. The memory may wait."""
    go = slow_load(writer, monkeypatch)
    assert served.ask("/unload", {})[0] == 200
    begun_at = time.perf_counter()
    status, answer = served.ask("/generate", {"tokens": [5], "timeout_s": 0.3})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    asked = json.dumps({"tokens": [5]}).encode()
    with begun(served, asked, len(asked)):
        assert until(lambda: writer.open_requests == 2)
    admission = writer.kv_memory.admission
    rest = admission.request(admission.limit_bytes - admission.held_bytes, 1, lambda claim: None, lambda error: None, 0)
    status, answer = served.ask("/generate", {"tokens": [5], "queue_s": 0.3})
    assert (status, answer["error"]["code"]) == (503, "kv_memory_full")
    told = {"deadline_exceeded": 1, "cancelled": 1, "kv_memory_full": 1}
    assert until(lambda: ended(served) == told)
    assert time.perf_counter() - begun_at < 20
    assert writer.scheduler.loading
    go.set()
    admission.release(rest)
    assert until(lambda: writer.open_requests == writer.kv_memory.held_slots == writer.kv_memory.sequences == 0)
    assert served.ask("/generate", {"tokens": [5], "max_tokens": 2})[0] == 200
    assert {code: count for code, count in ended(served).items() if code in told} == told, "each is counted once"


def test_a_node_that_was_started_again_is_another_one(served: OnThread, writer: DecodeNode) -> None:
    """A request that names its epoch means that run: it may hold another model now."""

    def asked(epoch: str) -> int:
        body = json.dumps({"tokens": [5, 6], "max_tokens": 1})
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
        connection.request("POST", "/generate", body, {"X-Node-Epoch": epoch} if epoch else {})
        status = connection.getresponse().status
        connection.close()
        return status

    assert [asked(epoch) for epoch in ("", writer.epoch, "another")] == [200, 200, 409]
