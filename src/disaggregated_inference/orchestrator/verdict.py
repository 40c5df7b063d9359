"""Verdicts: whether a model's nodes can serve, in one of five phrases."""

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
    """The verdict of all models; if they differ, that of each."""
    models = dict.fromkeys(node.model for node in nodes)
    found = {model: model_verdict([node for node in nodes if node.model == model]) for model in models}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return "; ".join(f"{model}: {verdict}" for model, verdict in found.items())
