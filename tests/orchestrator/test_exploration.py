"""A node that became slow is tried again soon: the next requests find out whether it still is."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from disaggregated_inference.api import KVMemoryStatus, ModelInfo, NodeStatus, PeerStatus, Rate, Rates, SlotStatus
from disaggregated_inference.cluster import load_config
from disaggregated_inference.node import RateMeter
from disaggregated_inference.orchestrator.cluster_view import RouteRequest
from disaggregated_inference.orchestrator.failover import FailoverState
from disaggregated_inference.orchestrator.node_state import NodeState
from disaggregated_inference.orchestrator.registry import NodeRegistry
from disaggregated_inference.orchestrator.route_picker import RoutePicker
from disaggregated_inference.timeouts import OrchestratorTimeouts
from tests.support.fingerprints import REFERENCE

_TIMEOUTS = OrchestratorTimeouts(explore_s=60.0, explore_doubtful_s=5.0)
_CONFIG: dict[str, Any] = {
    "prefill_servers": [{"name": "p", "host": "p", "model": "m"}],
    "decode_servers": [{"name": "d", "host": "d", "model": "m"}],
}
_REQUEST = RouteRequest(model="m", prompt_tokens=1000, max_tokens=100)


def status_of(role: Any, **rates: tuple[Rate, ...]) -> NodeStatus:
    memory = KVMemoryStatus(limit_bytes=1 << 40)
    return NodeStatus(status="healthy", role=role, epoch=role, rates=Rates(**rates), kv=memory, slots=SlotStatus(0, 8))


class Cluster:
    """A prefill node of 1,000 tokens/s and a decode node of 400; both report what they are told to."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.registry = NodeRegistry(load_config(_CONFIG), session, _TIMEOUTS)
        self.meter = RateMeter()
        self.p, self.d = self.registry.nodes["p"], self.registry.nodes["d"]
        for node in (self.p, self.d):
            node.info = ModelInfo(context_window=0, fingerprint=REFERENCE)
        rate, steps = Rate(size=512, tokens_per_s=400.0), Rate(size=1, tokens_per_s=50.0, samples=50)
        self.d.update(status_of("decode", local_prefill=(rate,), decode=(steps,)))
        self.read(1.0, 1.0, 1.0)

    def read(self, *seconds: float) -> None:
        """The prefill node reads prompts of 1,000 tokens, and is polled after each."""
        for each in seconds:
            self.meter.record(1000, 1000, each)
            self.p.update(status_of("prefill", prefill=tuple(self.meter.stats())))

    def picks(self) -> str | None:
        """The prefill node of the next request, which then reads it."""
        failover = FailoverState(self.registry, "m", self.registry.config.policies)
        picker = RoutePicker(self.registry, "m", failover, can_transfer_kv=True)
        route, _ = picker.pick(_REQUEST, explore=True)
        for name in {route.prefill, route.decode} - {None}:
            self.registry.nodes[str(name)].used_at = time.monotonic()
        return route.prefill

    def doubtful(self) -> bool:
        return self.p.doubtful

    @staticmethod
    def wait(node: NodeState, seconds: float) -> None:
        node.used_at -= seconds


def in_cluster(check: Callable[[Cluster], None]) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            check(Cluster(session))

    asyncio.run(run())


def test_one_bad_reading_does_not_move_a_plan() -> None:
    def check(cluster: Cluster) -> None:
        assert cluster.picks() == "p"
        cluster.read(20.0)
        assert cluster.picks() == "p"
        assert not cluster.doubtful()

    in_cluster(check)


def test_a_node_that_slowed_is_tried_again_soon_and_used_again() -> None:
    def check(cluster: Cluster) -> None:
        cluster.read(*[8.0] * 5)
        assert cluster.doubtful()
        assert cluster.picks() is None, "the decode node reads faster now"
        for _ in range(3):
            assert cluster.picks() is None, "not yet"
            cluster.wait(cluster.p, 6.0)
            assert cluster.picks() == "p"
            cluster.read(1.0)
        assert not cluster.doubtful()
        assert [cluster.picks() for _ in range(3)] == ["p"] * 3

    in_cluster(check)


