"""An Ollama that is silent, gone, without its model, or no Ollama at all; and clients that leave."""

import http.client
import json
import socket
import threading
from typing import Any

import pytest

from disaggregated_inference.ollama_node.client import OllamaClient
from tests.support.recorded_ollama import LONG_S, Front, RecordedOllama, text_of
from tests.support.waiting import until


def test_a_client_that_leaves_has_ollama_stop(front: Front, ollama: RecordedOllama) -> None:
    for streamed in (True, False):
        ollama.hold.clear()
        ollama.held_after, ollama.holding = 1 if streamed else 0, threading.Event()
        connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=LONG_S)
        connection.request("POST", "/generate", json.dumps({"prompt": "x", "stream": streamed}))
        if streamed:
            connection.getresponse().readline()
        assert ollama.holding.wait(LONG_S)
        connection.sock.close() if connection.sock else None
        connection.close()
        assert ollama.left.wait(LONG_S)
        assert until(lambda: front.node.open_requests == 0, LONG_S)
        ollama.hold.set()
    assert front.ask("/generate", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_what_takes_too_long_is_given_up(front: Front, ollama: RecordedOllama) -> None:
    ollama.hold.clear()
    status, answer = front.ask("/generate", {"prompt": "x", "timeout_s": 0.2})
    assert status == 504
    assert answer["error"]["code"] == "deadline_exceeded"
    assert ollama.left.wait(LONG_S)
    status, answer = front.ask("/prefill", {"prompt": "x", "timeout_s": 0.2})
    assert status == 504


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ("runner", 502, "engine_failed"),
        ("busy", 503, "node_busy"),
        ("schema", 400, "bad_request"),
        ("proxy", 502, "engine_failed"),
        ("die", 502, "engine_failed"),
        ("cut", 502, "engine_failed"),
        ("load", 502, "engine_failed"),
        ("unload", 502, "engine_failed"),
    ],
)
def test_its_failures_are_typed(front: Front, ollama: RecordedOllama, fault: str, status: int, code: str) -> None:
    ollama.fault, ollama.fault_after = fault, 2
    answer = front.ask("/generate", {"prompt": "x", "max_tokens": 5})
    assert answer[0] == status
    assert answer[1]["error"]["code"] == code
    if fault in ("die", "cut"):  # in a stream, what was written comes first
        events = front.events({"prompt": "x", "max_tokens": 5})
        assert text_of(events) == " 1 2"
        assert events[-1]["error"]["code"] == code
        if fault == "cut":
            assert (
                events[-1]["error"]["message"]
                == f"Ollama at {ollama.url} closed the connection in the middle of its response"
            )
    ollama.fault = ""
    assert front.ask("/generate", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_odd_ends_are_called_what_they_are(front: Front, ollama: RecordedOllama) -> None:
    ollama.reason = None
    assert front.ask("/generate", {"prompt": "x", "max_tokens": 1})[1]["finish_reason"] == "stop"
    ollama.reason = "content_filter"
    answer = front.ask("/generate", {"prompt": "x", "max_tokens": 1})[1]["error"]
    assert (answer["code"], "wrote nothing" in answer["message"]) == ("engine_failed", False)
    assert "'content_filter'" in answer["message"]


def test_refusals_are_by_what_refuses() -> None:
    client = OllamaClient("http://box:1", "m")
    assert "ollama pull m" in str(client.refusal(404, b'{"error": "model \\"m\\" not found, try pulling it first"}'))
    assert "is not an Ollama" in str(
        client.refusal(404, b"<p>The requested URL was not found on this server, model m</p>")
    )
    assert "pull" not in str(client.refusal(404, b'{"error": "blob not found"}'))
    assert str(client.refusal(500, b'{"error": null}')) == "Ollama failed: no reason given (HTTP 500)"


def test_a_model_that_was_removed_is_missed_before_anyone_asks(front: Front, ollama: RecordedOllama) -> None:
    assert front.ask("/health")[0] == 200
    ollama.models, ollama.loaded = [], None
    assert until(lambda: front.ask("/health")[0] == 503)
    assert "ollama pull smollm2" in front.ask("/health")[1]["reason"]
    assert not ollama.asked
    ollama.models = ["smollm2"]
    assert until(lambda: front.ask("/health")[0] == 200, LONG_S)


def test_an_ollama_that_is_silent_was_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        node = Front(f"http://127.0.0.1:{silent.getsockname()[1]}")
        try:
            health = node.ask("/health")[1]
            assert health["status"] == "unhealthy"
            assert "has not answered a health check yet" in health["reason"]
            assert health["stalled_s"] > 0
        finally:
            node.end()


def test_a_missing_model_names_the_command(front: Front, ollama: RecordedOllama) -> None:
    ollama.models = []
    for path in ("/generate", "/prefill"):
        status, answer = front.ask(path, {"prompt": "x"})
        assert status == 503
        assert "run `ollama pull smollm2`" in answer["error"]["message"]
    assert until(lambda: front.ask("/health")[0] == 503, LONG_S)
    assert "ollama pull smollm2" in front.ask("/health")[1]["reason"]
    ollama.models = ["smollm2"]
    assert until(lambda: front.ask("/health")[1]["status"] == "healthy", LONG_S)


def test_an_ollama_that_is_down_is_unhealthy(down: Front) -> None:
    status, health = down.ask("/health")
    assert status == 503
    assert health["status"] == "unhealthy"
    assert "ollama serve" in health["reason"]
    assert down.ask("/model")[0] == 503
    status, answer = down.ask("/generate", {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
    server = RecordedOllama()
    node = Front(server.url)
    try:
        assert until(lambda: node.ask("/health")[1]["loaded"], LONG_S)
        server.end()
        assert until(lambda: node.ask("/health")[0] == 503, LONG_S)
    finally:
        node.end()


@pytest.mark.parametrize(
    "foreign", [(404, '{"error": {"code": "not_found"}}'), (200, "<html>"), (200, "{}")], ids=["404", "html", "empty"]
)
def test_what_is_no_ollama_is_called_so(ollama: RecordedOllama, foreign: tuple[int, str]) -> None:
    ollama.foreign = foreign
    node = Front(ollama.url)
    try:
        status, health = node.ask("/health")
        assert (status, health["status"]) == (503, "unhealthy")
        assert health["reason"].startswith(f"the server at {ollama.url} is not an Ollama (it")
        assert "{" not in health["reason"]
        assert node.ask("/generate", {"prompt": "x"})[1]["error"]["code"] == "engine_unavailable"
    finally:
        node.end()


def test_loading_shows_and_so_does_unloading(ollama: RecordedOllama) -> None:
    ollama.loading.clear()
    node = Front(ollama.url, keep_alive="30m")
    try:
        assert until(lambda: node.ask("/health")[1]["status"] == "loading", LONG_S)
        done: list[tuple[int, Any]] = []
        waiting = threading.Thread(target=lambda: done.append(node.ask("/generate", {"prompt": "x", "max_tokens": 1})))
        waiting.start()
        assert until(lambda: bool(ollama.asked), LONG_S)
        assert not done
        ollama.loading.set()
        waiting.join(LONG_S)
        assert done[0][0] == 200
        assert ollama.asked[-1]["keep_alive"] == "30m"
        assert until(lambda: node.ask("/health")[1]["status"] == "healthy", LONG_S)
        assert node.ask("/unload", {})[1]["loaded"] is False
        assert node.ask("/health")[1]["status"] == "healthy", "the next request loads it"
        assert node.ask("/load", {})[1]["loaded"] is True
    finally:
        node.end()
