"""Why nodes do not serve a request: one cause per node, for error messages and warnings."""

from collections.abc import Iterable, Sequence

from disaggregated_inference.api import Failover
from disaggregated_inference.errors import NoDecodeNode
from disaggregated_inference.orchestrator.node_state import NodeState

_MAX_CHARS = 300  # of one cause: two fingerprints may differ in many places


def node_causes(nodes: Iterable[NodeState], failovers: Sequence[Failover] = ()) -> list[str]:
    """`NODE: CAUSE` for each node that has one: its first failure in this request, else why it is not usable."""
    first = {failover.node: failover.message for failover in reversed(failovers)}
    found = {node.name: first.get(node.name) or node.why for node in nodes}
    return [f"{name}: {cause}"[:_MAX_CHARS] for name, cause in found.items() if cause]


def no_decode_node(model: str, nodes: Iterable[NodeState], failovers: Sequence[Failover] = ()) -> NoDecodeNode:
    """`nodes`: all of the model. One that has the wrong role is a cause too."""
    candidates = [node for node in nodes if {node.role, node.server.role} != {"prefill"} or node.whole_answers]
    if not candidates:
        return NoDecodeNode([f"the cluster file has no decode server for {model}"])
    return NoDecodeNode(node_causes(candidates, failovers))


def prefill_causes(nodes: Iterable[NodeState], decode: str, failovers: Sequence[Failover] = ()) -> list[str]:
    """Why the prefill nodes leave a prompt to the decode node."""
    return node_causes([node for node in nodes if node.server.role != "decode" and node.name != decode], failovers)
