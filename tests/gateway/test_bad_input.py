"""Bad input gets an error in the API's own shape with the right status, and the gateway serves on. The tests run
`disagg gateway` as a process, over real sockets."""

import gzip
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import chain, product
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from tokenizers import Tokenizer
from tokenizers.models import BPE

from disaggregated_inference.errors import MessagesRefused
from disaggregated_inference.gateway.openapi import document
from disaggregated_inference.models import ModelTokenizer
from tests.support.cluster import Process
from tests.support.gateway import GatewayProcess, gateway_process, simulated_config, simulated_pair
from tests.support.waiting import until

MODEL = "simulated:tiny"
READ_S = 2.0  # in which a request must arrive
SOON_S = 30.0  # by then it has, however busy this machine is
DOCUMENT = document()
SCHEMAS = DOCUMENT["components"]["schemas"]

Shape = Callable[[Any], bool]


def openai_shape(body: Any) -> bool:
    return set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}


def ollama_shape(body: Any) -> bool:
    return set(body) == {"error"} and isinstance(body["error"], str)


def anthropic_shape(body: Any) -> bool:
    return set(body) == {"type", "error", "request_id"} and set(body["error"]) == {"type", "message"}


HELLO = [{"role": "user", "content": "hello"}]
SHORT: dict[str, Any] = {"model": MODEL, "max_tokens": 2}
NATIVE: dict[str, Any] = {"model": MODEL, "stream": False, "options": {"num_predict": 2}}

