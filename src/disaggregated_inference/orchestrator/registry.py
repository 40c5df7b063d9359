"""The registry of nodes: polls every node in a loop of its own, so that a slow node delays no other and no request."""

import asyncio
import logging
import random
import time
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import aiohttp
from msgspec import UNSET, UnsetType

from disaggregated_inference.api import ClusterLink, KVRefusal, KVSecurity, NodeStatus
from disaggregated_inference.cluster import ClusterConfig
from disaggregated_inference.orchestrator.cluster_view import ClusterView, Route
from disaggregated_inference.orchestrator.heartbeat import Heartbeats
from disaggregated_inference.orchestrator.links import link_warning, paths_between
from disaggregated_inference.orchestrator.node_state import NodeState
from disaggregated_inference.orchestrator.prefix_index import PrefixIndex
from disaggregated_inference.orchestrator.uptime import Uptime
from disaggregated_inference.orchestrator.verdict import model_verdict
from disaggregated_inference.timeouts import OrchestratorTimeouts

log = logging.getLogger(__name__)

_JITTER = 0.2


class _Pairs(NamedTuple):
    """What is known of pairs of a prefill node and a decode node, from these statuses."""

    statuses: list[NodeStatus | None]
    links: dict[tuple[str, str], float]
    checked: frozenset[tuple[str, str]]
    refused: frozenset[tuple[str, str]]


