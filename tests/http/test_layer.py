"""The HTTP layer by itself: bodies, errors, request ids, tokens, streams."""

import asyncio
import io
import json
import socket
import threading
import time
import urllib.request
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference.errors import BadRequest, DisaggError, IdentityRefused, KVMemoryFull
from disaggregated_inference.http import (
    KEEPALIVE_COMMENT,
    Bearer,
    EventStreamResponse,
    HttpLimits,
    RequestId,
    StreamChecksums,
    error_body,
    error_response,
    is_loopback,
    json_response,
    read_body,
    request_id,
    sse_event,
)
from disaggregated_inference.timeouts import HttpTimeouts
from tests.support.recorded_ollama import OnThread
from tests.support.waiting import until


class Body(msgspec.Struct):
    n: int


async def double(request: Request) -> Response:
    body = await read_body(request, Body, limit_bytes=100)
    return json_response({"n": body.n * 2, "request_id": request_id(request)})


async def count(request: Request) -> Response:
    async def events() -> AsyncGenerator[bytes, None]:
        fail_at = int(request.query_params.get("fail_at", "9"))
        for number in range(3):
            if number == fail_at:
                raise BadRequest("no more numbers")
            yield sse_event(number)
            await asyncio.sleep(0.05)

    return EventStreamResponse(request, events(), lambda error: sse_event(error_body(error)))


async def refused(request: Request, error: Exception) -> Response:
    return error_response(error)


def call(method: str, path: str, *, token: str = "", **options: Any) -> httpx.Response:
    app = Starlette(
        routes=[Route("/double", double, methods=["POST"]), Route("/count", count)],
        exception_handlers={DisaggError: refused},
    )
    app.state.http_timeouts = HttpTimeouts(read_s=0.2, keepalive_s=0.01, early_error_s=0.02)
    guarded = RequestId(Bearer(app, token) if token else app)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(guarded)
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def test_a_json_body_and_its_request_id() -> None:
    response = call("POST", "/double", json={"n": 4}, headers={"X-Request-Id": "abc"})
    assert (response.status_code, response.json()) == (200, {"n": 8, "request_id": "abc"})
    assert response.headers["x-request-id"] == "abc"
    assert call("POST", "/double", json={"n": 4}).headers["x-request-id"]


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{", 400, "bad_request"),
        (b'{"n": "four"}', 400, "bad_request"),
        (b'{"n": 4}' + b" " * 100, 413, "body_too_large"),
    ],
)
def test_bodies_that_are_refused(content: bytes, status: int, code: str) -> None:
    response = call("POST", "/double", content=content)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_a_body_that_does_not_arrive() -> None:
    async def drip() -> AsyncGenerator[bytes, None]:
        yield b"{"
        await asyncio.sleep(30)

    response = call("POST", "/double", content=drip())
    assert (response.status_code, response.headers["connection"]) == (408, "close")


@pytest.mark.parametrize(("given", "status"), [("secret", 200), ("wrong", 401), ("", 401)])
def test_a_bearer_token(given: str, status: int) -> None:
    headers = {"Authorization": f"Bearer {given}"} if given else {}
    response = call("POST", "/double", token="secret", json={"n": 1}, headers=headers)
    assert response.status_code == status
    assert (response.headers.get("www-authenticate") == "Bearer") == (status == 401)


def _events(response: httpx.Response) -> list[Any]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


def test_a_stream_with_signs_of_life() -> None:
    response = call("GET", "/count")
    assert _events(response) == [0, 1, 2]
    assert KEEPALIVE_COMMENT in response.content
    assert response.headers["content-type"].startswith("text/event-stream")


def test_an_early_error_has_its_own_status() -> None:
    response = call("GET", "/count?fail_at=0")
    assert (response.status_code, response.json()["error"]["message"]) == (400, "no more numbers")


def test_a_late_error_is_the_last_event() -> None:
    response = call("GET", "/count?fail_at=2")
    assert response.status_code == 200
    assert _events(response) == [0, 1, {"error": {"code": "bad_request", "message": "no more numbers"}}]


def test_a_full_node_says_when_to_come_back() -> None:
    response = error_response(KVMemoryFull("full"), retry_after_s=7)
    assert (response.status_code, response.headers["retry-after"]) == (503, "7")


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False)])
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_a_client_that_leaves_ends_its_stream() -> None:
    """Before the first event, too. The call returns as if all had been sent; only the server itself cancels it."""
    closed: list[str] = []

    async def events(name: str) -> AsyncGenerator[bytes, None]:
        try:
            if name != "early":
                yield b"one"
            await asyncio.Event().wait()
        finally:
            closed.append(name)

    async def run(name: str, leave: asyncio.Event) -> list[Any]:
        sent: list[Any] = []

        async def receive() -> Any:
            await leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        request = Request({"type": "http", "app": Starlette(), "headers": []})
        await EventStreamResponse(request, events(name), lambda error: b"")({"type": "http"}, receive, send)
        return sent

    async def all_of_them() -> None:
        leave = asyncio.Event()
        early, late = asyncio.create_task(run("early", leave)), asyncio.create_task(run("late", leave))
        stopped = asyncio.create_task(run("stopped", asyncio.Event()))
        await asyncio.sleep(0.05)
        leave.set()
        stopped.cancel()
        await asyncio.wait({early, late, stopped})
        assert early.result() == []
        assert [message.get("body") for message in late.result()] == [None, b"one"]
        assert stopped.cancelled()

    asyncio.run(all_of_them())
    assert sorted(closed) == ["early", "late", "stopped"]


