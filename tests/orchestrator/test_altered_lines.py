"""One bit of the HTTP line between orchestrator and node is flipped, at every kind of place: no answer is wrong."""

import random
import socket
from contextlib import suppress
from typing import Any

import pytest

from disaggregated_inference.api import ChecksumReader, StreamDamaged, checksum
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.errors import DisaggError
from tests.support.cluster import Process, config_of
from tests.support.tcp_proxy import FaultyProxy
from tests.support.waiting import until

CASES = 60
ASK: dict[str, Any] = {"model": "simulated:tiny", "prompt": "hello", "max_tokens": 12, "temperature": 0}


class RequestProxy(FaultyProxy):
    """Flips a bit on the way to the node instead."""

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(self._disturbed(data))
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _pump_back(self, source: socket.socket, target: socket.socket) -> None:
        super()._pump(source, target)


@pytest.mark.slow
@pytest.mark.parametrize("proxy", [FaultyProxy, RequestProxy])
def test_no_flipped_bit_changes_an_answer(proxy: type[FaultyProxy]) -> None:
    node = Process("d1", "decode", "simulated", "simulated:tiny", "--profile", "instant")
    places = random.Random(5)
    try:
        node.ready()
        config = config_of(node, local="always", poll_s=0.2)
        with DisaggregatedClient(config) as client:
            _, expected = client.generate(**ASK)
        with proxy(("127.0.0.1", node.port)) as line:
            config["decode_servers"][0]["port"] = line.address[1]
            with DisaggregatedClient(config) as client:
                client.generate(**ASK)  # fetches the tokenizer
                before = line.passed
                client.generate(**ASK)
                size, struck, right = line.passed - before, 0, 0
                for _ in range(CASES):
                    assert until(lambda: client.status()["nodes"][0]["usable"], 60)
                    line.struck.clear()
                    line.at, line.fault = line.passed + places.randrange(size), "flip"
                    with suppress(DisaggError):
                        _, metrics = client.generate(**ASK)
                        assert metrics["tokens"] == expected["tokens"]
                        assert metrics["finish_reason"] == expected["finish_reason"]
                        right += 1
                    struck += line.struck.is_set()
                    line.fault = "none"
        assert struck > CASES // 3
        assert right > CASES // 2
    finally:
        node.end()


def test_a_reader_passes_on_what_is_proven() -> None:
    parts, so_far, sent = [b'data: {"a": ": sum 1"}\n\n', b": alive 0.1\n\n", b"data: 2\n\ndata: 3\n\n"], 0, b""
    for part in parts:
        so_far = checksum(part, so_far)
        sent += b"%b: sum %08x\n\n" % (part, so_far)
    for size in range(1, len(sent) + 1):
        reader = ChecksumReader()
        assert b"".join(reader.feed(sent[at : at + size]) for at in range(0, len(sent), size)) == b"".join(parts)
    for at in range(len(sent)):
        reader, altered = ChecksumReader(), sent[:at] + bytes([sent[at] ^ 1]) + sent[at + 1 :]
        with suppress(StreamDamaged):
            assert b"".join(parts).startswith(reader.feed(altered))
