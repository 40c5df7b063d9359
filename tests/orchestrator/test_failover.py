"""What one node says is not what all would: a request that another node can serve is served."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from disaggregated_inference.api import ModelInfo, NodeStatus, PeerStatus, PrefillRequest
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.cluster import Policies, load_config
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.kv import Fingerprint, Weights, WeightSample
from disaggregated_inference.orchestrator.attempt import Attempt
from disaggregated_inference.orchestrator.cluster_view import Route
from disaggregated_inference.orchestrator.failover import FailoverState
from disaggregated_inference.orchestrator.heartbeat import Heartbeats
from disaggregated_inference.orchestrator.leg_errors import LegFailed
from disaggregated_inference.orchestrator.node_client import NodeClient
from disaggregated_inference.orchestrator.registry import NodeRegistry
from disaggregated_inference.orchestrator.route_picker import RoutePicker
from tests.support.cluster import Process, config_of
from tests.support.fingerprints import REFERENCE, floats
from tests.support.handoff import prompt_of
from tests.support.http_stub import served
from tests.support.tcp_proxy import FaultyProxy
from tests.support.waiting import until

MODEL = "simulated:tiny"


@contextmanager
def running(*made: Process) -> Iterator[None]:
    try:
        for node in made:
            node.ready()
        yield
    finally:
        for node in made:
            node.end()


def simulated(name: str, role: str = "decode", pace: str = "prefill=5000,decode=200", *more: str) -> Process:
    return Process(name, role, "simulated", MODEL, "--profile", f"custom:{pace}", "--prefix-memory", "0", *more)


def asked(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "tokens": prompt_of(40, 900), "max_tokens": 60, "temperature": 0, "ignore_eos": True} | more


def test_a_request_too_large_for_one_node_goes_to_another() -> None:
    """The small one is faster. What no node could hold is refused as such."""
    small = simulated("small", "decode", "prefill=50000,decode=2000", "--kv-memory", "80K")  # 160 tokens
    with running(small, large := simulated("large")):
        config = config_of(small, large, local="always")
        with DisaggregatedClient(config) as client:
            assert until(lambda: client.health()["verdict"] == "all up")
            assert client.generate(**asked())[1]["decode_node"] == "small"
            _, metrics = client.generate(**asked(n=2))
            assert metrics["decode_node"] == "large"
            assert metrics["failovers"] == [], "it is known beforehand"
        with DisaggregatedClient(config_of(small, local="always")) as client, pytest.raises(DisaggError) as caught:
            client.generate(**asked(n=2))
        assert (caught.value.status, caught.value.code) == (413, "request_too_large")


def test_a_prompt_too_large_for_the_prefill_node_is_read_by_the_decode_node() -> None:
    small = simulated("small", "prefill", "prefill=50000,decode=2000", "--kv-memory", "16K")  # 32 tokens
    writer = simulated("writer")
    with running(small, writer), DisaggregatedClient(config_of(small, writer, local="never")) as client:
        assert until(lambda: client.health()["verdict"] == "all up")
        _, metrics = client.generate(**asked())
        assert (metrics["method"], len(metrics["tokens"])) == ("fallback", 60)
        assert all(node["breaker"] == "closed" for node in client.status()["nodes"]), "it is only small"


@pytest.mark.parametrize("at", [1, 10])
def test_a_broken_connection_to_the_only_decode_node(at: int) -> None:
    """The node is well: it is asked for the rest."""
    with running(node := simulated("d")), FaultyProxy(("127.0.0.1", node.port)) as line:
        with DisaggregatedClient(config_of(node, local="always")) as client:
            _, expected = client.generate(**asked())
        config = config_of(node, local="always")
        config["decode_servers"][0]["port"] = line.address[1]
        with DisaggregatedClient(config) as client:
            tokens: list[int] = []
            for delta in client.stream(**asked()):
                tokens += [] if delta.token is None else [delta.token]
                if len(tokens) == at and not line.struck.is_set():
                    line.struck.set()
                    line.hang_up()
        assert tokens == expected["tokens"]


def test_another_role_at_the_same_port() -> None:
    """Started again between two looks, as what it was not before."""
    first, other = simulated("first", "decode", "prefill=50000,decode=2000"), simulated("other")
    config = config_of(first, other, local="always", poll_s=600.0)
    with running(first, other), DisaggregatedClient(config) as client:
        assert until(lambda: client.health()["verdict"] == "all up")
        assert client.generate(**asked())[1]["decode_node"] == "first"
        first.kill()
        first.command[first.command.index("--role") + 1] = "prefill"
        first.command += ["--kv-port", "0"]
        first.start()
        first.ready()
        _, metrics = client.generate(**asked())
        assert metrics["decode_node"] == "other"
        assert client.status()["nodes"][0]["state"] == "wrong role"


def test_a_prefill_node_without_memory_in_time_can_be_replaced() -> None:
    """Not the end of the request: it may have much more time than its prompt."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"error": {"code": "deadline_exceeded", "message": "not in time"}}, status=504)

    async def run() -> None:
        async with served("/prefill", answer, "POST") as server, aiohttp.ClientSession() as session:
            legs = NodeClient(server, session, Heartbeats(), stuck_s=30.0)
            with pytest.raises(LegFailed, match="not in time"):
                await legs.prefill(PrefillRequest(tokens=[1]), "r")

    asyncio.run(run())