def test_the_head_of_a_stream_waits_for_an_early_error_only_a_moment() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b""

    async def run() -> None:
        started, kept_alive = asyncio.Event(), asyncio.Event()

        async def send(message: Any) -> None:
            (started if message["type"] == "http.response.start" else kept_alive).set()

        async def receive() -> Any:
            await asyncio.Event().wait()

        request = Request({"type": "http", "app": Starlette(), "headers": []})
        times = HttpTimeouts(early_error_s=0.01, keepalive_s=0.01)
        response = EventStreamResponse(request, events(), lambda error: b"", timeouts=times)
        running = asyncio.create_task(response({"type": "http"}, receive, send))
        await started.wait()
        await kept_alive.wait()
        running.cancel()

    asyncio.run(run())


@contextmanager
def limited(read_s: float = 60, **limits: int) -> Iterator[OnThread]:
    app = Starlette(routes=[Route("/double", double, methods=["POST"])], exception_handlers={DisaggError: refused})
    server = OnThread(app, HttpTimeouts(read_s=read_s), HttpLimits(**limits))
    try:
        yield server
    finally:
        server.end()


def opened(server: OnThread, data: bytes) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.settimeout(30)
    sock.sendall(data)
    return sock


def received(sock: socket.socket) -> bytes:
    with suppress(ConnectionResetError):  # closed with data that the server has not read
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))
    return b""


def test_unfinished_heads_do_not_keep_others_out() -> None:
    """One too many closes the oldest, long before its deadline; a complete request is never closed."""
    with limited(unfinished_heads=5) as server, ExitStack() as stack:
        heads = [stack.enter_context(opened(server, b"GET /double HTTP/1.1\r\nX-Slow: ")) for _ in range(8)]
        assert [received(sock) for sock in heads[:3]] == [b""] * 3
        assert server.ask("/double", {"n": 4})[1]["n"] == 8


def test_a_body_with_two_lengths_is_the_last_of_its_connection() -> None:
    """A proxy in front that goes by the number takes the second request for a part of the first one's body."""
    hidden = b'POST /double HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n\r\n{"n":4}'
    body = b'7\r\n{"n":2}\r\n0\r\n\r\n' + hidden
    lengths = f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked\r\n\r\n"
    head = f"POST /double HTTP/1.1\r\nHost: x\r\n{lengths}".encode()
    with limited() as server, opened(server, head + body) as sock:
        answer = received(sock)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer.partition(b"\r\n\r\n")[0].lower()
    with limited() as server, opened(server, hidden * 2) as sock:
        assert until(lambda: sock.recv(1 << 16, socket.MSG_PEEK).count(b"HTTP/1.1 200") == 2), "others may follow"


def test_connections_have_a_limit() -> None:
    for limits in ({"connections": 3}, {"connections_per_address": 3}):
        with limited(**limits) as server, ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(opened(server, b"GET"))
            head, _, body = received(stack.enter_context(opened(server, b""))).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert json.loads(body)["error"]["code"] == "server_busy"
            stack.close()
            assert until(lambda: server.ask("/double", {"n": 4})[0] == 200)


def answer_of(sock: socket.socket) -> bytes:
    """One whole answer; the connection stays open."""
    answer = b""
    while not answer.endswith(b"}"):
        answer += (part := sock.recv(1 << 16))
        assert part, answer
    return answer


def test_idle_connections_do_not_keep_others_out() -> None:
    """They are kept for long, so that no client meets a closing one; the oldest ends when its place is needed."""
    body = b'{"n": 4}'
    request = b"POST /double HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    for limits in ({"connections": 3}, {"connections_per_address": 3}):
        with limited(**limits) as server, ExitStack() as stack:
            kept = []
            for number in range(5):  # each is idle before the next one comes
                kept.append(stack.enter_context(opened(server, request)))
                assert answer_of(kept[number]).startswith(b"HTTP/1.1 200 ")
            assert [received(sock) for sock in kept[:2]] == [b""] * 2, "the oldest"
            for sock in kept[2:]:
                sock.sendall(request)
                assert answer_of(sock).startswith(b"HTTP/1.1 200 ")


