"""What clients are told of the cluster: each node, each model's verdict, links, the queue, and what was served."""

from typing import Any

from disaggregated_inference.api import ClusterNode, ClusterStatus, LatencyStatus
from disaggregated_inference.orchestrator.outcomes import Outcomes
from disaggregated_inference.orchestrator.registry import NodeRegistry
from disaggregated_inference.orchestrator.request_queue import RequestQueue
from disaggregated_inference.orchestrator.verdict import cluster_verdict, model_verdict, warnings_of


def health_report(registry: NodeRegistry) -> dict[str, Any]:
    nodes = list(registry.nodes.values())
    return {
        "verdict": cluster_verdict(nodes),
        "nodes": {node.name: _brief(node.summary()) for node in nodes},
        "warnings": warnings_of(nodes),
    }


def status_report(registry: NodeRegistry, queue: RequestQueue, outcomes: Outcomes) -> ClusterStatus:
    names, nodes = registry.config.names, list(registry.nodes.values())
    links = tuple(link for model in names for link in registry.links(model))
    return ClusterStatus(
        verdict=cluster_verdict(nodes),
        models={model: model_verdict(registry.of(model)) for model in names},
        nodes=tuple(node.summary() for node in nodes),
        links=links,
        refusals=tuple(refusal for model in names for refusal in registry.refusals(model)),
        warnings=(*warnings_of(nodes), *(link.warning for link in links if link.warning)),
        queue=queue.status(),
        served={outcome: count for outcome, count in outcomes.counts.items()},
        uptime=registry.uptime.share,
        latency=LatencyStatus(total_time=outcomes.history.total_time_percentiles()),
    )


def _brief(node: ClusterNode) -> dict[str, Any]:
    return {
        "state": node.state,
        "why": node.why,
        "warning": node.warning,
        "role": node.role,
        "model": node.model,
        "node_model": node.node_model,
        "engine": node.engine,
        "url": node.url,
        "usable": node.usable,
    }
