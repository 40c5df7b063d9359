"""`disagg serve`: two node processes and their HTTP API, with the embedded model and real engines."""

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.http import RequestId
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node.context import PrefillContext
from disaggregated_inference.node.kv_listener import listen
from tests.support.engines import LoadTiny
from tests.support.handoff import alone, prompt_of
from tests.support.node_process import Node
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def _context(**changes: Any) -> str:
    plain = PrefillContext(ticket="t", secret="s", epoch="e", tokens=3, prompt_hash="h", addresses=(("127.0.0.1", 9),))
    return msgspec.structs.replace(plain, **changes).encode()


@pytest.fixture(scope="module")
def folder(tiny_folder: Any) -> Path:
    path: Path = tiny_folder("llama")
    return path


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[tuple[Node, Node]]:
    shared = ("--model", str(folder), "--dtype", "float32", "--prefix-memory", "0")
    prefill = Node(
        "prefill", *shared, "--engine", "torch", "--chunk", "77", "--lease", "5", "--log-level", "info", forked=False
    )
    decode = Node("decode", *shared, "--engine", "mlx", "--log-level", "info", forked=False)
    yield prefill, decode
    assert prefill.stop() == 0
    assert decode.stop() == 0


@pytest.fixture
def expected(tiny_engine: LoadTiny) -> list[int]:
    return alone(tiny_engine("mlx", "llama"), prompt_of(300), 16)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_prefill_and_decode_in_two_processes(
    wait: bool, stream: bool, pair: tuple[Node, Node], expected: list[int]
) -> None:
    prefill, decode = pair
    before = decode.ask("/status")[1]["prompt_tokens_computed"]
    status, read = prefill.ask("/prefill", {"tokens": prompt_of(300), "wait": wait})
    assert status == 200
    assert ("metrics" in read) == wait
    asked = {"context": read["context"], "max_new_tokens": 16, "stream": stream}
    if stream:
        events = decode.stream("/decode", asked)
        tokens, metrics = [event["token"] for event in events[:-1]], events[-1]["metrics"]
    else:
        _, answer = decode.ask("/decode", asked)
        tokens, metrics = answer["tokens"], answer["metrics"]
    assert tokens == expected
    assert metrics["prompt_tokens_recomputed"] == 0
    assert metrics["kv_bytes"] == 300 * 4 * 2 * 2 * 16 * 4
    assert decode.ask("/status")[1]["prompt_tokens_computed"] == before


def test_the_decode_node_alone(pair: tuple[Node, Node], expected: list[int]) -> None:
    _, decode = pair
    for path in ("/generate", "/decode"):
        _, answer = decode.ask(path, {"tokens": prompt_of(300), "max_new_tokens": 16})
        assert answer["tokens"] == expected
        assert answer["metrics"]["prompt_tokens_recomputed"] == 300


def test_text_and_chat_are_prompts_too(pair: tuple[Node, Node], folder: Path) -> None:
    prefill, _ = pair
    model = ModelFiles("tiny", folder)
    chat = [{"role": "user", "content": "hello"}]
    for body, tokens in (
        ({"prompt": "hello"}, model.tokenizer.encode("hello")),
        ({"messages": chat}, model.tokenizer.encode_chat(chat)),
    ):
        assert prefill.ask("/prefill", body)[1]["prompt_tokens"] == len(tokens)


