"""What a request has learnt from its failures: whom to leave out of the next attempt, and whether there is one."""

from disaggregated_inference.cluster.config import Policies
from disaggregated_inference.orchestrator.cluster_view import Route
from disaggregated_inference.orchestrator.node_client import LegFailed
from disaggregated_inference.orchestrator.node_state import NodeState
from disaggregated_inference.orchestrator.recorder import Attempt
from disaggregated_inference.orchestrator.registry import NodeRegistry

_REFUSED, _TOO_LARGE = "peer_refused", "request_too_large"
_LOOK = frozenset({"node_restarted", "not_found", _REFUSED})  # who is it now, that nobody had noticed?
_MOST_DECODE_FAILURES = 3  # a request that nobody survives must not go through everyone


class FailoverState:
    def __init__(self, registry: NodeRegistry, model: str, policies: Policies) -> None:
        self._registry, self._model, self._policies = registry, model, policies
        self.avoid: set[tuple[str, str]] = set()  # nodes that failed this request, in the epoch in which they did
        self._refused: set[tuple[str, str]] = set()  # pairs whose canary was not right
        self.pinned: str | None = None  # the decode node that has a part of the cache already
        self.prefill_failures = 0
        self._decode_failures = 0
        self.too_large: LegFailed | None = None  # what the last node said that could never hold it

    @property
    def fell_back(self) -> bool:
        return self.prefill_failures > self._policies.retries

    def allows(self, option: Route) -> bool:
        return (option.prefill, option.decode) not in self._refused

    def has_readers(self, decode: str) -> bool:
        """Or the config has no prefill nodes for this model: a decode node that reads is then as it should be."""
        readers = [
            node for node in self._registry.of(self._model) if node.server.role != "decode" and node.name != decode
        ]
        return not readers or any(node.usable and not self._is_refused(node, decode) for node in readers)

    def _is_refused(self, prefill: NodeState, decode: str) -> bool:
        verdict = self._registry.nodes[decode].verdict_on(prefill)
        return (prefill.name, decode) in self._refused or bool(verdict and verdict.refused)

    def learn(self, failure: LegFailed, attempt: Attempt) -> bool:
        """About the nodes, and for the next attempt; whether there is one."""
        option, blamed = attempt.option, self.blamed(failure, attempt.option)
        if failure.code == _REFUSED and option.prefill:  # both are well, with others
            self._refused.add((option.prefill, option.decode))
            return True
        if failure.code != _TOO_LARGE:  # so is one that is only small
            blamed.breaker.failed(str(failure), hard=failure.hard)
        if failure.code == "unreachable":
            blamed.lost(str(failure), quiet=failure.silent or failure.broke)
        death = (blamed.name, attempt.epochs[blamed.name])
        known = death in self.avoid  # several choices may see the same one
        self.avoid.add(death)
        if blamed.name == option.prefill:
            return self._learn_of_prefill(blamed, option.decode, known, failure.code == _TOO_LARGE)
        self.pinned = None
        if failure.code == _TOO_LARGE:
            self.too_large = failure
            return True
        self._decode_failures += not known
        return self._decode_failures <= max(_MOST_DECODE_FAILURES, self._policies.retries)

    def blamed(self, failure: LegFailed, option: Route) -> NodeState:
        of_prefill = failure.of_prefill or failure.node == option.prefill
        return self._registry.nodes[option.prefill if of_prefill and option.prefill else option.decode]

    def wants_a_look(self, failure: LegFailed) -> bool:
        return failure.code in _LOOK

    def _learn_of_prefill(self, blamed: NodeState, decode: str, known: bool, for_good: bool) -> bool:
        """The decode node keeps what had arrived whole: the next attempt goes there, whoever reads the rest."""
        self.prefill_failures += not known
        self.pinned = decode
        others = [node for node in self._registry.of(self._model) if node is not blamed and node.role != "decode"]
        if not for_good and not any(node.usable and node.name != decode for node in others):
            self.avoid.discard((blamed.name, blamed.epoch))  # the only one: it may try once more
        return self._policies.fallback or not self.fell_back
