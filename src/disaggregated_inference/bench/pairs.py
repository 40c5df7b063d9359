"""Every engine reads for every engine: two node processes at a time, on loopback, each with its half of the cores."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from disaggregated_inference.bench.report import Report, Row
from disaggregated_inference.bench.texts import prompt_of
from disaggregated_inference.cli.progress import steps
from disaggregated_inference.cluster.local_nodes import (
    LocalNode,
    StreamedAnswer,
    finished,
    hand_over,
    shared_cores,
    write_alone,
)
from disaggregated_inference.engines import file_kind, require_engine
from disaggregated_inference.models import ModelStore

_ANSWER = 4  # the first token is what is measured
_CHUNK = 256

Progress = Callable[[str], None]
Nodes = dict[str, LocalNode]


def bench_pairs(engines: Sequence[str], model_name: str, length: int, repeats: int, progress: Progress) -> Report:
    """Time to the first token, against the decode engine alone, and what of the transfer is left after the prefill."""
    for name in engines:
        require_engine(name)
    with steps() as fetching:
        models = [ModelStore().resolve(model_name, fetching, file_kind(name)) for name in engines]
    threads = (shared_cores() | os.environ)["OMP_NUM_THREADS"]
    report = Report(f"pairs over nodes, {models[0].name}, prompt {length}, chunks of {_CHUNK}, {threads} threads each")
    with _nodes(engines, model_name, progress) as (readers, writers):
        for writer in writers.values():
            _writer_rows(report, readers, writer, prompt_of(models[0], length), repeats, progress)
    return report


@contextmanager
def _nodes(engines: Sequence[str], model_name: str, progress: Progress) -> Iterator[tuple[Nodes, Nodes]]:
    """All of them at once: idle ones take memory and no time. An engine that reads for itself is two processes, too."""
    progress(f"starting two nodes each of {', '.join(engines)}")
    with ExitStack() as stack:
        readers, writers = ({name: _node(stack, role, name, model_name) for name in engines} for role in _ROLES)
        for node in (*readers.values(), *writers.values()):
            node.ready()
        yield readers, writers


_ROLES = {"prefill": ("--chunk", str(_CHUNK)), "decode": ("--kv-streams", "4")}


def _node(stack: ExitStack, role: str, engine: str, model_name: str) -> LocalNode:
    """Caches in float32 where tokens can be compared; llama.cpp's as people run it."""
    dtype = () if engine == "llamacpp" else ("--dtype", "float32")
    shared = ("--model", model_name, "--kv-memory", "1G", "--prefix-memory", "0")
    node = LocalNode(role, engine, *_ROLES[role], *shared, *dtype)
    stack.callback(node.stop)
    return node


def _writer_rows(
    report: Report, readers: Nodes, writer: LocalNode, tokens: list[int], repeats: int, progress: Progress
) -> None:
    """In turn, the best of each; the first round is the warm-up, and the canary's."""
    alone: list[StreamedAnswer] = []
    handed: dict[str, list[StreamedAnswer]] = {name: [] for name in readers}
    for turn in range(repeats + 1):
        progress(f"{writer.engine} writes, round {turn} of {repeats}")
        alone.append(finished(write_alone(writer, tokens, _ANSWER)))
        for name, reader in readers.items():
            handed[name].append(finished(hand_over(reader, writer, tokens, _ANSWER)))
            same_weights = file_kind(name) == file_kind(writer.engine)
            assert not same_weights or handed[name][-1].tokens == alone[-1].tokens, "the hand-off changed the answer"
    for name, runs in handed.items():
        _pair_rows(report, f"{name} → {writer.engine}", runs[1:], alone[1:], f"{writer.engine} alone")


def _pair_rows(
    report: Report, pair: str, runs: list[StreamedAnswer], alone: list[StreamedAnswer], against: str
) -> None:
    first, bare_first = (min(run.first_token_s for run in some) for some in (runs, alone))
    report.add(Row(f"{pair}, first token", first, "s", bare_first, against))
    exposed = min(run.metrics["exposed_transfer_time"] for run in runs)
    report.add(Row(f"{pair}, exposed transfer", exposed * 1e3, "ms"))
