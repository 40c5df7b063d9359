"""Verdicts: whether a model's nodes can serve, in one of five phrases."""

from collections.abc import Iterable
from enum import StrEnum

from disaggregated_inference.orchestrator.node_state import NodeState


class Verdict(StrEnum):
    ALL_UP = "all up"
    SOME_DOWN = "a node is down, others serve"
    PREFILL_DOWN = "prefill down: decode-only"
    DECODE_DOWN = "decode down: cannot serve"
    NOTHING_UP = "nothing is up"

    @property
    def serves(self) -> bool:
        return self not in (Verdict.DECODE_DOWN, Verdict.NOTHING_UP)


def model_verdict(nodes: list[NodeState]) -> Verdict:
    prefill = [node.serves for node in nodes if node.role != "decode"]
    decode = [node.serves for node in nodes if node.role != "prefill"]
    if all(prefill + decode):
        return Verdict.ALL_UP
    if not any(prefill + decode):
        return Verdict.NOTHING_UP
    if not any(decode):
        return Verdict.DECODE_DOWN
    return Verdict.SOME_DOWN if any(prefill) or not prefill else Verdict.PREFILL_DOWN


def cluster_verdict(nodes: list[NodeState]) -> str:
    """The verdict of all models; if they differ, that of each. Then the nodes with a warning."""
    models = dict.fromkeys(node.model for node in nodes)
    found = {model: model_verdict([node for node in nodes if node.model == model]) for model in models}
    if len(set(found.values())) == 1:
        text = str(next(iter(found.values())))
    else:
        text = "; ".join(f"{model}: {verdict}" for model, verdict in found.items())
    misnamed = ", ".join(node.name for node in nodes if node.warning)
    return f"{text}; another model name on {misnamed}" if misnamed else text


def warnings_of(nodes: Iterable[NodeState]) -> list[str]:
    return [f"{node.name}: {node.warning}" for node in nodes if node.warning]