class NodeRegistry:
    """All nodes of a config. Call `start` on the event loop that will use it."""

    def __init__(
        self,
        config: ClusterConfig,
        session: aiohttp.ClientSession,
        timeouts: OrchestratorTimeouts = OrchestratorTimeouts(),
    ) -> None:
        self.config, self.timeouts, self._session = config, timeouts, session
        self.prefix_index = PrefixIndex()
        self._heartbeats = Heartbeats(timeouts)
        self.nodes: dict[str, NodeState] = {}
        for server in config.servers:
            model = config.resolve_model(server.model)
            node = self.nodes[server.name] = NodeState(
                server, model, session, self._heartbeats, config.policies, config.spellings_of(model)
            )
            node.client.replaceable = partial(self._replaceable, node)
        self._of = {model: [node for node in self.nodes.values() if node.model == model] for model in config.names}
        self._pairs: dict[str, _Pairs] = {}  # of the latest statuses, by model
        self._check_credit_s: dict[tuple[str, str], float] = {}
        self._links = {(link.prefill, link.decode): link.gbps * 1e9 / 8 for link in config.links if link.gbps}
        self._securities = {(link.prefill, link.decode): link.security for link in config.links if link.security}
        self.uptime = Uptime()
        self._polled = {name: asyncio.Event() for name in self.nodes}
        self._tasks: list[asyncio.Task[None]] = []

    def _replaceable(self, node: NodeState) -> bool:
        """Any node replaces a prefill node, since decode nodes prefill too; only a decode node replaces a decode
        node."""
        others = [other for other in self.of(node.model) if other is not node and other.usable]
        return any(node.role == "prefill" or other.can_decode for other in others)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_polling(node)) for node in self.nodes.values()]
        self._tasks.append(asyncio.create_task(self._heartbeats.run()))
        self._tasks.append(asyncio.create_task(self._close_session_at_end()))

    async def _close_session_at_end(self) -> None:
        """`asyncio.run` cancels the tasks that are left: a program without `aclose` leaves no connection open."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await self._session.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()  # again, where its task had not begun

    def of(self, model: str) -> list[NodeState]:
        return self._of.get(model, [])

    async def wait_for_status(self, model: str) -> None:
        """Until every node of a model was polled once, or one of each role is usable. Only the first requests wait."""
        nodes = self.of(model)
        if all(self._was_polled(node) for node in nodes):
            return
        roles = [role for role in ([n for n in nodes if n.server.role != "decode"], _decoders(nodes)) if role]
        waiting = {asyncio.create_task(self._polled[node.name].wait()) for node in nodes if not self._was_polled(node)}
        tasks, until = set(waiting), asyncio.get_running_loop().time() + self.timeouts.first_status_s
        try:
            while waiting and not all(any(node.usable for node in role) for role in roles):
                left_s = until - asyncio.get_running_loop().time()
                done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    return
        finally:
            for task in tasks:
                task.cancel()

    def _was_polled(self, node: NodeState) -> bool:
        return self._polled[node.name].is_set()

    async def refresh(self, names: Iterable[str] | None = None) -> None:
        """Poll these nodes, or all, now."""
        await asyncio.gather(*(self._poll(self.nodes[name]) for name in (names or self.nodes)))

    async def _keep_polling(self, node: NodeState) -> None:
        usual_s = self.config.policies.poll_s
        while True:
            await self._poll(node)
            every_s = usual_s if node.reachable else min(self.timeouts.poll_missing_s, usual_s)
            await asyncio.sleep(every_s * random.uniform(1 - _JITTER, 1 + _JITTER))

    async def _poll(self, node: NodeState) -> None:
        before, warned = node.usable, node.misnamed
        try:
            if await node.poll():
                self.prefix_index.forget(node.name)
            self._compare(node.model)
        except Exception:  # polling must go on
            log.exception("polling %s failed", node.name)
        if node.was_polled:  # not if it was only slow to answer
            self._polled[node.name].set()
        if all(event.is_set() for event in self._polled.values()):
            self.uptime.observe(all(model_verdict(self.of(model)).serves for model in self.config.names))
        extra = {"node": node.name, "model": node.model}
        if node.misnamed and node.misnamed != warned:
            log.warning("%s: %s", node.name, node.misnamed, extra=extra | {"node_model": node.own_model})
        if node.usable != before:
            if node.usable:
                log.info("%s is usable", node.name, extra=extra)
            else:
                log.warning("%s is not usable: %s", node.name, node.why, extra=extra)

    def _compare(self, model: str) -> None:
        """Groups the nodes that hold the same model. The largest group that can answer serves as the model; of equal
        groups the one that did so before, or that can hand over, or whose decode node comes first in the config. A
        node that holds something else answers no request, and says why. An unreachable node counts for its group for
        a while: otherwise a node with another model would become the model when the right one dies. With
        `strict_models` a node that names its model otherwise belongs to no group."""
        refused = [node for node in self.of(model) if node.misnamed and self.config.policies.strict_models]
        for node in refused:
            node.mismatch = node.misnamed
        nodes = [node for node in self.of(model) if node.info and node not in refused]
        groups: list[list[NodeState]] = []
        for node in sorted(nodes, key=lambda node: (_coarseness(node), node.server.role == "prefill")):
            same = [group for group in groups if not _differences(group, node)]
            for group in same:
                group.append(node)
            if not same:
                groups.append([node])
        if present := [group for group in groups if any(self._is_present(node) for node in group)]:
            right = max(present, key=_reference_rank)
            for node in nodes:
                node.mismatch = "" if node in right else _differences(right, node)

    def _is_present(self, node: NodeState) -> bool:
        return node.reachable or time.monotonic() - node.polled_at < self.timeouts.missing_model_s

    def view(self, model: str) -> ClusterView:
        nodes = self.of(model)
        views = [node.view("" if node.mismatch or not node.info else model) for node in nodes]
        pairs = self._pairs_of(model, nodes)
        return ClusterView(
            nodes=tuple(views),
            links=pairs.links,
            checked=pairs.checked,
            refused=pairs.refused,
            check_credit_s=dict(self._check_credit_s),
        )

    def credit_checks(self, taken: Route, routes: Iterable[Route]) -> None:
        """Note what this request loses because it avoids peer checks: `routes` are those it could have taken."""
        taken_s = taken.total_s - taken.check_s
        for route in routes:
            if route.check_s and route.prefill and (lost_s := taken_s - route.total_s + route.check_s) > 0:
                pair = route.prefill, route.decode
                self._check_credit_s[pair] = self._check_credit_s.get(pair, 0.0) + lost_s
        if taken.check_s and taken.prefill:
            self._check_credit_s.pop((taken.prefill, taken.decode), None)

    def _pairs_of(self, model: str, nodes: list[NodeState]) -> "_Pairs":
        """Made again when a node has a new status."""
        statuses, found = [node.status for node in nodes], self._pairs.get(model)
        if found is None or any(status is not known for status, known in zip(statuses, found.statuses, strict=True)):
            pairs = [(p, d) for p in nodes for d in nodes if p is not d and p.status and d.status]
            pairs = [(p, d) for p, d in pairs if d.role != "prefill"]
            links = {(p.name, d.name): speed for p, d in pairs if (speed := self._speed(p, d))}
            known = {(p.name, d.name): bool(peer.refused) for p, d in pairs if (peer := d.peer_status(p))}
            checked, refused = (frozenset(pair for pair, no in known.items() if no is kind) for kind in (False, True))
            found = self._pairs[model] = _Pairs(statuses, links, checked, refused)
        return found

    def refusals(self, model: str) -> list[KVRefusal]:
        """Which decode node refuses KV of which prefill node, and why, for people."""
        return [
            KVRefusal(prefill=p.name, decode=d.name, why=peer.refused)
            for p in self.of(model)
            for d in self.of(model)
            if p.reachable and d.reachable and (peer := d.peer_status(p)) and peer.refused
        ]

    def links(self, model: str) -> list[ClusterLink]:
        """Every link whose speed is known, for people."""
        return [self._link(p, d, speed) for (p, d), speed in self.view(model).links.items()]

    def _link(self, prefill: str, decode: str, speed: float) -> ClusterLink:
        paths = paths_between(self.nodes[prefill], self.nodes[decode])
        return ClusterLink(
            prefill=prefill,
            decode=decode,
            bytes_per_s=speed,
            line_rate_bytes_s=self.line_rate(prefill, decode),
            measured=any(path.goodput_bytes_s for path in paths),
            payload_bytes=sum(path.payload_bytes for path in paths),
            connections=sum(path.connections for path in paths),
            warning=link_warning(prefill, decode, paths, self.line_rate(prefill, decode)),
        )

    def _speed(self, prefill: NodeState, decode: NodeState) -> float | None:
        """Bytes per second: measured if there is a measurement, else from the config."""
        speeds = [path.goodput_bytes_s for path in paths_between(prefill, decode) if path.goodput_bytes_s]
        return max(speeds) if speeds else self._links.get((prefill.name, decode.name))

    def line_rate(self, prefill: str, decode: str) -> float | None:
        """Bytes per second that the config expects of a link."""
        return self._links.get((prefill, decode))

    def kv_security(self, prefill: str, decode: str) -> KVSecurity | UnsetType:
        """Of their KV transfers, if the config says it."""
        return self._securities.get((prefill, decode), UNSET)

    def epochs(self, model: str) -> dict[str, str]:
        return {node.name: node.epoch for node in self.of(model)}


def _decoders(nodes: list[NodeState]) -> list[NodeState]:
    return [node for node in nodes if node.server.role != "prefill"]


def _reference_rank(group: list[NodeState]) -> tuple[bool, bool, int, bool, bool]:
    """A node with the name of the cluster file makes its group the likelier one."""
    hands_over = any(node.server.role != "decode" for node in group)
    named = any(not node.misnamed for node in group)
    return bool(_decoders(group)), named, len(group), not all(node.mismatch for node in group), hands_over


def _coarseness(node: NodeState) -> float:
    """Nodes whose weights are rounded least come first: two that differ may both be like a third, coarser one."""
    fingerprint = node.info and node.info.fingerprint
    return fingerprint.weights.rounding if fingerprint else 0.0


def _differences(group: list[NodeState], node: NodeState) -> str:
    """From the first node of the group that holds another model; empty if all hold the same."""
    for other in group:
        assert other.info
        assert node.info
        if differs := other.info.differences(node.info):
            return f"it holds another model than {other.name}: {'; '.join(differs)}"
    return ""
