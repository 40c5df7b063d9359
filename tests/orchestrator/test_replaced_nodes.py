"""A node that is replaced again and again leaves nothing behind on the node that stays."""

import urllib.request
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.chaos.footprint import Footprint, footprint_of
from disaggregated_inference.client import DisaggregatedClient
from tests.support.cluster import Process, config_of
from tests.support.waiting import until

MODEL = "simulated:tiny"
ASK: dict[str, Any] = {"model": MODEL, "prompt": "hello " * 20, "max_tokens": 4, "temperature": 0}
TIMES, SETTLED = 10, 3
LEAK_BYTES = 1 << 20  # no more than that in seven replacements: less than the KV of one


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="it counts another process's descriptors")
@pytest.mark.parametrize("replaced", ["p", "d"])
def test_replaced_nodes(replaced: str) -> None:
    pace = ("--profile", "custom:prefill=20000,decode=500", "--prefix-memory", "0", "--kv-memory", "16M")
    nodes = {name: Process(name, role, "simulated", MODEL, *pace) for name, role in (("p", "prefill"), ("d", "decode"))}
    leaves, stays = nodes[replaced], next(node for name, node in nodes.items() if name != replaced)
    held, tokens = list[Footprint](), list[list[int]]()
    try:
        stays.ready()
        with DisaggregatedClient(config_of(*nodes.values(), poll_s=0.2)) as client:
            for number in range(TIMES):
                if number:
                    leaves.kill()
                    leaves.start()
                leaves.ready()
                assert until(lambda: client.health()["verdict"] == "all up", 60)
                assert until(lambda: client.generate(**ASK)[1]["prefill_node"] == "p", 60), "KV comes from the new one"
                tokens.append(client.generate(**ASK)[1]["tokens"])
                assert until(stays.nothing_left)
                held.append(footprint_of(stays.process.pid, metrics_of(stays)))
        assert all(found == tokens[0] for found in tokens)
        assert grown(held, "descriptors") <= 8, held
        assert grown(held, "threads") <= 8, held
        assert grown(held, "malloc_bytes") <= LEAK_BYTES, held
        assert len(stays.status()["peers"]) <= TIMES
        assert not stays.status()["integrity_faults"]
    finally:
        for node in nodes.values():
            node.end()


def grown(held: list[Footprint], what: str) -> int:
    before, after = (getattr(each, what) for each in (held[SETTLED], held[-1]))
    assert (before is None) == (after is None)
    return int((after or 0) - (before or 0))


def metrics_of(node: Process) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{node.port}/metrics", timeout=30) as response:
        return str(response.read().decode())