def test_a_half_sent_head_behind_a_request_has_its_deadline() -> None:
    """It came while the request before it was answered: that connection is not idle."""
    body = b'{"n": 4}'
    request = b"POST /double HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with limited(read_s=1) as server, opened(server, request + b"POST /double HTTP/1.1\r\nX-Slow: ") as sock:
        assert received(sock).startswith(b"HTTP/1.1 200 "), "then it is closed"


def test_unfinished_bodies_have_a_limit_in_sum() -> None:
    begin = b"POST /double HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n" + b" " * 40
    with limited(unfinished_body_bytes=100) as server, ExitStack() as stack:
        first, second, third = (stack.enter_context(opened(server, begin)) for _ in range(3))
        answers: list[bytes] = []
        for sock in (first, second, third):  # which of them is one too many depends on the order of arrival
            sock.settimeout(0.5)
            with suppress(TimeoutError):
                answers.append(sock.recv(1 << 16))
        assert [answer.startswith(b"HTTP/1.1 503 ") for answer in answers] == [True]
        assert b"retry-after: 1" in answers[0].lower()
        for sock in (first, second, third):
            sock.close()
        assert until(lambda: server.ask("/double", {"n": 4})[0] == 200)


@pytest.mark.parametrize("together", [True, False])
def test_a_revoked_client_gets_no_further_answer(together: bool) -> None:
    """Also for a request that came before the answer to the one before had ended."""
    begun, may_end, revoked = threading.Event(), threading.Event(), threading.Event()

    async def slow(request: Request) -> Response:
        begun.set()
        await asyncio.to_thread(may_end.wait, 60)
        return json_response({"n": 1})

    def require_peer(certificate: bytes | None) -> None:
        if revoked.is_set():
            raise IdentityRefused("the certificate was revoked")

    server = OnThread(Starlette(routes=[Route("/slow", slow)]), require_peer=require_peer)
    request = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
    try:
        with opened(server, request * 2 if together else request) as sock:
            assert begun.wait(30)
            if not together:
                sock.sendall(request)
            revoked.set()
            may_end.set()
            found = received(sock)
        assert found.count(b"HTTP/1.1 200 ") == 1
        assert found.count(b"HTTP/1.1 403 ") == 1
        assert found.endswith(b"}")
    finally:
        may_end.set()
        server.end()


PARTS = [b"%d %b\n" % (number, b"x" * size) for number, size in enumerate([1, 10, 4_000_000, 1, 200_000] * 4)]


async def parts(request: Request) -> Response:
    async def pieces() -> AsyncGenerator[bytes, None]:
        for part in PARTS:
            yield part
            await asyncio.sleep(0)

    return EventStreamResponse(request, pieces(), lambda error: b"")


def raw_response(server: OnThread, head: bytes, first_read_after: Callable[[], object] = lambda: None) -> bytes:
    with opened(server, head) as sock:
        first_read_after()
        return received(sock)


@pytest.mark.parametrize("checksums", [False, True])
def test_parts_of_a_stream_arrive_whole(checksums: bool) -> None:
    """By HTTP/1.1, where they are written straight to the connection unless a middleware changes them; by HTTP/1.0; and
    to a client that reads late, so that the server has to wait for it."""
    app = Starlette(routes=[Route("/parts", parts)], middleware=[Middleware(StreamChecksums)] if checksums else [])
    server = OnThread(app, HttpTimeouts(read_s=60))
    head = b"GET /parts HTTP/1.%d\r\nHost: x\r\nConnection: close\r\nX-Checksum: 0\r\n\r\n"
    try:
        old_head, _, plain = raw_response(server, head % 0).partition(b"\r\n\r\n")
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{server.port}/parts")) as response:
            assert response.read() == b"".join(PARTS)
        chunked_head, _, chunked = raw_response(server, head % 1, lambda: time.sleep(0.2)).partition(b"\r\n\r\n")
    finally:
        server.end()
    assert b"chunked" in chunked_head.lower()
    assert b"chunked" not in old_head.lower()
    reader = io.BytesIO(chunked)
    sizes = iter(lambda: int(reader.readline(), 16), 0)
    assert b"".join(reader.read(size + 2)[:-2] for size in sizes) == plain
    assert (plain == b"".join(PARTS)) != checksums
    assert plain.count(b": sum ") == (len(PARTS) if checksums else 0)


def test_events_that_are_cancelled_cancel_the_request() -> None:
    """Not the client left: the server must not take the response for complete."""

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"one"
        raise asyncio.CancelledError

    async def run() -> None:
        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            pass

        request = Request({"type": "http", "app": Starlette(), "headers": []})
        with pytest.raises(asyncio.CancelledError):
            await EventStreamResponse(request, events(), lambda error: b"")({"type": "http"}, receive, send)

    asyncio.run(run())