def watched(session: aiohttp.ClientSession, *held: tuple[str, str, Weights]) -> NodeRegistry:
    """Nodes by name and role, and what they hold."""
    config: dict[str, Any] = {"prefill_servers": [], "decode_servers": []}
    for name, role, _ in held:
        config[f"{role}_servers"].append({"name": name, "host": name, "model": "m"})
    watch = NodeRegistry(load_config(config), session)
    for name, role, weights in held:
        node = watch.nodes[name]
        who: Fingerprint = msgspec.structs.replace(REFERENCE, weights=weights)
        node.info, node.reachable, node.trouble = ModelInfo(context_window=100, fingerprint=who), True, ""
        node.status = NodeStatus(status="healthy", role=role, epoch=f"epoch of {name}")  # type: ignore[arg-type]
    watch._compare("m")
    return watch


def stored(form: str, values: bytes, rounding: float) -> Weights:
    return Weights("nnn", form, form, (WeightSample(tensor="v", rounding=rounding, values=values),))


BASE = stored("BF16", floats(1, 2), 0.01)
COARSE = stored("gguf:Q4_0", floats(1.1, 2.1), 0.25)
TUNED = stored("gguf:F16", floats(1.2, 2.2), 0.01)


def test_a_fine_tune_does_not_pass_for_its_base_by_a_quantized_copy() -> None:
    """A fine-tune and the base are both as near to the base in four bits as that can tell."""

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            held = [("coarse", "decode", COARSE), ("tuned", "decode", TUNED), ("base", "prefill", BASE)]
            nodes = watched(session, *held).nodes
            assert "another model than base" in nodes["tuned"].mismatch
            assert (nodes["coarse"].mismatch, nodes["base"].mismatch) == ("", "")

    asyncio.run(run())


def test_a_refused_pair_is_not_used_again() -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            watch = watched(session, ("p", "prefill", BASE), ("d1", "decode", BASE), ("d2", "decode", BASE))
            status = watch.nodes["d1"].status
            assert status
            for peer, met, refused in (
                (PeerStatus("epoch of p", "it computes something else"), set(), {("p", "d1")}),
                (PeerStatus("epoch of p"), {("p", "d1")}, set()),
                (PeerStatus("an earlier epoch", "it computes something else"), set(), set()),
            ):
                watch.nodes["d1"].status = msgspec.structs.replace(status, peers=(peer,))
                view = watch.view("m")
                assert (set(view.checked), set(view.refused)) == (met, refused)
                assert [no.decode for no in watch.refusals("m")] == [decode for _, decode in refused]

    asyncio.run(run())


def test_nodes_of_a_refused_pair_serve_with_other_nodes() -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            watch = watched(session, ("p", "prefill", BASE), ("d1", "decode", BASE), ("d2", "decode", BASE))
            failover = FailoverState(watch, "m", Policies())
            options = {name: Route(decode=name, prefill="p", first_token_s=0, total_s=0) for name in ("d1", "d2")}
            attempt = Attempt(options["d1"], "", "", 0.0, epochs=watch.epochs("m"))
            failure = LegFailed("d1", "peer_refused", "it computes something else")
            assert failover.learn(failure, attempt)
            assert failover.wants_refresh(failure)
            assert [failover.allows(options[name]) for name in ("d1", "d2")] == [False, True]
            assert [failover.prefill_expected(name) for name in ("d1", "d2")] == [False, True]
            assert (failover.avoid, failover.pinned) == (set(), None)
            assert all(node.usable for node in watch.nodes.values())

    asyncio.run(run())


@pytest.mark.parametrize("can_transfer_kv", [True, False])
@pytest.mark.parametrize("local", ["auto", "never", "always"])
def test_without_prefill_nodes_every_local_route_is_the_fallback_mode(local: str, can_transfer_kv: bool) -> None:
    """By failure, or where the config or the engine wants it so: by choice, with the same warning."""

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            watch = watched(session, ("p", "prefill", BASE), ("d", "decode", BASE))
            watch.config = msgspec.structs.replace(watch.config, policies=Policies(local=local))  # type: ignore[arg-type]
            failover = FailoverState(watch, "m", watch.config.policies)
            picker = RoutePicker(watch, "m", failover, can_transfer_kv=can_transfer_kv)
            alone = Route(decode="d", prefill=None, first_token_s=0, total_s=0)
            assert not picker.prefill_is_down(alone)
            assert not picker.is_fallback(alone)
            watch.nodes["p"].lost("it is gone")
            assert picker.prefill_is_down(alone)
            assert picker.is_fallback(alone) == (can_transfer_kv and local != "always")

    asyncio.run(run())
