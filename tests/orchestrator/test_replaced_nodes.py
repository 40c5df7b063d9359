"""A node that is replaced again and again leaves nothing behind on the nodes that stay."""

from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.client import DisaggregatedClient
from tests.support.cluster import Process, config_of
from tests.support.waiting import until

MODEL = "simulated:tiny"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="it counts another process's descriptors")
def test_twenty_replaced_prefill_nodes() -> None:
    pace = ("--profile", "custom:prefill=20000,decode=500", "--prefix-memory", "0")
    prefill = Process("p", "prefill", "simulated", MODEL, *pace)
    decode = Process("d", "decode", "simulated", MODEL, *pace)
    ask: dict[str, Any] = {"model": MODEL, "prompt": "hello " * 20, "max_tokens": 4, "temperature": 0}
    held, tokens = list[tuple[int, int]](), list[list[int]]()
    try:
        decode.ready()
        with DisaggregatedClient(config_of(prefill, decode, local="never", poll_s=0.2)) as client:
            for number in range(20):
                if number:
                    prefill.kill()
                    prefill.start()
                prefill.ready()
                assert until(lambda: client.health()["verdict"] == "all up", 60)
                assert until(lambda: client.generate(**ask)[1]["prefill_node"] == "p", 60), "KV comes from the new one"
                tokens.append(client.generate(**ask)[1]["tokens"])
                assert until(decode.nothing_left)
                held.append((_count(decode, "fd"), _count(decode, "task")))
        assert all(found == tokens[0] for found in tokens)
        assert held[-1][0] <= held[3][0] + 8, held
        assert held[-1][1] <= held[3][1] + 8, held
        assert len(decode.status()["peers"]) <= 20
        assert not decode.status()["integrity_faults"]
    finally:
        for node in (prefill, decode):
            node.end()


def _count(node: Process, what: str) -> int:
    """File descriptors or threads."""
    return len(list(Path(f"/proc/{node.process.pid}/{what}").iterdir()))
