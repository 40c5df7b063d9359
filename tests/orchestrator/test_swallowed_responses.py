"""A node has accepted a request, and the connection breaks before the response arrives: the request is sent again. The
answer must be right, and nothing may be left."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from disaggregated_inference.chaos.tcp_proxy import TcpProxy
from disaggregated_inference.client import DisaggregatedClient
from tests.support.cluster import Process, config_of
from tests.support.waiting import until

MODEL = "simulated:tiny"
PROMPT = "What the sea says to a stone."

pytestmark = pytest.mark.slow


class SwallowingProxy(TcpProxy):
    """Ends a kept connection when the response to its next POST begins: the node has accepted that one. Every second
    such connection, so that attempts get through."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.swallowed, self._met = 0, 0
        super().__init__(target)

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        """A response belongs to the request before it: there is no pipelining."""
        posts: list[bytes] = []

        def back() -> None:
            responses = 0
            with suppress(OSError):
                while data := far.recv(1 << 14):
                    if data.startswith(b"HTTP/1.1 "):
                        responses += 1
                        if responses > 1 and posts and posts[-1].startswith(b"POST ") and self._is_struck():
                            break
                    near.sendall(data)
            for sock in (near, far):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

        thread = threading.Thread(target=back, daemon=True)
        thread.start()
        with suppress(OSError):
            while data := near.recv(1 << 16):
                if data.startswith((b"POST ", b"GET ", b"DELETE ")):
                    posts.append(data[:10])
                far.sendall(data)
        with suppress(OSError):
            far.shutdown(socket.SHUT_WR)
        thread.join()
        self._drop(far)

    def _is_struck(self) -> bool:
        with self.lock:
            self._met += 1
            self.swallowed += self._met % 2
            return bool(self._met % 2)


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Process]]:
    profile = ("--profile", "custom:prefill=50000,decode=2000")
    nodes = [Process(name, role, "simulated", MODEL, *profile) for name, role in (("p", "prefill"), ("d", "decode"))]
    try:
        yield [node.ready() for node in nodes]
    finally:
        for node in nodes:
            node.end()


@pytest.mark.parametrize("local", ["never", "always"])
def test_accepted_and_sent_again(pair: list[Process], local: str) -> None:
    """By way of two nodes, where tickets tell the two apart, and on one node, where the first is cancelled."""
    proxies = [SwallowingProxy(("127.0.0.1", node.port)) for node in pair]
    config: Any = config_of(*pair, local=local)
    with DisaggregatedClient(config) as direct:
        expected = [direct.generate(model=MODEL, prompt=PROMPT, max_tokens=8 + number)[0] for number in range(30)]
    for servers, proxy in zip(("prefill_servers", "decode_servers"), proxies, strict=True):
        config[servers][0]["port"] = proxy.address[1]
    try:
        with DisaggregatedClient(config) as client:
            answers = [client.generate(model=MODEL, prompt=PROMPT, max_tokens=8 + number)[0] for number in range(30)]
    finally:
        for proxy in proxies:
            proxy.close()
    assert answers == expected
    met = [proxy.swallowed for proxy in (proxies if local == "never" else proxies[1:])]
    assert all(met), f"responses that were swallowed: {met}"
    assert until(lambda: all(node.nothing_left() for node in pair), 40), [node.status() for node in pair]
