"""Everyone's health, in the background: a loop per node, so that a slow one delays nobody's news, and no request."""

import asyncio
import logging
import random
import time
from collections.abc import Iterable
from functools import partial

import aiohttp

from disaggregated_inference.cluster.config import ClusterConfig
from disaggregated_inference.orchestrator.cluster_view import ClusterView
from disaggregated_inference.orchestrator.heartbeat import Heartbeats
from disaggregated_inference.orchestrator.node_state import NodeState
from disaggregated_inference.orchestrator.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

_JITTER = 0.2
_MISSED_S = 60.0  # so long the nodes of a model may all be away, and still be that model
_AGAIN_S = 0.25  # a node that is away is looked for more often than one that is there


class NodeRegistry:
    """All nodes of a config. `start` on the event loop that will use it."""

    def __init__(self, config: ClusterConfig, session: aiohttp.ClientSession) -> None:
        self.config = config
        self.prefix_index = PrefixIndex()
        self._heartbeats = Heartbeats()
        self.nodes: dict[str, NodeState] = {}
        for server in config.servers:
            model = config.resolve_model(server.model)
            node = self.nodes[server.name] = NodeState(server, model, session, self._heartbeats, config.policies)
            node.client.replaceable = partial(self._replaceable, node)
        self._links = {(link.prefill, link.decode): link.gbps * 1e9 / 8 for link in config.links}
        self._heard = {name: asyncio.Event() for name in self.nodes}
        self._tasks: list[asyncio.Task[None]] = []

    def _replaceable(self, node: NodeState) -> bool:
        """Who only reads is replaced by anyone, since those who write can read; who writes only by another who does."""
        others = [other for other in self.of(node.model) if other is not node and other.usable]
        return any(node.role == "prefill" or other.role != "prefill" for other in others)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_asking(node)) for node in self.nodes.values()]
        self._tasks.append(asyncio.create_task(self._heartbeats.registry()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def of(self, model: str) -> list[NodeState]:
        return [node for node in self.nodes.values() if node.model == model]

    async def heard_of(self, model: str, patience_s: float) -> None:
        """Until every node of a model was asked once, or one of each role is usable. Only the first requests wait."""
        nodes = self.of(model)
        kinds = [kind for kind in ([n for n in nodes if n.server.role != "decode"], _writers(nodes)) if kind]
        waiting = {asyncio.create_task(self._heard[node.name].wait()) for node in nodes if not self._is_heard(node)}
        tasks, until = set(waiting), asyncio.get_running_loop().time() + patience_s
        try:
            while waiting and not all(any(node.usable for node in kind) for kind in kinds):
                left_s = until - asyncio.get_running_loop().time()
                done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    return
        finally:
            for task in tasks:
                task.cancel()

    def _is_heard(self, node: NodeState) -> bool:
        return self._heard[node.name].is_set()

    async def look(self, names: Iterable[str] | None = None) -> None:
        """Ask now."""
        await asyncio.gather(*(self._ask(self.nodes[name]) for name in (names or self.nodes)))

    async def _keep_asking(self, node: NodeState) -> None:
        while True:
            await self._ask(node)
            every_s = self.config.policies.poll_s if node.reachable else min(_AGAIN_S, self.config.policies.poll_s)
            await asyncio.sleep(every_s * random.uniform(1 - _JITTER, 1 + _JITTER))

    async def _ask(self, node: NodeState) -> None:
        before = node.usable
        try:
            if await node.poll():
                self.prefix_index.forget(node.name)
            self._compare(node.model)
        except Exception:  # the watch must go on
            log.exception("asking %s failed", node.name)
        if node.was_asked:  # not, if it was only slow to answer
            self._heard[node.name].set()
        if node.usable != before:
            about = {"node": node.name, "model": node.model}
            if node.usable:
                log.info("%s is usable", node.name, extra=about)
            else:
                log.warning("%s is not usable: %s", node.name, node.why, extra=about)

    def _compare(self, model: str) -> None:
        """Who holds the same model. The largest group that can answer is the model; of equal ones the one that was, or
        that can hand over, or whose decode node comes first in the config. Whoever holds something else answers for
        nobody, and says why. A node that is away counts with its group as long as that is not all away for long: or one
        that holds something else would become the model by the death of the right one."""
        nodes = [node for node in self.of(model) if node.about]
        groups: list[list[NodeState]] = []
        for node in sorted(nodes, key=lambda node: (_coarseness(node), node.server.role == "prefill")):
            same = [group for group in groups if not _differences(group, node)]
            for group in same:
                group.append(node)
            if not same:
                groups.append([node])
        if here := [group for group in groups if any(_is_or_was(node) for node in group)]:
            right = max(here, key=_standing)
            for node in nodes:
                node.mismatch = "" if node in right else _differences(right, node)

    def view(self, model: str) -> ClusterView:
        nodes = self.of(model)
        pairs = [(p, d) for p in nodes for d in nodes if p is not d and p.status and d.status and d.role != "prefill"]
        links = {(p.name, d.name): speed for p, d in pairs if (speed := self._speed(p, d))}
        views = (node.view("" if node.mismatch or not node.about else model) for node in nodes)
        known = {(p.name, d.name): bool(peer.refused) for p, d in pairs if (peer := d.verdict_on(p))}
        met, refused = (frozenset(pair for pair, no in known.items() if no is kind) for kind in (False, True))
        return ClusterView(nodes=tuple(views), links=links, met=met, refused=refused)

    def refusals(self, model: str) -> list[dict[str, str]]:
        """Which node takes no cache of which, and why, for people."""
        return [
            {"prefill": p.name, "decode": d.name, "why": peer.refused}
            for p in self.of(model)
            for d in self.of(model)
            if p.reachable and d.reachable and (peer := d.verdict_on(p)) and peer.refused
        ]

    def _speed(self, prefill: NodeState, decode: NodeState) -> float | None:
        """Measured where it was, else as the config says."""
        assert prefill.status
        assert decode.status
        own = {address.rpartition(":")[2] for address in prefill.status.kv_addresses}
        hosts = {prefill.server.host, *(address.rpartition(":")[0] for address in prefill.status.kv_addresses)}
        hosts |= {address.rpartition(":")[0] or address for address in prefill.server.kv_addresses}
        speeds = [
            path.goodput_bytes_s
            for path in decode.status.paths
            if path.goodput_bytes_s and str(path.port) in own and path.host in hosts
        ]
        return max(speeds) if speeds else self._links.get((prefill.name, decode.name))

    def epochs(self, model: str) -> dict[str, str]:
        return {node.name: node.epoch for node in self.of(model)}


def _is_or_was(node: NodeState) -> bool:
    return node.reachable or time.monotonic() - node.heard_at < _MISSED_S


def _writers(nodes: list[NodeState]) -> list[NodeState]:
    return [node for node in nodes if node.server.role != "prefill"]


def _standing(group: list[NodeState]) -> tuple[bool, int, bool, bool]:
    hands_over = any(node.server.role != "decode" for node in group)
    return bool(_writers(group)), len(group), not all(node.mismatch for node in group), hands_over


def _coarseness(node: NodeState) -> float:
    """Those whose weights are rounded least come first: two that differ may both be like a third that is rounded."""
    who = node.about and node.about.fingerprint
    return who.weights.rounding if who else 0.0


def _differences(group: list[NodeState], node: NodeState) -> str:
    """From the first of them that holds something else; empty where nobody does."""
    for other in group:
        assert other.about
        assert node.about
        if differs := other.about.differences(node.about):
            return f"it holds another model than {other.name}: {'; '.join(differs)}"
    return ""
