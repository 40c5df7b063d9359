"""Silent connections to a KV port, from clients without a secret: they keep no decode node out, and fill no log."""

import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.identity import Identity
from disaggregated_inference.kv_transfer.frames import Frame, Kind, encode_header
from tests.support.cluster import Process, free_port
from tests.support.floods import Reopened, few_files, held
from tests.support.identities import Cluster
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="it counts the descriptors of another process"),
]

MODEL = "simulated:tiny"


@dataclass(frozen=True)
class Flooded:
    """A prefill node with 400 file descriptors: its KV port has places for 200 connections."""

    pid: int
    port: int
    kv_port: int
    said: Callable[[], str]
    cluster: Cluster | None

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    @property
    def identity(self) -> Identity | None:
        return self.cluster.identity("mac") if self.cluster else None

    def fetched(self, decode: Process) -> int:
        """How many tokens a request got, with KV that the decode node fetched."""
        entry = {"host": "127.0.0.1", "port": self.port, "name": "spark", "model": MODEL}
        policies = {"local": "never", "poll_s": 0.5}
        config: dict[str, Any] = {"prefill_servers": [entry], "decode_servers": [decode.entry], "policies": policies}
        if self.cluster:
            config["identity"] = str(self.cluster.client)
        with DisaggregatedClient(config) as client:
            _, metrics = client.generate(tokens=list(range(5, 200)), max_tokens=4, temperature=0, ignore_eos=True)
        assert metrics["method"] == "disaggregated_simulated", metrics
        return len(metrics["tokens"])

    def answered(self) -> bool:
        """A HELLO without a ticket gets its refusal."""
        with socket.create_connection(("127.0.0.1", self.kv_port), 60) as sock:
            identity = self.identity
            if not identity:
                return _is_refused(sock)
            with identity.kv_client_context.wrap_socket(sock, server_hostname="127.0.0.1") as tls:
                return _is_refused(tls)


def _is_refused(sock: socket.socket | ssl.SSLSocket) -> bool:
    sock.sendall(encode_header(Frame(Kind.HELLO, 2)) + b"{}" + bytes(8))
    answer = sock.recv(100)
    return len(answer) > 5 and answer[5] == Kind.ERROR


@pytest.fixture(params=["plain", "tls", "tls or authenticated"])
def flooded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Flooded]:
    cluster = Cluster(tmp_path / "keys") if "tls" in request.param else None
    identity = ["--identity", str(cluster.folder_of("spark"))] if cluster else []
    identity += ["--kv-security", "tls,authenticated"] if "authenticated" in request.param else []
    ports = "--port", str(port := free_port()), "--kv-port", str(kv_port := free_port())
    serve = "serve", "--role", "prefill", "--engine", "simulated", "--model", MODEL
    with few_files(*serve, *ports, *identity) as (process, _, said):
        yield Flooded(process.pid, port, kv_port, said, cluster)


def test_silent_connections_to_the_kv_port(flooded: Flooded) -> None:
    cluster = flooded.cluster
    identity = ("--identity", str(cluster.folder_of("mac"))) if cluster else ()
    decode = Process("mac", "decode", "simulated", MODEL, *identity).ready()
    before = flooded.descriptors
    try:
        with held(flooded.kv_port, 500, b""):
            assert flooded.answered(), "now none of them waits to be accepted"
            assert flooded.fetched(decode) == 4
        with Reopened(flooded.kv_port, 400) as flood:
            for _ in range(5):
                assert flooded.answered()
                assert flooded.descriptors < 350
                assert flood.goes_on()
        assert until(lambda: flooded.descriptors < before + 20, 60)
        assert flooded.fetched(decode) == 4
    finally:
        decode.end()
    assert flooded.said().count("before they were admitted") in (1, 2), "one line a minute"
    assert len(flooded.said().splitlines()) < 40
