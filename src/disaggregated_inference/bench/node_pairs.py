"""KV handed over between nodes, compared with the decode engine alone: two node processes at a time on loopback."""

import os
from collections.abc import Iterable, Sequence

from disaggregated_inference.bench.prompts import resolve_model, text_prompt
from disaggregated_inference.bench.report import Report, Row, progress
from disaggregated_inference.engines import file_kind, require_engine
from disaggregated_inference.local_nodes import (
    ClientView,
    LocalNode,
    generate_disaggregated,
    generate_local,
    running,
    shared_cores,
)

_TOKENS = 4  # only the first token is measured
_CHUNK = 256
_ROLES = {"prefill": ("--chunk", str(_CHUNK)), "decode": ("--kv-streams", "4")}

Views = list[ClientView]


def bench_pairs(engines: Sequence[str], model_name: str, length: int, repeats: int) -> Report:
    """Every engine prefills for every engine. An engine that prefills for itself is also two processes."""
    for name in engines:
        require_engine(name)
    model, *_ = [resolve_model(model_name, file_kind(name)) for name in engines]
    threads = (shared_cores() | os.environ)["OMP_NUM_THREADS"]
    report = Report(f"pairs over nodes, {model.name}, prompt {length}, chunks of {_CHUNK}, {threads} threads each")
    progress(f"starting two nodes each of {', '.join(engines)}")
    prefill, decode = ([_node(role, name, model_name) for name in engines] for role in _ROLES)
    with running([*prefill, *decode]):
        for node in decode:
            progress(f"{node.engine} decodes")
            alone, handed = hand_over_in_turn(prefill, node, text_prompt(model, length), _TOKENS, repeats)
            for name, completions in zip(engines, handed, strict=True):
                _pair_rows(report, f"{name} → {node.engine}", completions, alone, f"{node.engine} alone")
    return report


def _node(role: str, engine: str, model_name: str) -> LocalNode:
    """float32 where tokens can be compared; llama.cpp with its usual dtype."""
    dtype = () if engine == "llamacpp" else ("--dtype", "float32")
    shared = ("--model", model_name, "--kv-memory", "1G", "--prefix-memory", "0")
    return LocalNode(role, engine, *_ROLES[role], *shared, *dtype)


def hand_over_in_turn(
    prefill: Sequence[LocalNode], decode: LocalNode, tokens: list[int], count: int, repeats: int
) -> tuple[Views, list[Views]]:
    """Completions of the decode node alone, and with each prefill node. The first round is the warm-up and does the
    peer checks."""
    alone: Views = []
    handed: list[Views] = [[] for _ in prefill]
    for _ in range(repeats + 1):
        alone.append(generate_local(decode, tokens, count))
        for node, completions in zip(prefill, handed, strict=True):
            completions.append(generate_disaggregated(node, decode, tokens, count))
            same_weights = file_kind(node.engine) == file_kind(decode.engine)
            same_tokens = completions[-1].token_ids == alone[-1].token_ids
            assert same_tokens or not same_weights, "the hand-off changed the answer"
    return alone[1:], [completions[1:] for completions in handed]


def best_first_token(completions: Iterable[ClientView]) -> float:
    return min(completion.first_token_s for completion in completions)


def exposed_transfer_ms(completions: Iterable[ClientView]) -> float:
    return min(completion.node_metrics.exposed_transfer_time for completion in completions) * 1e3


def _pair_rows(report: Report, pair: str, handed: Views, alone: Views, against: str) -> None:
    report.add(Row(f"{pair}, first token", best_first_token(handed), "s", best_first_token(alone), against))
    report.add(Row(f"{pair}, exposed transfer", exposed_transfer_ms(handed), "ms"))
