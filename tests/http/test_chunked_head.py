"""The head of a stream: what is written without h11 is what h11 would have written, or h11 decides."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disaggregated_inference.http.chunked_head import chunked_head

PLAIN = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-request-id", b"r"), (b"x-empty", b"")]


def by_h11(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]] | None:
    """What a client reads of a response with these headers; None: h11 refuses them."""
    server, client = h11.Connection(h11.SERVER), h11.Connection(h11.CLIENT)
    server.receive_data(client.send(h11.Request(method="GET", target="/", headers=[("Host", "x")])) or b"")
    server.next_event()
    try:
        sent = server.send(h11.Response(status_code=200, headers=headers, reason="OK"))
    except h11.LocalProtocolError:
        return None
    client.receive_data(sent or b"")
    return headers_of(client)


def read(head: bytes) -> list[tuple[bytes, bytes]]:
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    client.receive_data(head)
    return headers_of(client)


def headers_of(client: h11.Connection) -> list[tuple[bytes, bytes]]:
    response = client.next_event()
    assert isinstance(response, h11.Response)
    return list(response.headers)


def test_a_plain_head() -> None:
    head = chunked_head(PLAIN)
    assert head
    assert read(head) == by_h11(PLAIN) == [*PLAIN, (b"transfer-encoding", b"chunked")]


@pytest.mark.parametrize(
    "header",
    [
        (b"x-note", b"a\r\nset-cookie: b"),
        (b"x-note", b"a\nb"),
        (b"x-note", b"a\x00b"),
        (b"x-note", b" a"),
        (b"x-note", b"a "),
        (b"x note", b"a"),
        (b"", b"a"),
        (b"x:y", b"a"),
        (b"Content-Length", b"3"),
        (b"transfer-encoding", b"gzip"),
        (b"Connection", b"close"),
    ],
)
def test_heads_that_are_left_to_h11(header: tuple[bytes, bytes]) -> None:
    assert chunked_head([*PLAIN, header]) is None


@given(st.lists(st.tuples(st.binary(max_size=6), st.binary(max_size=8)), max_size=4))
def test_any_headers(headers: list[tuple[bytes, bytes]]) -> None:
    head = chunked_head(headers)
    if head is not None:
        assert read(head) == by_h11(headers)
