"""A disturbed line: each fault strikes, and the line heals."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from disaggregated_inference.chaos.line import DisturbedLine
from tests.support.waiting import until

WAIT_S = 30.0


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends everything back."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(sock: socket.socket) -> None:
            with suppress(OSError), sock:
                while data := sock.recv(4096):
                    sock.sendall(data)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def line(echo: tuple[str, int]) -> Iterator[DisturbedLine]:
    line = DisturbedLine("HTTP to d1", echo, seed=3, spacing_bytes=500)
    yield line
    line.close()


def connected(line: DisturbedLine) -> socket.socket:
    return socket.create_connection(line.address, WAIT_S)


def echoed(sock: socket.socket, data: bytes) -> bytes:
    """What came back; short if the connection ended."""
    sock.sendall(data)
    found = b""
    while len(found) < len(data) and (more := sock.recv(4096)):
        found += more
    return found


def test_a_healthy_line_changes_nothing(line: DisturbedLine) -> None:
    with connected(line) as sock:
        assert echoed(sock, b"hello" * 10_000) == b"hello" * 10_000
    assert line.struck == 0


def test_a_cut_line_ends_connections_and_refuses_new_ones(line: DisturbedLine) -> None:
    with connected(line) as sock, connected(line):
        assert echoed(sock, b"before") == b"before"
        line.disturb("cut")
        assert until(lambda: line.struck >= 1)
        with suppress(ConnectionError):
            assert sock.recv(10) == b""
    with suppress(ConnectionError), connected(line) as sock:
        assert sock.recv(10) == b""
    line.heal()
    with connected(line) as sock:
        assert echoed(sock, b"after") == b"after"


def test_a_garbled_line_flips_bits(line: DisturbedLine) -> None:
    with connected(line) as sock:
        line.disturb("garble")
        found = echoed(sock, bytes(20_000))
        assert 0 < sum(byte != 0 for byte in found) <= line.struck
        assert len(found) == 20_000
        line.heal()
        assert echoed(sock, bytes(20_000)) == bytes(20_000)


def test_a_black_hole_passes_nothing_and_then_everything(line: DisturbedLine) -> None:
    with connected(line) as sock:
        assert echoed(sock, b"before") == b"before"
        line.disturb("black hole")
        sock.sendall(b"during")
        assert until(lambda: line.struck == 1)
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            sock.recv(10)
        sock.settimeout(WAIT_S)
        line.heal()
        found = b""
        while len(found) < 6:
            found += sock.recv(10)
        assert found == b"during"


def test_a_slow_line_takes_its_time(line: DisturbedLine) -> None:
    with connected(line) as sock:
        line.disturb("slow")
        began_at = time.monotonic()
        assert echoed(sock, b"x" * 8_000) == b"x" * 8_000
        assert time.monotonic() - began_at >= 0.06  # there and back: twice the pause, and 40 ms of bytes
    assert line.struck >= 2


def test_a_line_follows_its_node(line: DisturbedLine) -> None:
    """A node that was started again has another port. Meanwhile connections end at once."""
    good = line.target
    with socket.create_server(("127.0.0.1", 0)) as gone:
        line.target = gone.getsockname()
    with connected(line) as sock:
        assert sock.recv(10) == b""
    line.target = good
    with connected(line) as sock:
        assert echoed(sock, b"back") == b"back"


def test_ended_connections_leave_nothing_behind(line: DisturbedLine) -> None:
    for _ in range(30):
        with connected(line) as sock:
            assert echoed(sock, b"x") == b"x"
    assert until(lambda: not line._sockets)
