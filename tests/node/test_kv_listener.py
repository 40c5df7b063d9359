"""The KV listener and its addresses."""

import socket

import pytest

from disaggregated_inference.errors import (
    BadRequest,
)
from disaggregated_inference.node.kv_listener import KVListener, parse_address
from tests.support.waiting import until


def test_the_kv_listener_survives_running_out_of_descriptors() -> None:
    taken: list[socket.socket] = []
    listener = KVListener([("127.0.0.1", 0)], lambda sock: taken.append(sock), 8)
    refusals = [OSError(24, "Too many open files"), OSError(24, "Too many open files")]
    near, far = socket.socketpair()

    class Exhausted:
        def accept(self) -> tuple[socket.socket, None]:
            if refusals:
                raise refusals.pop()
            listener._closing.set()
            return far, None

    listener._accept(Exhausted())  # type: ignore[arg-type]
    assert until(lambda: taken == [far])
    listener.close()
    near.close()
    far.close()


def test_addresses() -> None:
    found = [parse_address(text, 7, "--kv-address") for text in ("a", "a:1", "::1", "[::1]", "[fe80::1%en0]:2")]
    assert found == [("a", 7), ("a", 1), ("::1", 7), ("::1", 7), ("fe80::1%en0", 2)]
    assert parse_address("a:0", 7, "--kv-address", min_port=0) == ("a", 0)
    with pytest.raises(BadRequest, match="not an address"):
        parse_address("a:0", 7, "--kv-address")
