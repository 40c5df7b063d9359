"""Failover: what a request learns from a failed leg. Which nodes the next attempt avoids, and whether there is one."""

from disaggregated_inference.cluster import Policies
from disaggregated_inference.orchestrator.attempt import Attempt
from disaggregated_inference.orchestrator.cluster_view import Route
from disaggregated_inference.orchestrator.leg_errors import LegFailed
from disaggregated_inference.orchestrator.node_state import NodeState
from disaggregated_inference.orchestrator.registry import NodeRegistry

_PEER_REFUSED, _TOO_LARGE, _BAD_ANSWER = "peer_refused", "request_too_large", "bad_answer"
_REFRESH_CODES = frozenset({"node_restarted", "not_found", _PEER_REFUSED})  # the node's status is out of date
_AWAY_CODES = frozenset({"unreachable", "node_loading"})
_MAX_DECODE_FAILURES = 3  # a request that kills every node must not go through all of them


class FailoverState:
    def __init__(self, registry: NodeRegistry, model: str, policies: Policies) -> None:
        self._registry, self._model, self._policies = registry, model, policies
        self.avoid: set[tuple[str, str]] = set()  # nodes that failed this request, with their epoch then
        self._refused: set[tuple[str, str]] = set()  # pairs that failed the peer check
        self.pinned: str | None = None  # the decode node that has a part of the KV already
        self.prefill_failures = 0
        self._decode_failures = 0
        self.too_large: LegFailed | None = None  # from the last node that could never hold the request

    @property
    def fell_back(self) -> bool:
        return self.prefill_failures > self._policies.retries

    def allows(self, route: Route) -> bool:
        return (route.prefill, route.decode) not in self._refused

    def prefill_expected(self, decode: str) -> bool:
        """False if local prefill would be a fallback: the config has prefill nodes for this model, and none is
        usable."""
        nodes = self._registry.of(self._model)
        readers = [node for node in nodes if node.server.role != "decode" and node.name != decode]
        return not readers or any(node.usable and not self._is_refused(node, decode) for node in readers)

    def _is_refused(self, prefill: NodeState, decode: str) -> bool:
        peer = self._registry.nodes[decode].peer_status(prefill)
        return (prefill.name, decode) in self._refused or bool(peer and peer.refused)

    def learn(self, failure: LegFailed, attempt: Attempt) -> bool:
        """Note the failure of a leg; returns whether there is a next attempt."""
        route, blamed = attempt.route, self.blamed(failure, attempt.route)
        if failure.code == _PEER_REFUSED and route.prefill:  # each node is fine with other partners
            self._refused.add((route.prefill, route.decode))
            return True
        if failure.code != _TOO_LARGE:  # a small node is no failing node
            blamed.breaker.failed(failure.reason_for(blamed.name), hard=failure.node_gone)
        if failure.code in _AWAY_CODES:
            blamed.lost(failure.reason_for(blamed.name), failure.code)
        death = (blamed.name, attempt.epochs[blamed.name])
        known = death in self.avoid  # several choices may see the same failure
        self.avoid.add(death)
        if blamed.name == route.prefill:
            return self._learn_of_prefill(blamed, route.decode, known, failure.code == _TOO_LARGE)
        self.pinned = None
        if failure.code == _TOO_LARGE:
            self.too_large = failure
            return True
        self._decode_failures += not known and failure.code != _BAD_ANSWER  # no request makes a node break the protocol
        return self._decode_failures <= max(_MAX_DECODE_FAILURES, self._policies.retries)

    def blamed(self, failure: LegFailed, route: Route) -> NodeState:
        of_prefill = failure.of_prefill or failure.node == route.prefill
        return self._registry.nodes[route.prefill if of_prefill and route.prefill else route.decode]

    def wants_refresh(self, failure: LegFailed) -> bool:
        return failure.code in _REFRESH_CODES

    def _learn_of_prefill(self, blamed: NodeState, decode: str, known: bool, permanent: bool) -> bool:
        """The decode node keeps every whole chunk that arrived: the next attempt goes there, from any prefill node."""
        self.prefill_failures += not known
        self.pinned = decode
        others = [node for node in self._registry.of(self._model) if node is not blamed and node.role != "decode"]
        if not permanent and not any(node.usable and node.name != decode for node in others):
            self.avoid.discard((blamed.name, blamed.epoch))  # the only prefill node may try once more
        return self._policies.fallback or not self.fell_back
