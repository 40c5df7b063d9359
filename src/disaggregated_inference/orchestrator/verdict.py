"""Verdicts: whether a model's nodes can serve, in one of six phrases."""

from collections.abc import Iterable, Sequence

from disaggregated_inference.api import ModelVerdict
from disaggregated_inference.orchestrator.node_state import NodeState


def model_verdict(nodes: list[NodeState]) -> ModelVerdict:
    found = verdict_of([(node.role, node.serves) for node in nodes])
    alone = found is ModelVerdict.DECODE_DOWN and any(node.serves and node.whole_answers for node in nodes)
    return ModelVerdict.WHOLE_ANSWERS if alone else found


def verdict_of(nodes: Sequence[tuple[str, bool]]) -> ModelVerdict:
    """Of a model's nodes: the role of each, and whether it serves."""
    prefill = [serves for role, serves in nodes if role != "decode"]
    decode = [serves for role, serves in nodes if role != "prefill"]
    if all(prefill + decode):
        return ModelVerdict.ALL_UP
    if not any(prefill + decode):
        return ModelVerdict.NOTHING_UP
    if not any(decode):
        return ModelVerdict.DECODE_DOWN
    return ModelVerdict.SOME_DOWN if any(prefill) or not prefill else ModelVerdict.PREFILL_DOWN


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
