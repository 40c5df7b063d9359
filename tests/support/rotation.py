"""Certificates are rotated while clients ask."""

import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from disaggregated_inference.client import DisaggregatedClient
from tests.support.identities import Cluster
from tests.support.waiting import until


class AskingClients:
    """Clients that ask without a pause, each on a thread with connections of its own."""

    def __init__(self, config: dict[str, Any], prompt: list[int], clients: int) -> None:
        self._config, self._prompt, self._over = config, prompt, threading.Event()
        self.answers: list[tuple[list[int], list[Any]]] = []  # the tokens and the failovers of each request
        self.counts = [0] * clients
        self._threads = ThreadPoolExecutor(clients)
        self._asking = [self._threads.submit(self._ask, number) for number in range(clients)]

    def _ask(self, number: int) -> None:
        with DisaggregatedClient(self._config) as client:
            while not self._over.is_set():
                _, metrics = client.generate(tokens=self._prompt, max_tokens=60, temperature=0, ignore_eos=True)
                self.answers.append((metrics["tokens"], metrics["failovers"]))
                self.counts[number] += 1

    def each_asks_again(self) -> bool:
        """Whether every client got two more answers: the last of them began after this call."""
        before = self.counts.copy()
        return until(lambda: all(now > then + 1 for now, then in zip(self.counts, before, strict=True)), 60)

    def end(self) -> None:
        self._over.set()
        self._threads.shutdown()

    def require(self, expected: list[int]) -> None:
        for each in self._asking:
            each.result()  # raises what a request raised
        assert {str(failovers) for _, failovers in self.answers} == {"[]"}
        assert all(tokens == expected for tokens, _ in self.answers)


def rotate_all(keys: Cluster, *ports: int) -> None:
    """Returns when new connections to every port get new certificates."""
    before = {port: ssl.get_server_certificate(("127.0.0.1", port)) for port in ports}
    for name in keys.authority.names():
        keys.authority.rotate(name)
    for port in ports:
        assert until(lambda port=port: ssl.get_server_certificate(("127.0.0.1", port)) != before[port], 30)  # type: ignore[misc]


def old_serials(keys: Cluster) -> list[str]:
    """Of every name's certificates but the last."""
    last = {issued.name: issued.serial for issued in keys.authority.issued}
    return [issued.serial for issued in keys.authority.issued if issued.serial != last[issued.name]]