# A request that is answered, and the shape of errors.
APIS: dict[str, tuple[dict[str, Any], Shape]] = {
    "/v1/chat/completions": (SHORT | {"messages": HELLO}, openai_shape),
    "/v1/completions": (SHORT | {"prompt": "hello"}, openai_shape),
    "/v1/responses": ({"model": MODEL, "input": "hello", "max_output_tokens": 2}, openai_shape),
    "/api/generate": (NATIVE | {"prompt": "hello"}, ollama_shape),
    "/api/chat": (NATIVE | {"messages": HELLO}, ollama_shape),
    "/api/show": ({"model": MODEL}, ollama_shape),
    "/v1/messages": (SHORT | {"messages": HELLO}, anthropic_shape),
    "/v1/messages/count_tokens": ({"model": MODEL, "messages": HELLO}, anthropic_shape),
    "/tokenize": ({"model": MODEL, "prompt": "hello"}, openai_shape),
    "/detokenize": ({"model": MODEL, "tokens": [300]}, openai_shape),
}
ANSWERING = ("/v1/chat/completions", "/api/chat", "/v1/messages")  # one of each API


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def gateway(pair: tuple[Process, Process], tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """At the end the gateway's log has no unexpected error."""
    folder = tmp_path_factory.mktemp("gateway")
    with gateway_process(folder, simulated_config(*pair), "--read-timeout", str(READ_S)) as gateway:
        yield gateway
        assert gateway.process.poll() is None
        assert "refused" in gateway.log_text()
        assert "Traceback" not in gateway.log_text(), gateway.log_text()


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def right(client: httpx.Client) -> str:
    return greeting(client)


def greeting(client: httpx.Client) -> str:
    params = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    text: str = client.post("/v1/chat/completions", json=params).json()["choices"][0]["message"]["content"]
    return text


@pytest.fixture(autouse=True)
def _as_if_nothing_had_been(client: httpx.Client, pair: tuple[Process, Process], right: str) -> Iterator[None]:
    yield
    assert greeting(client) == right
    assert until(lambda: idle(client) and all(node.nothing_left() for node in pair), SOON_S)


def idle(client: httpx.Client) -> bool:
    status = client.get("/cluster").json()
    queues = [queue["waiting"] + queue["running"] for queue in status["queue"].values()]
    return not any(queues) and not any(node["open"] for node in status["nodes"])


def refused(answer: httpx.Response, path: str, status: int = 400) -> bool:
    return answer.status_code == status and APIS[path][1](answer.json())


# Bodies that are no request.

DEEP = 100_000
BODIES = {
    "nothing": b"",
    "half an object": b'{"model": ',
    "text": b'"hello"',
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "two objects": b"{} {}",
    "a form": b"model=x&prompt=y",
    "zeros": bytes(1000),
    "compressed": gzip.compress(b"{}"),
    "UTF-16": '{"model": "x"}'.encode("utf-16"),
    "no UTF-8": b'{"model": "\xff\xfe"}',
    "too long UTF-8": b'{"model": "\xc0\xaf"}',
    "half a character": rb'{"model": "\ud800"}',
    "NaN": b'{"temperature": NaN}',
    "minus infinity": b'{"temperature": -Infinity}',
    "1e400": b'{"temperature": 1e400}',
    "ten thousand digits": b'{"max_tokens": ' + b"9" * 10_000 + b"}",
    "deep lists": b"[" * DEEP,
    "deep lists that end": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"model":' * DEEP,
}


@pytest.mark.parametrize("path", APIS)
def test_malformed_bodies_are_refused(client: httpx.Client, path: str) -> None:
    for name, body in BODIES.items():
        assert refused(client.post(path, content=body), path), name


# Values that are no values of their fields, by the published document.

VALUES: list[Any] = ["text", -1, 2**70, 1e308, True, [[{}]], {"x": [1]}]
SLOW = {"num_predict": -1}  # until the window is full: right, and long


def properties(name: str) -> dict[str, Any]:
    found: dict[str, Any] = SCHEMAS[name]["properties"]
    return found


def asked_at(path: str) -> str:
    place: str = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return place.rpartition("/")[2]


def allows(schema: dict[str, Any], value: Any) -> bool:
    return bool(Draft202012Validator(schema | {"components": DOCUMENT["components"]}).is_valid(value))


@pytest.mark.parametrize("path", APIS)
def test_invalid_values_are_refused(client: httpx.Client, path: str) -> None:
    base, shape = APIS[path]
    for field, schema in properties(asked_at(path)).items():
        for value in VALUES:
            answer = client.post(path, json=base | {field: value})
            assert answer.status_code < 500, (field, value, answer.text)
            assert answer.status_code == 200 or shape(answer.json()), (field, value)
            assert allows(schema, value) or answer.status_code == 400, (field, value, answer.text)


def test_invalid_ollama_options_are_refused(client: httpx.Client) -> None:
    base, shape = APIS["/api/chat"]
    for field, schema in properties("ollama.OllamaOptions").items():
        for value in VALUES:
            if SLOW.get(field) != value:
                answer = client.post("/api/chat", json=base | {"options": {"num_predict": 2, field: value}})
                assert answer.status_code < 500, (field, value, answer.text)
                assert answer.status_code == 200 or shape(answer.json()), (field, value)
                assert allows(schema, value) or answer.status_code == 400, (field, value)


def test_an_error_names_the_field(client: httpx.Client) -> None:
    params = {"/v1/responses": ("input", "max_output_tokens", "store"), "/v1/chat/completions": ("messages", "top_p")}
    for path, fields in params.items():
        for field in fields:
            answer = client.post(path, json=APIS[path][0] | {field: 0.5 if field != "top_p" else 5})
            assert answer.json()["error"]["param"] == field


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


# A JSON text goes where the mark is.
DEEP_FIELDS = {
    "/v1/chat/completions": (
        '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1,'
        ' "response_format": {"type": "json_schema", "json_schema": {"schema": @}}}'
    ),
    "/v1/completions": '{"prompt": "x", "max_tokens": 1, "response_format": {"type": "json_schema", "schema": @}}',
    "/v1/responses": (
        '{"input": "x", "max_output_tokens": 1, "text": {"format": {"type": "json_schema", "name": "x", "schema": @}}}'
    ),
    "/api/chat": '{"messages": [{"role": "user", "content": "x"}], "stream": false, "format": @}',
    "/v1/messages": (
        '{"model": "simulated:tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}],'
        ' "tools": [{"name": "f", "input_schema": @}], "tool_choice": {"type": "any"}}'
    ),
    "/tokenize": '{"messages": [{"role": "user", "content": @}]}',
}


@pytest.mark.parametrize("depth", [300, 900, DEEP])
def test_deeply_nested_fields_are_refused(client: httpx.Client, depth: int) -> None:
    """Some are so deep that only the node notices: the error is a 400, and no failure of the node."""
    for path, body in DEEP_FIELDS.items():
        assert refused(client.post(path, content=body.replace("@", nested(depth))), path), path


def test_tool_call_arguments_must_be_json(client: httpx.Client) -> None:
    """The arguments are JSON within JSON: the gateway parses them for the template."""
    for arguments in (nested(5000), nested(DEEP), r'{"a": "\ud800"}', '{"a": NaN}', "1e400", "{"):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, *HELLO]
        answer = client.post("/v1/chat/completions", json=SHORT | {"messages": messages})
        assert refused(answer, "/v1/chat/completions"), arguments[:20]


def test_deeply_nested_messages_are_refused() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"a": deep}
    tokenizer = ModelTokenizer(Tokenizer(BPE()), "{{ tools | tojson }}")
    with pytest.raises(MessagesRefused):
        tokenizer.render_chat(HELLO, tools=[deep])


# Size.