def test_a_node_that_stays_slow_is_tried_seldom() -> None:
    def check(cluster: Cluster) -> None:
        cluster.read(*[8.0] * 5)
        tried = 0
        for _ in range(20):
            cluster.wait(cluster.p, 6.0)
            if cluster.picks() == "p":
                tried += 1
                cluster.read(8.0)
        assert 6 <= tried <= 8, "six times soon, then once a minute"
        cluster.wait(cluster.p, 61.0)
        assert cluster.picks() == "p"

    in_cluster(check)


def test_a_bad_measurement_at_the_start_is_checked_soon() -> None:
    """A machine that was busy when its node started is not avoided for a minute."""

    def check(cluster: Cluster) -> None:
        cluster.p._best_rates.clear()
        cluster.meter = RateMeter()
        cluster.read(5.0)
        assert cluster.doubtful()
        assert cluster.picks() is None
        for _ in range(2):
            cluster.wait(cluster.p, 6.0)
            assert cluster.picks() == "p"
            cluster.read(1.0)
        assert not cluster.doubtful()
        assert cluster.picks() == "p"

    in_cluster(check)


def test_a_bad_measurement_of_decode_at_the_start_is_checked_soon() -> None:
    """One of two equal decode nodes was busy when it started: it gets an answer to write, which shows its speed."""
    config = {name: [servers[0] | {"name": name[0]}] for name, servers in _CONFIG.items()}
    config["decode_servers"].append({"name": "e", "host": "e", "model": "m"})

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            registry = NodeRegistry(load_config(config), session, _TIMEOUTS)
            for node in registry.nodes.values():
                node.info = ModelInfo(context_window=0, fingerprint=REFERENCE)
            p, d, e = (registry.nodes[name] for name in "pde")
            writer = status_of("decode", decode=(Rate(size=1, tokens_per_s=50.0, samples=50),))
            met = msgspec.structs.replace(writer, peers=(PeerStatus(epoch="prefill"),))
            p.update(status_of("prefill", prefill=(Rate(size=512, tokens_per_s=1000.0, samples=3),)))
            d.update(met)
            slow = Rates(decode=(Rate(size=1, tokens_per_s=15.0, samples=2),))
            e.update(msgspec.structs.replace(met, rates=slow))
            failover = FailoverState(registry, "m", registry.config.policies)
            picker = RoutePicker(registry, "m", failover, can_transfer_kv=True, local="never")
            assert (d.doubtful, e.doubtful) == (False, True)
            assert picker.pick(_REQUEST, explore=True)[0].decode == "d"
            Cluster.wait(e, 6.0)
            assert picker.pick(_REQUEST, explore=True)[0].decode == "e"
            e.update(met)
            assert not e.doubtful

    asyncio.run(run())


def test_memory_is_promised_until_a_status_can_count_it() -> None:
    """An answer that waits for a place at its prefill node has not come to its decode node yet."""

    def check(cluster: Cluster) -> None:
        d, status = cluster.d, status_of("decode")
        status = msgspec.structs.replace(status, kv_token_bytes=10, kv=KVMemoryStatus(limit_bytes=10_000))

        def free() -> int:
            return d.view("m").kv_free_bytes

        d.update(status)
        waits, came, late = (d.promise(100) for _ in range(3))
        came.sent_at, late.sent_at = 50.0, 70.0
        assert free() == 7_000
        d.update(status, asked_at=60.0)
        assert free() == 8_000, "the status was asked for after the second came, and before the third"
        waits.sent_at = 80.0
        d.update(status, asked_at=75.0)
        assert free() == 9_000
        for promise in (waits, came, late):
            d.release(promise)
        assert free() == 10_000

    in_cluster(check)


def test_a_node_that_is_slower_by_nature_is_not_slowed() -> None:
    def check(cluster: Cluster) -> None:
        cluster.p._best_rates.clear()
        cluster.meter = RateMeter()
        cluster.read(*[8.0] * 5)
        assert not cluster.doubtful()
        cluster.wait(cluster.p, 6.0)
        assert cluster.picks() is None

    in_cluster(check)


def test_a_restarted_node_begins_anew() -> None:
    def check(cluster: Cluster) -> None:
        slow = msgspec.structs.replace(
            status_of("prefill", prefill=(Rate(size=512, tokens_per_s=125.0, samples=3),)), epoch="another"
        )
        cluster.p.update(slow)
        assert not cluster.doubtful()

    in_cluster(check)


