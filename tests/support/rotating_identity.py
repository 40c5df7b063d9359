"""`python -m tests.support.rotating_identity FOLDER SECONDS`: connections begin on several threads while the
certificates of both ends are rotated again and again. A process of its own: what goes wrong here ends it."""

import json
import os
import socket
import ssl
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from disaggregated_inference.errors import PeerGone
from disaggregated_inference.identity import Authority, Identity
from disaggregated_inference.identity.authority import CERTIFICATE, KEY
from disaggregated_inference.kv_transfer.tls_socket import start_tls

HOSTS = ("127.0.0.1",)
THREADS = 2
GENERATIONS = 5  # of certificates


class Rotating:
    def __init__(self, folder: Path) -> None:
        self._authority = Authority.create(folder)
        self._pairs = {name: self._certificates(name) for name in ("server", "client")}
        self._server, self._client = (Identity(folder / name) for name in ("server", "client"))
        self._stranger = Identity(Authority.create(folder / "others").issue("client", HOSTS))
        self._over = threading.Event()
        self.begun = self.connected = self.refused = self.rotated = 0
        self.seen: set[bytes | None] = set()  # the server's certificates

    def _certificates(self, name: str) -> list[tuple[bytes, bytes]]:
        """Keys and certificates, made before: making one takes longer than a handshake."""
        folder, found = self._authority.issue(name, HOSTS), []
        for _ in range(GENERATIONS):
            self._authority.rotate(name)
            found.append(((folder / KEY).read_bytes(), (folder / CERTIFICATE).read_bytes()))
        return found

    def run(self, seconds: float) -> None:
        with ThreadPoolExecutor(2 * THREADS) as threads:
            asking = [threads.submit(self._connect, client) for client in (self._client, self._stranger)]
            asking += [threads.submit(self._begin) for _ in range(THREADS)]
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                self._rotate()
            self._over.set()
            for each in asking:
                each.result()

    def _rotate(self) -> None:
        self.rotated += 1
        for identity, pairs in ((self._server, self._pairs["server"]), (self._client, self._pairs["client"])):
            key, certificate = pairs[self.rotated % GENERATIONS]
            (identity.folder / KEY).write_bytes(key)
            (identity.folder / CERTIFICATE).write_bytes(certificate)
            assert identity.refresh()

    def _begin(self) -> None:
        """Only the first moment of connections, which is the delicate one."""
        while not self._over.is_set():
            self._server.server_context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True)
            self.begun += 1

    def _connect(self, client: Identity) -> None:
        """Whole handshakes. Those of another cluster's client are refused."""
        with ThreadPoolExecutor(1) as answering, socket.create_server(("127.0.0.1", 0)) as listener:
            while not self._over.is_set():
                near = socket.create_connection(listener.getsockname())
                self._shake_hands(client, near, listener.accept()[0], answering)

    def _shake_hands(
        self, client: Identity, near: socket.socket, far: socket.socket, answering: ThreadPoolExecutor
    ) -> None:
        served = answering.submit(start_tls, far, self._server.server_context, 20.0, True)
        with suppress(PeerGone):
            tls = start_tls(near, client.kv_client_context, 20.0, server=False)
            self.seen.add(tls.peer_certificate)
            tls.close()
        if served.exception() is None:
            served.result().close()
        if client is self._client:
            self.connected += served.exception() is None
        else:
            assert isinstance(served.exception(), PeerGone)
            self.refused += 1


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


if __name__ == "__main__":
    rotating = Rotating(Path(sys.argv[1]))
    before = descriptors()
    rotating.run(float(sys.argv[2]))
    counts = {
        "begun": rotating.begun,
        "connected": rotating.connected,
        "refused": rotating.refused,
        "rotated": rotating.rotated,
    }
    print(json.dumps(counts | {"certificates": len(rotating.seen), "left": descriptors() - before}))
