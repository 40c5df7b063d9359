"""Altered bytes on TLS lines, of HTTP and of KV: the connection breaks, and no answer is wrong."""

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.chaos.line import DisturbedLine
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.identity import Identity
from tests.support.cluster import Process, config_of
from tests.support.identities import Cluster
from tests.support.waiting import until

pytestmark = pytest.mark.slow

MODEL, PROMPT = "simulated:tiny", [(7 * at) % 900 + 5 for at in range(300)]
CASES, WAIT_S = 40, 60.0
STUCK_S = 5.0  # an altered length lets the other side wait for bytes that never come


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("lines") / "keys")


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[tuple[Process, Process]]:
    pair = [
        Process(name, role, "simulated", MODEL, "--profile", "instant", "--identity", str(cluster.folder_of(name)))
        for name, role in (("p1", "prefill"), ("d1", "decode"))
    ]
    yield pair[0].ready(), pair[1].ready()
    for node in pair:
        node.end()


def generated(port: int, identity: Identity) -> tuple[int, Any]:
    """Status and tokens. Raises where the connection breaks."""
    body = json.dumps({"tokens": PROMPT, "max_new_tokens": 12}).encode()
    request = urllib.request.Request(f"https://127.0.0.1:{port}/generate", body)
    with urllib.request.urlopen(request, timeout=STUCK_S, context=identity.client_context) as response:
        return response.status, json.load(response)["tokens"]


def test_altered_http_breaks_the_connection(nodes: tuple[Process, Process], cluster: Cluster) -> None:
    """The node never answers an altered request: not even with a refusal, which an HTTPError would be."""
    client, decode = Identity(cluster.client), nodes[1]
    expected, broken, struck = generated(decode.port, client), 0, 0
    for seed in range(CASES):
        line = DisturbedLine("HTTP", ("127.0.0.1", decode.port), seed, random.Random(seed).choice((500, 2000, 6000)))
        line.disturb("garble")
        try:
            assert generated(line.address[1], client) == expected
        except urllib.error.HTTPError as error:
            raise AssertionError(f"the node answered an altered request with {error.code}") from error
        except (OSError, http.client.HTTPException):
            broken += 1
            assert line.struck > 0
        struck += line.struck > 0
        line.close()
    assert broken >= CASES // 4, (broken, struck)
    assert generated(decode.port, client) == expected


def test_altered_kv_breaks_the_transfer(nodes: tuple[Process, Process], cluster: Cluster) -> None:
    ask: dict[str, Any] = {"tokens": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    prefill = nodes[0]
    line = DisturbedLine("KV", ("127.0.0.1", prefill.kv_port), 5, 8_000)
    config = config_of(*nodes, local="never", poll_s=0.2) | {"identity": str(cluster.client)}
    config["prefill_servers"][0]["kv_addresses"] = [f"127.0.0.1:{line.address[1]}"]
    with DisaggregatedClient(config) as client:
        _, expected = client.generate(**ask)
        assert expected["method"] == "disaggregated_simulated"

        def moved(salt: str) -> bool:
            """Whether the KV passed the line; another salt finds no cached prefix."""
            try:
                _, metrics = client.generate(**ask, cache_salt=salt)
            except DisaggError:
                return False
            assert metrics["tokens"] == expected["tokens"]
            return bool(metrics["method"] == "disaggregated_simulated" and not metrics["failovers"])

        line.disturb("garble")
        broken = sum(not moved(f"garbled {case}") for case in range(CASES // 2))
        struck = line.struck
        line.heal()
        assert until(lambda: moved(f"healed {time.monotonic()}"), WAIT_S)
    line.close()
    assert broken > 0
    assert struck >= 5, struck


def test_chaos_of_nodes_with_an_identity(nodes: tuple[Process, Process], cluster: Cluster, tmp_path: Path) -> None:
    """`disagg chaos --config` asked these nodes for their status without the cluster's identity."""
    from disaggregated_inference.chaos.cluster import chaos_cluster
    from disaggregated_inference.chaos.settings import ChaosSettings

    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(config_of(*nodes) | {"identity": str(cluster.client)}))
    with chaos_cluster(ChaosSettings(config=str(path))) as started:
        assert [node.status().identity for node in started.nodes] == ["p1", "d1"]
        assert all(node.left() == [] for node in started.nodes)
