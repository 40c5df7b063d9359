"""The end of a frame: 0 inside TLS, whose records have a tag each, and never 0 on a plain connection."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from disaggregated_inference.errors import ChecksumMismatch
from disaggregated_inference.kv_transfer import Connection, TlsSocket, start_tls
from disaggregated_inference.kv_transfer.frames import CHECKSUM, HEADER, Frame, Kind, encode_header
from tests.support.identities import Cluster
from tests.support.kv_frames import encode, tcp_pair

ROWS = bytes(range(200))
FRAME = Frame(Kind.SLICE, len(ROWS), 0, 3, 1, 300)
UNSUMMED = encode_header(FRAME) + ROWS + bytes(CHECKSUM.size)


@contextmanager
def tls_pair(folder: Path) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    cluster = Cluster(folder)
    near_end, far_end = cluster.identity("mac"), cluster.identity("spark")
    with tcp_pair() as (near, far):
        served: list[TlsSocket] = []
        answering = threading.Thread(
            target=lambda: served.append(start_tls(far, far_end.server_context, 5.0, server=True))
        )
        answering.start()
        begun = start_tls(near, near_end.kv_client_context, 5.0, server=False)
        answering.join()
        try:
            yield begun, served[0]
        finally:
            begun.close()
            served[0].close()


def received(connection: Connection) -> bytes:
    target = bytearray(len(ROWS))
    connection.receive_payload(connection.receive_header(), memoryview(target))
    return bytes(target)


def test_inside_tls_it_is_0_and_nothing_else(tmp_path: Path) -> None:
    with tls_pair(tmp_path / "keys") as (near, far):
        Connection(near).send(FRAME, ROWS)
        sent = bytearray(len(UNSUMMED))
        assert far.recv_into(memoryview(sent)) == len(sent)
        assert sent == UNSUMMED
        receiver = Connection(far)
        near.sendmsg([memoryview(UNSUMMED)])
        assert received(receiver) == ROWS
        near.sendmsg([memoryview(encode(FRAME, ROWS))])  # of a version that summed here, too
        with pytest.raises(ChecksumMismatch, match="SLICE"):
            received(receiver)


def test_on_a_plain_connection_0_is_damage() -> None:
    with tcp_pair() as (near, far):
        Connection(near).send(FRAME, ROWS)
        sent = far.recv(HEADER.size + len(ROWS) + CHECKSUM.size)
        assert sent == encode(FRAME, ROWS)
        receiver = Connection(far)
        near.sendall(sent)
        assert received(receiver) == ROWS
        near.sendall(UNSUMMED)
        with pytest.raises(ChecksumMismatch, match="SLICE"):
            received(receiver)
