"""Clients that hold many connections open, and a server with few file descriptors."""

import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from disaggregated_inference.http.limits import raise_file_limit
from tests.support.cluster import ready_line
from tests.support.command import read_output
from tests.support.waiting import until


@contextmanager
def held(port: int, count: int, content: bytes) -> Iterator[list[socket.socket]]:
    """Connections that sent this much and stay."""
    assert raise_file_limit() > count
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            with suppress(OSError):
                sock.sendall(content)
            found.append(sock)
        yield found


class Reopened(threading.Thread):
    """Holds silent connections from an address of its own. What the server closes is opened again, until the end."""

    def __init__(self, port: int, count: int) -> None:
        super().__init__(daemon=True)
        self._address, self._count, self._held = ("127.0.0.1", port), count, list[socket.socket]()
        self.opened, self._ended = 0, threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            while len(self._held) < self._count and not self._ended.is_set():
                with suppress(OSError):
                    self._held.append(socket.create_connection(self._address, 1, ("127.0.0.2", 0)))
                    self.opened += 1
            gone, _, _ = select.select(self._held, [], [], 0.05)
            for sock in gone:
                self._held.remove(sock)
                sock.close()

    def goes_on(self) -> bool:
        """Whether the server closes connections and takes others still."""
        before = self.opened
        return until(lambda: self.opened > before + 20, 60)

    def __enter__(self) -> "Reopened":
        assert raise_file_limit() > self._count
        self.start()
        assert until(lambda: self.opened > self._count, 60), "the server closes the oldest"
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()
        for sock in self._held:
            sock.close()


@contextmanager
def few_files(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any], Callable[[], str]]]:
    """A server with 400 file descriptors, its ready line, and its log."""
    with tempfile.TemporaryFile("w+") as log:
        command = ["bash", "-c", 'ulimit -n 400; exec "$@"', "bash", sys.executable, "-m", "disaggregated_inference"]
        process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=log)
        try:
            assert process.stdout
            yield process, ready_line(process.stdout), lambda: read_output(log)
        finally:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