def test_a_node_seen_twice_at_once_is_not_restarted() -> None:
    """Two polls at the start each find a new node; it is not one that just came back, with a fifth of its share."""

    def check(cluster: Cluster) -> None:
        for _ in range(2):
            cluster.p.update(status_of("prefill", prefill=(Rate(size=512, tokens_per_s=125.0),)))
        assert cluster.p.breaker.warmth() == 1.0

    in_cluster(check)


def test_nodes_of_the_best_route_are_not_explored() -> None:
    """After a pause, all nodes are unused: that is no reason to take the second-best route."""

    def check(cluster: Cluster) -> None:
        for _ in range(3):
            for node in (cluster.p, cluster.d):
                cluster.wait(node, 1000.0)
            assert cluster.picks() == "p"

    in_cluster(check)


def test_a_peer_check_is_avoided_only_until_that_has_cost_as_much() -> None:
    """With short requests on fast nodes, the check outweighed the load of the other decode node: one stayed idle."""
    config = {name: [servers[0] | {"name": name[0]}] for name, servers in _CONFIG.items()}
    config["decode_servers"].append({"name": "e", "host": "e", "model": "m"})
    fast = (Rate(size=1, tokens_per_s=4000.0, samples=50), Rate(size=8, tokens_per_s=5000.0, samples=50))
    read = (Rate(size=64, tokens_per_s=500_000.0, samples=9),)
    question = RouteRequest(model="m", prompt_tokens=40, max_tokens=6)

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            registry = NodeRegistry(load_config(config), session, _TIMEOUTS)
            for node in registry.nodes.values():
                node.info = ModelInfo(context_window=0, fingerprint=REFERENCE)
            p, d, e = (registry.nodes[name] for name in "pde")
            p.update(status_of("prefill", prefill=read))
            writer = status_of("decode", decode=fast, local_prefill=read)
            met = msgspec.structs.replace(writer, peers=(PeerStatus(epoch="prefill"),))
            d.update(met)
            e.update(writer)
            d.open = 6
            failover = FailoverState(registry, "m", registry.config.policies)
            picker = RoutePicker(registry, "m", failover, can_transfer_kv=True, local="never")

            def picks(times: int) -> list[str]:
                return [picker.pick(question, explore=True)[0].decode for _ in range(times)]

            found = picks(40)
            assert found.index("e") in range(5, 30), "a check costs 100 ms, a request on the busy node 5 ms more"
            assert found.count("e") < 4, "the others do not wait for the check"
            e.update(met)
            assert picks(3) == ["e"] * 3
            d.open = 0
            e.update(msgspec.structs.replace(writer, epoch="another"))
            assert "e" not in picks(200), "nothing is lost while the node that was checked is idle"

    asyncio.run(run())


def test_the_sentence_says_why_a_route_was_taken() -> None:
    def check(cluster: Cluster) -> None:
        def reason(local: Any = None, policy: Any = "auto", explore: bool = False, failed: str = "") -> str:
            registry = cluster.registry
            policies = msgspec.structs.replace(registry.config.policies, local=policy)
            registry.config = msgspec.structs.replace(registry.config, policies=policies)
            failover = FailoverState(registry, "m", policies)
            failover.prefill_failures = 9 if failed else 0
            picker = RoutePicker(registry, "m", failover, can_transfer_kv=True, local=local)
            return picker.pick(_REQUEST, explore=explore)[1]

        chosen = "p -> d: 1000 new tokens, 1.1"
        assert reason().startswith(chosen), "the router's own sentence"
        assert reason(policy="never").startswith(chosen), "the policy changed nothing"
        assert reason(local="auto").startswith(chosen)
        fastest = "the fastest is p -> d, done in 3.1"
        assert reason(local="always").startswith(f"local on d: the request asks for it, done in 4.50 s; {fastest}")
        forced = reason(local="never")
        assert forced.startswith("p -> d: the request asks for it, done in 3.1")
        assert forced.endswith("s; the fastest way, too")
        assert reason(policy="always").startswith(f"local on d: by policies.local = always, done in 4.50 s; {fastest}")
        assert reason(failed="p").startswith(f"local on d: after a failure of this request, done in 4.50 s; {fastest}")
        cluster.read(1.3, 1.3, 1.3, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0)  # local is faster now
        cluster.wait(cluster.p, 100.0)
        assert reason(explore=True).startswith("p -> d: to measure a node again, ")

    in_cluster(check)
