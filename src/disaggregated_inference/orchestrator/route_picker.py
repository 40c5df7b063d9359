"""Picks the route of one attempt: the router's best that the policies and the request's own failures allow."""

import time
from enum import Enum

from disaggregated_inference.api import LocalPrefill, ModelInfo, ModelVerdict
from disaggregated_inference.errors import ClusterError
from disaggregated_inference.orchestrator.cluster_view import Plan, Route, RouteRequest
from disaggregated_inference.orchestrator.failover import FailoverState
from disaggregated_inference.orchestrator.node_state import NodeState
from disaggregated_inference.orchestrator.registry import NodeRegistry
from disaggregated_inference.orchestrator.router import plan
from disaggregated_inference.orchestrator.unavailable_nodes import prefill_causes
from disaggregated_inference.orchestrator.verdict import model_verdict

_MAX_EXPLORATION = 4.0  # times the best route's time, at most
_QUICK_EXPLORATIONS = 6


class Cause(Enum):
    """Why a route was taken that the router did not choose."""

    REQUEST = "the request asks for it"
    POLICY = "by policies.local = {local}"
    FAILURE = "after a failure of this request"
    EXPLORED = "to measure a node again"
    IMPOSSIBLE = "no other way is allowed now"


class RoutePicker:
    """`local`: the request's own wish, instead of the policy."""

    def __init__(
        self,
        registry: NodeRegistry,
        model: str,
        failover: FailoverState,
        *,
        can_transfer_kv: bool,
        local: LocalPrefill | None = None,
    ) -> None:
        self._registry, self._model, self._failover = registry, model, failover
        self._policies = registry.config.policies
        self._local, self._is_forced = local or self._policies.local, local not in (None, "auto")
        self._can_transfer_kv = can_transfer_kv  # false: no KV can move, whatever the policies say
        self.info: ModelInfo | None = None  # the model that the request began with

    def excluded(self) -> frozenset[str]:
        """Nodes that failed this request and were not restarted since, and nodes with another model."""
        epochs = self._registry.epochs(self._model)
        failed = frozenset(name for name, epoch in self._failover.avoid if epochs.get(name) == epoch)
        return failed | self.other_models()

    def other_models(self) -> frozenset[str]:
        """Nodes that hold another model than the request began with, whatever the model's name means by now."""
        info, nodes = self.info, self._registry.of(self._model)
        return frozenset(node.name for node in nodes if info and node.info and info.differences(node.info))

    def pick(self, request: RouteRequest, *, explore: bool) -> tuple[Route, str]:
        """The route, and the reason for it."""
        planned = plan(request, self._registry.view(self._model))
        routes = list(filter(self._failover.allows, planned.routes))
        pinned = [route for route in routes if self._is_pinned(route)]
        for candidates in (pinned, routes):
            allowed = [route for route in candidates if self._keeps_policy(route) and self._may_fall_back(route)]
            if allowed:
                route = self._explore(allowed) if explore else allowed[0]
                self._registry.credit_checks(route, allowed)
                return route, self._reason(planned, route, is_explored=route is not allowed[0])
        if not self._policies.fallback:
            causes = "; ".join(prefill_causes(self._registry.of(self._model), routes[0].decode)) if routes else ""
            message = "no prefill node can read this prompt, and the config allows no fallback"
            raise ClusterError(f"{message}: {causes}" if causes else message)
        if not routes or (self._failover.fell_back and all(route.prefill for route in routes)):
            raise ClusterError("the prefill nodes failed, and no decode node can compute prompt logprobs: try again")
        route = pinned[0] if pinned else routes[0]
        return route, self._reason(planned, route)

    def _reason(self, planned: Plan, route: Route, is_explored: bool = False) -> str:
        """The router's sentence where its choice was taken; otherwise what was taken in its place, and why."""
        cause = self._cause(route, is_explored)
        if route is planned.routes[0] and cause is not Cause.REQUEST:
            return planned.reason
        best = planned.routes[0]
        compared = (
            "the fastest way, too" if route is best else f"the fastest is {_way(best)}, done in {best.total_s:.2f} s"
        )
        return f"{_way(route)}: {cause.value.format(local=self._local)}, done in {route.total_s:.2f} s; {compared}"

    def _cause(self, route: Route, is_explored: bool) -> "Cause":
        if self._failover.avoid or self._failover.prefill_failures or self._failover.pinned:
            return Cause.FAILURE
        if self._is_forced and self._can_transfer_kv:
            return Cause.REQUEST if self._keeps_policy(route) else Cause.IMPOSSIBLE
        if is_explored:
            return Cause.EXPLORED
        return Cause.POLICY if self._local != "auto" and self._keeps_policy(route) else Cause.IMPOSSIBLE

    def is_fallback(self, route: Route) -> bool:
        if not self._can_transfer_kv or route.prefill is not None or self._local == "always" or self.is_whole(route):
            return False
        failed = self._failover.prefill_failures > 0 or self.prefill_is_down(route)
        return failed or not self._failover.prefill_expected(route.decode)

    def is_whole(self, route: Route) -> bool:
        """A prefill node writes the answer too."""
        return self._registry.nodes[route.decode].whole_answers

    def prefill_is_down(self, route: Route) -> bool:
        """The decode node prefills, and the verdict on its model is that no prefill node is there: with any policy, the
        cluster is in its fallback mode."""
        nodes = self._registry.of(self._model)
        return route.prefill is None and model_verdict(nodes) is ModelVerdict.PREFILL_DOWN

    def decode_is_down(self) -> bool:
        return model_verdict(self._registry.of(self._model)) is ModelVerdict.WHOLE_ANSWERS

    def _may_fall_back(self, route: Route) -> bool:
        return self._policies.fallback or not self.is_fallback(route)

    def _is_pinned(self, route: Route) -> bool:
        return route.decode == self._failover.pinned

    def _keeps_policy(self, route: Route) -> bool:
        local = self._local
        if not self._can_transfer_kv:
            return True
        if local == "always":
            return route.prefill is None and not self.is_whole(route)
        if self._failover.fell_back:
            return route.prefill is None
        return route.prefill is not None or (local == "auto" and not self._failover.prefill_failures)

    def _explore(self, routes: list[Route]) -> Route:
        """The best, but for one request in a while: a node that was slow is tried again, to find out whether it still
        is."""
        best, *others = routes
        for route in others:
            names = {route.prefill, route.decode} - {best.prefill, best.decode, None}
            due = [node for name in names if name and self._is_due(node := self._registry.nodes[name])]
            if due and route.total_s - route.check_s < _MAX_EXPLORATION * best.total_s:
                for node in due:
                    node.explorations += 1
                return route
        return best

    def _is_due(self, node: NodeState) -> bool:
        """A node that slowed, or was measured only at its start, gets a few requests soon: three fast ones make its
        estimate fast again."""
        timeouts, doubtful = self._registry.timeouts, node.doubtful and node.explorations < _QUICK_EXPLORATIONS
        return time.monotonic() - node.used_at > (timeouts.explore_doubtful_s if doubtful else timeouts.explore_s)


def _way(route: Route) -> str:
    return f"{route.prefill} -> {route.decode}" if route.prefill else f"local on {route.decode}"