def test_a_context_is_valid_once_and_expires(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    context = prefill.ask("/prefill", {"tokens": prompt_of(50)})[1]["context"]
    assert decode.ask("/decode", {"context": context, "max_new_tokens": 2})[0] == 200
    status, answer = decode.ask("/decode", {"context": context, "max_new_tokens": 2})
    assert (status, answer["error"]["code"]) == (502, "peer_failed")
    late = prefill.ask("/prefill", {"tokens": prompt_of(50)})[1]["context"]
    assert until(lambda: prefill.ask("/status")[1]["tickets"] == 0)
    assert decode.ask("/decode", {"context": late, "max_new_tokens": 2})[0] == 502
    assert prefill.ask("/status")[1]["tickets"] == 0


def test_inline_kv(pair: tuple[Node, Node], expected: list[int]) -> None:
    """KV as base64 in the request: HTTP alone, for small experiments."""
    prefill, decode = pair
    read = prefill.ask("/prefill", {"tokens": prompt_of(300), "inline": True})[1]
    assert read["input_ids"] == prompt_of(300)
    status, answer = decode.ask("/decode", {"kv_cache": read["kv_cache"], "max_new_tokens": 16})
    assert (status, answer["tokens"]) == (200, expected)
    assert answer["metrics"]["prompt_tokens_recomputed"] == 0
    assert decode.ask("/decode", {"context": read["context"], "max_new_tokens": 16})[1]["tokens"] == expected
    for kv_cache, says in (
        ("!", "not base64"),
        ("", "truncated"),
        (read["kv_cache"][:4000], "truncated"),
        (base64.b64encode(base64.b64decode(read["kv_cache"]) + b"more").decode(), "bytes after its END"),
        (read["kv_cache"][:40000] + "AAAA" + read["kv_cache"][40004:], "damaged"),
    ):
        status, answer = decode.ask("/decode", {"kv_cache": kv_cache, "max_new_tokens": 2})
        assert (status, says in answer["error"]["message"]) == (400, True), answer
    both = {"kv_cache": read["kv_cache"], "context": read["context"]}
    assert decode.ask("/decode", both)[0] == 400
    assert prefill.ask("/prefill", {"tokens": [5], "inline": True, "wait": False})[0] == 400


def test_requests_have_ids(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    context = prefill.ask("/prefill", {"tokens": prompt_of(50)})[1]["context"]
    body = json.dumps({"context": context, "max_new_tokens": 2}).encode()
    request = urllib.request.Request(decode.url + "/decode", body, {"X-Request-Id": "my-request:7"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers["X-Request-Id"] == "my-request:7"
    request = urllib.request.Request(decode.url + "/health", headers={"X-Request-Id": "no good" * 50})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert len(response.headers["X-Request-Id"]) == 16
    lines = [line for line in decode.logged() if line.get("request_id") == "my-request:7"]
    assert [line["message"] for line in lines][-1:] == ["generation done"]
    assert lines[-1]["prompt_tokens"] == 50
    assert any(line["message"] == "prefill done" and line["ticket"] for line in prefill.logged())


def test_the_status_names_paths_and_peers(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    context = prefill.ask("/prefill", {"tokens": prompt_of(50)})[1]["context"]
    assert decode.ask("/decode", {"context": context, "max_new_tokens": 2})[0] == 200
    status = decode.ask("/status")[1]
    assert status["peers"][0]["epoch"] == prefill.ask("/health")[1]["epoch"]
    assert status["paths"][0]["goodput_bytes_s"] > 0
    assert [f"{path['host']}:{path['port']}" for path in status["paths"]] == prefill.ask("/status")[1]["kv_addresses"]


def test_a_disconnect_cancels_without_a_stream(pair: tuple[Node, Node]) -> None:
    """On both nodes: after a disconnect, prefill and decode stop."""
    prefill, decode = pair
    for node, path, counter, most in (
        (decode, "/generate", "tokens_written", 3000),
        (prefill, "/prefill", "prompt_tokens_computed", 4000),
    ):
        before = node.ask("/status")[1][counter]
        asked = json.dumps({"tokens": prompt_of(4000 if node is prefill else 20), "max_new_tokens": 3000}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(asked)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", node.ready["port"])) as sock:
            sock.sendall(head + asked)
            assert until(lambda: node.ask("/status")[1][counter] > before)  # noqa: B023  it is running
        assert until(lambda: node.ask("/status")[1]["waiting"] == 0)  # noqa: B023
        assert node.ask("/status")[1][counter] - before < most
    assert until(lambda: prefill.ask("/status")[1]["tickets"] == 0)


def test_many_disconnects(pair: tuple[Node, Node]) -> None:
    _, decode = pair
    asked = json.dumps({"tokens": prompt_of(20), "max_new_tokens": 3000}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(asked)}\r\n\r\n".encode()
    clients = [socket.create_connection(("127.0.0.1", decode.ready["port"])) for _ in range(16)]
    for sock in clients:
        sock.sendall(head + asked)
    assert until(lambda: decode.ask("/status")[1]["waiting"] == 16)
    for sock in clients:
        sock.close()
    assert until(lambda: decode.ask("/status")[1]["waiting"] == 0)


def test_streamed_and_whole_texts_are_the_same(pair: tuple[Node, Node]) -> None:
    """The tiny model generates random bytes; half of its completions end inside a character."""
    _, decode = pair
    for length in range(20, 26):
        asked = {"tokens": prompt_of(length), "max_new_tokens": 12}
        whole = decode.ask("/generate", asked)[1]["generated_text"]
        events = decode.stream("/generate", asked | {"stream": True})
        assert "".join(event.get("text", "") for event in events) == whole


def test_a_stop_in_the_middle_of_an_answer(folder: Path) -> None:
    """Three seconds for running requests; then an error for the rest, and exit code 0."""
    node = Node("decode", "--model", str(folder), "--dtype", "float32", "--engine", "torch", "--drain", "3")
    answers: list[tuple[int, Any]] = []
    asked = {"tokens": [5, 6], "max_new_tokens": 4000}

    def ask() -> None:
        answers.append(node.ask("/generate", asked))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert until(lambda: node.ask("/status")[1]["waiting"] == 3)
    started = time.monotonic()
    assert node.stop() == 0
    assert time.monotonic() - started < 14
    for thread in threads:
        thread.join()
    assert {status for status, _ in answers} <= {200, 503}, answers


def test_a_port_in_use_is_reported_at_once(pair: tuple[Node, Node]) -> None:
    port = str(pair[0].ready["port"])
    command = [sys.executable, "-m", "disaggregated_inference", "serve", "--role", "decode", "--port", port]
    started = time.monotonic()
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in run.stderr
    assert time.monotonic() - started < 20


def test_wildcard_addresses_are_replaced_in_contexts(folder: Path, pair: tuple[Node, Node]) -> None:
    undeclared = "--insecure", "--trusted-link", "a test on one machine"
    everywhere = Node("prefill", "--model", str(folder), "--dtype", "float32", "--host", "0.0.0.0", *undeclared)
    context = everywhere.ask("/prefill", {"tokens": [5, 6, 7]})[1]["context"]
    assert pair[1].ask("/decode", {"context": context, "max_new_tokens": 2})[0] == 200
    assert PrefillContext.decode(context).addresses == (("127.0.0.1", everywhere.ready["kv_port"]),)
    assert everywhere.stop() == 0


@pytest.mark.parametrize(("kv_address", "warned"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_kv_addresses_that_other_machines_cannot_reach(kv_address: str, warned: bool) -> None:
    """The wrong interface shows at the start, not as a fallback of every request."""
    undeclared = ("--insecure", "--trusted-link", "a test on one machine", "--engine", "simulated")
    node = Node("prefill", "--model", "simulated:tiny", "--host", "0.0.0.0", "--kv-address", kv_address, *undeclared)
    said = [line["message"] for line in node.logged() if "but not its KV at" in line["message"]]
    assert node.stop() == 0
    assert len(said) == warned
    assert not warned or "at 0.0.0.0, but not its KV at 127.0.0.1: give --kv-address an address of the link" in said[0]


def bindable(host: str) -> bool:
    """Not every machine has IPv6, or more than one loopback address."""
    try:
        listen((host, 0)).close()
    except BadRequest:
        return False
    return True


def test_several_kv_addresses_in_order(folder: Path, pair: tuple[Node, Node]) -> None:
    hosts = [host for host in ("127.0.0.2", "127.0.0.1", "::1") if bindable(host)]
    addresses = [f"--kv-address=[{host}]:0" if ":" in host else f"--kv-address={host}" for host in hosts]
    node = Node("prefill", "--model", str(folder), "--dtype", "float32", *addresses)
    context = node.ask("/prefill", {"tokens": [5, 6, 7]})[1]["context"]
    assert [host for host, _ in PrefillContext.decode(context).addresses] == hosts
    status, answer = pair[1].ask("/decode", {"context": context, "max_new_tokens": 2})
    assert (status, answer["metrics"]["kv_paths"]) == (200, [node.ready["kv_addresses"][0]])
    assert node.stop() == 0


@pytest.mark.parametrize(("path", "method", "status"), [("/nowhere", "GET", 404), ("/prefill", "GET", 405)])
def test_wrong_paths_answer_in_json(path: str, method: str, status: int, pair: tuple[Node, Node]) -> None:
    got, answer = pair[0].ask(path, method=method)
    assert (got, path in answer["error"]["message"]) == (status, True)


def test_cancel_by_request(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    read = prefill.ask("/prefill", {"tokens": prompt_of(50), "ticket": "mine"})[1]
    assert prefill.ask("/prefill", {"tokens": [5], "ticket": "mine"})[0] == 403
    assert prefill.ask("/prefill/mine", method="DELETE") == (200, {"cancelled": True})
    status, answer = prefill.ask("/prefill/mine", method="DELETE")
    assert (status, answer["error"]["code"]) == (404, "ticket_not_found")
    assert decode.ask("/decode", {"context": read["context"], "max_new_tokens": 2})[0] == 502


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/prefill", b"{", 400, "truncated"),
        ("/prefill", {"tokens": "x"}, 400, "Expected `array"),
        ("/prefill", {}, 400, "exactly one of"),
        ("/prefill", {"prompt": "a", "tokens": [1]}, 400, "exactly one of"),
        ("/prefill", {"tokens": []}, 400, "empty"),
        ("/prefill", {"prompt": ""}, 400, "empty"),
        ("/prefill", {"tokens": [512], "wait": False}, 400, "not in the vocabulary of 512"),
        ("/prefill", {"prompt": "hello " * 2_000_000}, 400, "do not fit the context window of 4096"),
        ("/prefill", {"messages": [{"role": "user", "content": 5}]}, 400, "a role and a content"),
        ("/prefill", {"messages": [{"content": "x"}]}, 400, "a role and a content"),
        ("/prefill", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text only"),
        ("/prefill", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "text only"),
        ("/prefill", {"tokens": [5], "ticket": "a/b"}, 400, "a ticket id"),
        ("/prefill", b'{"prompt": "\xff"}', 400, "is not JSON"),
        ("/prefill", b'{"x": ' + b"[" * 100_000, 400, "is not JSON"),
        ("/prefill", {"tokens": [5] * 4097}, 400, "4097 tokens do not fit the context window of 4096"),
        ("/prefill", {"tokens": [512]}, 400, "not in the vocabulary of 512"),
    ],
)
def test_bad_requests_to_prefill(path: str, body: Any, status: int, says: str, pair: tuple[Node, Node]) -> None:
    got, answer = pair[0].ask(path, body)
    assert (got, says in answer["error"]["message"]) == (status, True), answer
    assert pair[0].ask("/prefill", {"tokens": [5, 6]})[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"context": _context(), "tokens": [-1], "max_tokens": 2}, 400, "vocabulary"),
        ({"context": _context(), "tokens": [5], "max_tokens": 2}, 400, "not the prompt of this context"),
        ({"context": "nonsense", "max_new_tokens": 2}, 403, "not a context of a prefill node"),
        ({"tokens": [5], "max_new_tokens": 0}, 400, "at least 1"),
        ({"tokens": [5], "temperature": -1}, 400, "temperature must be at least 0"),
        ({"tokens": [5], "n": 17}, 400, "n must be at most 16"),
        ({"tokens": [5], "max_tokens": 2, "max_new_tokens": 3}, 400, "give one of them"),
        ({"tokens": [5], "stop": [""]}, 400, "must have a length of at least 1"),
        ({"tokens": [5], "logit_bias": {"512": 1}}, 400, "logit_bias"),
        ({"tokens": [5], "timeout_s": 0}, 400, "timeout_s"),
        ({"tokens": [5], "format": {"type": "regex"}}, 400, "needs the field pattern"),
        ({"tokens": [5], "format": {"type": "regex", "pattern": "("}}, 400, "format"),
        ({"tokens": [5], "format": {"type": "poem"}}, 400, "poem"),
        ({"tokens": [5], "written": [3]}, 400, "end with the tokens in written"),
        ({"tokens": [5], "max_new_tokens": 9000}, 400, "context window of 4096"),
        ({"tokens": [-1], "max_new_tokens": 2}, 400, "vocabulary"),
        ({"tokens": [], "max_new_tokens": 2}, 400, "empty"),
        ({"kv_cache": "é"}, 400, "not base64"),
        ({"context": _context(addresses=(("x" * 300, 1),))}, 403, "not a context"),
        ({"context": _context(addresses=(("127.0.0.1", 99999),))}, 403, "not a context"),
        ({"context": _context(addresses=(("a..b", 9),))}, 403, "leads beyond this machine"),
        ({"context": _context(addresses=(("127.0.0.1", 9),))}, 503, "127.0.0.1:9 does not answer"),
    ],
)
def test_bad_requests_to_decode(body: Any, status: int, says: str, pair: tuple[Node, Node]) -> None:
    got, answer = pair[1].ask("/decode", body)
    assert (got, says in answer["error"]["message"]) == (status, True), answer
    assert pair[1].ask("/generate", {"tokens": [5, 6], "max_new_tokens": 2})[0] == 200


def test_requests_at_the_same_time(pair: tuple[Node, Node], expected: list[int]) -> None:
    prefill, decode = pair
    answers: list[list[int]] = []

    def one() -> None:
        context = prefill.ask("/prefill", {"tokens": prompt_of(300), "wait": False})[1]["context"]
        answers.append(decode.ask("/decode", {"context": context, "max_new_tokens": 16})[1]["tokens"])

    threads = [threading.Thread(target=one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [expected] * 6


def test_a_disconnect_cancels_a_stream(pair: tuple[Node, Node]) -> None:
    _, decode = pair
    before = decode.ask("/status")[1]["tokens_written"]
    asked = {"tokens": prompt_of(20), "max_new_tokens": 3000, "stream": True, "ignore_eos": True}
    with urllib.request.urlopen(decode.url + "/generate", json.dumps(asked).encode(), timeout=60) as response:
        assert response.readline().startswith(b"data: ")
    assert until(lambda: decode.ask("/status")[1]["waiting"] == 0)
    assert decode.ask("/status")[1]["tokens_written"] - before < 2900


def test_the_prefill_process_is_killed(folder: Path, pair: tuple[Node, Node]) -> None:
    """Killed while it holds KV: the decode node answers with an error in time and stays usable."""
    doomed = Node("prefill", "--model", str(folder), "--dtype", "float32")
    context = doomed.ask("/prefill", {"tokens": prompt_of(100)})[1]["context"]
    doomed.process.kill()
    doomed.process.wait()
    started = time.monotonic()
    status, answer = pair[1].ask("/decode", {"context": context, "max_new_tokens": 2})
    assert (status, answer["error"]["code"]) == (503, "peer_gone")
    assert time.monotonic() - started < 60  # it may take three minutes
    assert pair[1].ask("/generate", {"tokens": [5], "max_new_tokens": 2})[0] == 200
    doomed.stop()


def test_the_token_protects_everything_but_health(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("geheim\n")
    node = Node("decode", "--model", str(folder), "--dtype", "float32", "--token-file", str(tmp_path / "token"))
    assert node.ask("/health")[1]["status"] == "healthy"
    for token in ("", "falsch"):
        assert node.ask("/generate", {"tokens": [5], "max_new_tokens": 2}, token=token)[0] == 401
    assert node.ask("/generate", {"tokens": [5], "max_new_tokens": 2}, token="geheim")[0] == 200
    request = urllib.request.Request(node.url + "/status", headers={"Authorization": "bearer geheim"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 200
    assert node.stop() == 0


def test_a_token_on_the_command_line_is_refused() -> None:
    """Every user of the machine could read it in the process list."""
    command = [sys.executable, "-m", "disaggregated_inference", "serve", "--role", "decode", "--token", "geheim"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert "set DISAGG_TOKEN or give --token-file FILE" in run.stderr
    assert "geheim" not in run.stderr


def test_a_public_address_needs_an_identity_or_words_and_a_token() -> None:
    command = [sys.executable, "-m", "disaggregated_inference", "serve", "--role", "decode", "--host", "0.0.0.0"]
    run = subprocess.run([*command, "--trusted-link", "a cable"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "refusing to listen on 0.0.0.0 without a token" in run.stderr
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"DISAGG_TOKEN": "geheim"})
    assert run.returncode == 1
    assert "refusing to listen on 0.0.0.0 without an identity: make one with `disagg cluster keys init`" in run.stderr


def test_an_internal_error_keeps_its_request_id() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError("ours")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/x", "headers": [(b"x-request-id", b"mine")]}
    asyncio.run(RequestId(broken)(scope, None, send))  # type: ignore[arg-type]
    assert (sent[0]["status"], dict(sent[0]["headers"])[b"x-request-id"]) == (500, b"mine")
    assert json.loads(sent[1]["body"])["error"] == {"code": "internal_error", "message": "ours"}