def test_ten_megabytes_are_ignored_or_too_long(client: httpx.Client, right: str) -> None:
    """In an unknown field they are ignored; a prompt of that size does not fit the context window."""
    for path in ANSWERING:
        base, shape = APIS[path]
        assert client.post(path, json=base | {"not_a_field": "x" * (10 << 20)}).status_code == 200
        answer = client.post(path, json=base | {"messages": [{"role": "user", "content": "x" * (10 << 20)}]})
        assert (answer.status_code, shape(answer.json())) == (400, True)
        assert "131072" in answer.text


def test_bodies_above_the_limit_are_refused(client: httpx.Client) -> None:
    """With a Content-Length, and without one."""
    too_much = 17

    def pieces() -> Iterator[bytes]:
        yield b'{"not_a_field": "'
        for _ in range(too_much):
            yield b"x" * (1 << 20)
        yield b'"}'

    for path in APIS:
        assert refused(client.post(path, content=b"x" * (too_much << 20)), path, 413)
        assert path not in ANSWERING or refused(client.post(path, content=pieces()), path, 413)


# Connections. What is no HTTP has no path, and OpenAI's shape.


class Line:
    """A TCP connection that sends any bytes."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._address = urlsplit(gateway.url)
        self.sock = socket.create_connection((self._address.hostname, self._address.port), SOON_S)
        self.heard = b""

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *_: Any) -> None:
        self.sock.close()

    def say(self, what: bytes) -> "Line":
        self.sock.sendall(what)
        return self

    def dribble(self, what: bytes) -> bool:
        """False: the gateway has closed the connection. What it sent before can be read."""
        with suppress(OSError):  # what was said before is heard all the same
            self.sock.sendall(what)
        self.sock.settimeout(0)
        try:
            piece = self.sock.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            self.sock.settimeout(SOON_S)
        self.heard += piece
        return bool(piece)

    def rest(self) -> bytes:
        """Until the gateway closes the connection."""
        with suppress(ConnectionResetError):
            while piece := self.sock.recv(1 << 16):
                self.heard += piece
        return self.heard

    def statuses(self) -> list[int]:
        return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", self.rest())]

    def refusals(self) -> list[Any]:
        return [json.loads(body) for body in re.findall(rb'\r\n\r\n(\{"(?:error|type)".*?\}+)(?=HTTP|$)', self.rest())]


def head(path: str, *lines: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: gateway", *lines, "", ""]).encode("latin1")


def whole(path: str, body: bytes, *lines: str) -> bytes:
    return head(path, f"Content-Length: {len(body)}", *lines) + body


HEALTH = head("/health", method="GET")
CHAT = "/v1/chat/completions"

NO_HTTP = {
    "noise": bytes(range(128, 256)) * 8 + b"\r\n\r\n",
    "TLS": bytes.fromhex("160301020001000001fc0303") + bytes(64) + b"\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a head without an end": b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * (1 << 20),
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a path that is none": b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "a length that is none": head(CHAT, "Content-Length: many"),
    "a negative length": head(CHAT, "Content-Length: -1"),
    "two lengths": head(CHAT, "Content-Length: 2", "Content-Length: 3") + b"{}",
    "an unknown encoding": head(CHAT, "Transfer-Encoding: secret") + b"{}",
    "a chunk that is none": head(CHAT, "Transfer-Encoding: chunked") + b"hello\r\n",
}


def test_invalid_http_is_refused(gateway: GatewayProcess) -> None:
    for name, noise in NO_HTTP.items():
        with Line(gateway) as line:
            with suppress(OSError):  # it may have heard enough before the end
                line.say(noise)
            assert set(line.statuses()) <= {400, 404}, name  # `*` is no path, but may be asked for
            assert all(map(openai_shape, line.refusals())), name
            assert name == "a head without an end" or line.refusals(), name


def test_garbage_after_a_request_is_refused(gateway: GatewayProcess) -> None:
    with Line(gateway) as line:
        assert line.say(HEALTH + b"\x00\xff garbage\r\n\r\n").statuses() == [200, 400]
    with Line(gateway) as line:  # after one that takes its time
        body = json.dumps(APIS[CHAT][0]).encode()
        assert line.say(whole(CHAT, body) + b"\x00garbage\r\n\r\n").statuses() == [200, 400]


def test_bytes_beyond_content_length_are_refused(gateway: GatewayProcess) -> None:
    """The remaining bytes are no request."""
    for path in ANSWERING:
        body = json.dumps(APIS[path][0]).encode() + b"\r\n\r\n"
        with Line(gateway) as line:
            assert line.say(head(path, "Content-Length: 20") + body).statuses() == [400, 400]
            assert APIS[path][1](line.refusals()[0])


def test_a_half_closed_connection_cancels_the_request(gateway: GatewayProcess) -> None:
    """A client that closes its sending side counts as disconnected: TCP shows no difference. The gateway cancels the
    request and closes the connection without a response."""
    for path in ANSWERING:
        base, _ = APIS[path]
        long = base | ({"options": {"num_predict": 20_000}} if "options" in base else {"max_tokens": 20_000})
        with Line(gateway) as line:
            line.say(whole(path, json.dumps(long | {"stream": False}).encode()))
            line.sock.shutdown(socket.SHUT_WR)
            assert line.rest() == b""


# Those who take their time.

MANY, FEW = 150, 9


def test_slow_connections_are_closed(gateway: GatewayProcess, client: httpx.Client, right: str) -> None:
    """Heads and bodies that come byte by byte, and idle connections. Other clients are served meanwhile."""
    with ExitStack() as stack:

        def lines(count: int, output: bytes) -> list[Line]:
            return [stack.enter_context(Line(gateway)).say(output) for _ in range(count)]

        heads = lines(MANY, b"GET /health HTTP/1.1\r\nX-Slow: ")
        seconds = lines(FEW, HEALTH + HEALTH[:20])  # after an answer, the next one
        bodies = {path: lines(FEW, head(path, "Content-Length: 100000") + b'{"x": "') for path in ANSWERING}
        refusals = lines(FEW, head(CHAT, f"Content-Length: {1 << 40}") + b"{")
        stalled = {path: lines(FEW, head(path, "Content-Length: 1000") + b'{"model": ') for path in ANSWERING}
        silent = lines(FEW, b"")
        gone = lines(FEW, head(CHAT, "Content-Length: 1000") + b'{"model": ')
        for line in gone:
            line.sock.close()
        talking = [*heads, *seconds, *chain(*bodies.values()), *refusals]
        deadline = time.monotonic() + SOON_S
        while talking and time.monotonic() < deadline:
            talking = [line for line in talking if line.dribble(b"x")]
            assert greeting(client) == right
        assert not talking
        assert all(line.rest() == b"" for line in silent)
        for path, those in stalled.items():
            assert all(line.statuses() == [408] and APIS[path][1](line.refusals()[0]) for line in those)
        assert all(line.heard.startswith(b"HTTP/1.1 200") for line in seconds)
        assert all(line.heard.startswith(b"HTTP/1.1 413") for line in refusals)
        assert any(line.heard.startswith(b"HTTP/1.1 408") for line in heads)  # not all may see it: they were talking
        assert all(any(b" 408 " in line.heard for line in those) for those in bodies.values())


# Paths, methods, headers.

UNKNOWN = {"/v1/nothing": openai_shape, "/api/nothing": ollama_shape, "/v1/messages/nothing": anthropic_shape}


def test_unknown_paths_are_404(client: httpx.Client) -> None:
    for path, shape in {**UNKNOWN, "/%ff": openai_shape, "/v1/models/%ff": openai_shape}.items():
        for method in ("GET", "POST", "BREW"):
            answer = client.request(method, path, headers={"x-request-id": "mine"})
            assert answer.status_code in ((404,) if "models" not in path else (404, 405))
            assert shape(answer.json())
            assert answer.headers["x-request-id"] == "mine"
            assert answer.json().get("request_id", "mine") == "mine"


def test_unsupported_methods_are_405(client: httpx.Client) -> None:
    for path, (body, _) in APIS.items():
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"):
            answer = client.request(method, path)
            assert refused(answer, path, 405), (path, method)
            assert answer.headers["allow"] == "POST"
        assert client.post(f"{path}/", json=body).status_code == 404


def test_the_content_type_is_ignored(client: httpx.Client) -> None:
    for path, (body, _) in APIS.items():
        for kind in ("", "text/plain", "multipart/form-data", "application/json; charset=latin1", "\xff"):
            answer = client.post(path, content=json.dumps(body), headers={b"Content-Type": kind.encode("latin1")})
            assert answer.status_code == 200, (path, kind)


def test_odd_host_headers_are_accepted(gateway: GatewayProcess) -> None:
    """Except what might be the name of another site: brackets that are not closed are no address."""
    paths = {"/v1/models": 200, "/nothing": 404, "/v1/responses/x": 404, "/v1/completions/": 404}
    for host, (path, status) in product(("[", "[::1", "a b", "\xff", "x" * 5000, ""), paths.items()):
        lines = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        with Line(gateway) as line:
            assert line.say(lines.encode("latin1")).statuses() == [403 if host[:1] == "[" else status]
