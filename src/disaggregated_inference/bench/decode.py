"""`disagg bench decode`: a decode node's batch against mlx-lm's own generators, and what arriving prompts do to it."""

import importlib
import statistics
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from disaggregated_inference.bench.report import Report, Row, compared, in_turn, percentile
from disaggregated_inference.cli.progress import steps
from disaggregated_inference.engines import load_engine, require_engine
from disaggregated_inference.models import ModelFiles, ModelStore
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.generation import Generation, GenerationParams, Item, TokenOutput
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.node.sampling import SamplingParams
from disaggregated_inference.node.scheduler import Scheduler

_BATCHES = (1, 4, 16)
_CONTEXT = 32
_STREAMS = 8
_ARRIVING = 2000
_ARRIVALS = 2
_LONG = 1500


def run(engine: str, reader: str, model_name: str, tokens: int, rounds: int, output: Path) -> Report:
    console = Console()
    for name in (engine, reader):
        require_engine(name)
    with steps() as fetching:
        model = ModelStore().resolve(model_name, fetching)
    report = Report(f"decode node, {engine}, {model.name}, float32, {tokens} tokens after {_CONTEXT}")
    node = _decode_node(engine, model)
    try:
        for batch in _BATCHES:
            console.print(f"batch of {batch}", style="dim", highlight=False)
            _batch_rows(report, node, engine, batch, tokens, rounds)
        console.print(f"a prompt of {_ARRIVING} tokens arrives", style="dim", highlight=False)
        _arrival_rows(report, node, reader, model)
    finally:
        node.kv_memory.close_all()
        node.scheduler.stop()
    report.show(console)
    path = output / "decode.json"
    report.save(path)
    console.print(f"saved {path}", style="dim", highlight=False)
    return report


def _decode_node(engine: str, model: ModelFiles) -> DecodeNode:
    scheduler = Scheduler(partial(load_engine, engine, model, dtype="float32"))
    return DecodeNode(KVMemory(scheduler, prefix_bytes=0), model.tokenizer)


class _DecodeStream:
    """When each token of an answer came."""

    def __init__(self, answer: Generation) -> None:
        self.answer = answer
        self.times: list[float] = []
        self.done = threading.Event()
        self.error: BaseException | None = None
        answer.listen(self._take)

    def _take(self, item: Item) -> None:
        if isinstance(item, TokenOutput):
            self.times.append(time.perf_counter())
        elif item is None or isinstance(item, BaseException):
            self.error = item
            self.done.set()

    def wait(self) -> "_DecodeStream":
        self.done.wait()
        if self.error:
            raise self.error
        return self

    def gaps(self, since: float, until: float) -> list[float]:
        pairs = zip(self.times, self.times[1:], strict=False)
        return [later - sooner for sooner, later in pairs if later > since and sooner < until]


def _prompt(number: int, length: int) -> list[int]:
    return [(17 * at + number) % 400 + 10 for at in range(length)]


def _write(node: DecodeNode, number: int, tokens: int) -> _DecodeStream:
    rules = GenerationParams(max_tokens=tokens, sampling=SamplingParams(ignore_eos=True), timeout_s=3600)
    return _DecodeStream(node.read_and_write(_prompt(number, _CONTEXT), rules=rules))


def _node_seconds(node: DecodeNode, batch: int, tokens: int) -> float:
    """Per step, while everyone writes: `tokens` of them after the last one has joined."""
    streams = [_write(node, number, _LONG) for number in range(batch)]
    _await_tokens(streams, 3)
    begun = [len(stream.times) for stream in streams]
    _await_tokens(streams, max(begun) + tokens)
    _leave(streams)
    since = max(stream.times[at - 1] for stream, at in zip(streams, begun, strict=True))
    until = min(stream.times[-1] for stream in streams)
    written = sum(since < at <= until for stream in streams for at in stream.times)
    return (until - since) / written * batch


def _await_tokens(streams: list[_DecodeStream], count: int) -> None:
    while min(len(stream.times) for stream in streams) < count:
        time.sleep(0.002)


def _leave(streams: list[_DecodeStream]) -> None:
    for stream in streams:
        stream.answer.cancel()
    for stream in streams:
        stream.done.wait()


def _batch_rows(report: Report, node: DecodeNode, engine: str, batch: int, tokens: int, rounds: int) -> None:
    """Seconds of a step, each in turn."""
    baseline = importlib.import_module(f"disaggregated_inference.engines.{engine}.baseline").Baseline(node.engine)
    ours, theirs, bare = in_turn(
        rounds,
        lambda: _node_seconds(node, batch, tokens),
        lambda: node.scheduler.call(partial(baseline.decode_seconds, _CONTEXT, batch, tokens)) / tokens,
        lambda: node.scheduler.call(partial(_engine_seconds, node, batch, tokens)) / tokens,
    )
    goal = 0.95 if engine == "mlx" else None
    report.add(compared(f"batch {batch}", batch, "tok/s", ours, theirs, f"{baseline.label}'s own", goal))
    overhead = statistics.median(mine - alone for mine, alone in zip(ours, bare, strict=True)) / batch
    alone = statistics.median(bare) / batch
    report.add(Row(f"batch {batch}, node's overhead per token", overhead * 1e6, "µs", alone * 1e6, "engine"))


def _engine_seconds(node: DecodeNode, batch: int, tokens: int) -> float:
    """The engine alone, stepped ahead as the node does."""
    engine = node.engine
    sequences = [engine.open(_CONTEXT + tokens + 8) for _ in range(batch)]
    chosen: Any = [engine.prefill(each, _prompt(n, _CONTEXT)).greedy().tolist()[0] for n, each in enumerate(sequences)]
    for _ in range(2):
        chosen = engine.step(sequences, chosen).greedy()
    chosen.tolist()
    started = time.perf_counter()
    for _ in range(tokens):
        before, chosen = chosen, engine.step(sequences, chosen).greedy()
        before.tolist()
    chosen.tolist()
    seconds = time.perf_counter() - started
    for sequence in sequences:
        engine.close(sequence)
    return seconds


def _arrival_rows(report: Report, node: DecodeNode, reader: str, model: ModelFiles) -> None:
    """The prompt was read before it is handed over: on this one machine, reading would take the decoder's cores."""
    scheduler = Scheduler(partial(load_engine, reader, model, dtype="float32"))
    prefill = PrefillNode(KVMemory(scheduler, prefix_bytes=0), chunk_tokens=512, lease_s=600)
    gaps: dict[str, list[float]] = {"quiet": [], "hand-over": [], "local prefill": []}
    arrivals: dict[str, list[float]] = {"hand-over": [], "local prefill": []}
    try:
        for _ in range(_ARRIVALS):
            for way in gaps:
                seconds = _disturbed(node, prefill, way, gaps[way])
                if way in arrivals:
                    arrivals[way].append(seconds)
    finally:
        prefill.close()
        prefill.kv_memory.close_all()
        scheduler.stop()
    name = f"{_STREAMS} streams, gap between tokens, p99"
    quiet = percentile(gaps["quiet"], 99) * 1e3
    report.add(Row(f"{name}, nobody arrives", quiet, "ms"))
    for way in arrivals:
        report.add(Row(f"{name}, {_ARRIVING} tokens by {way}", percentile(gaps[way], 99) * 1e3, "ms", quiet, "quiet"))
        report.add(Row(f"longest gap, {way}", max(gaps[way]) * 1e3, "ms", max(gaps["quiet"]) * 1e3, "quiet"))
    first = {way: min(seconds) for way, seconds in arrivals.items()}
    name = "until the newcomer's first token, hand-over"
    report.add(Row(name, first["hand-over"], "s", first["local prefill"], "local prefill"))


def _disturbed(node: DecodeNode, prefill: PrefillNode, way: str, gaps: list[float]) -> float:
    prompt = _prompt(99, _ARRIVING)
    context = None
    if way == "hand-over":
        context, reading = prefill.begin(prompt, timeout_s=600)
        reading.result()
    streams = [_write(node, number, _LONG) for number in range(_STREAMS)]
    _await_tokens(streams, 8)
    since = time.perf_counter()
    seconds = 0.0
    if way == "quiet":
        time.sleep(2.0)
    else:
        newcomer = _DecodeStream(node.fetch_and_write(context, 1) if context else node.read_and_write(prompt, 1)).wait()
        seconds = newcomer.times[0] - since
    until = time.perf_counter()
    for stream in streams:
        gaps += stream.gaps(since, until)
    _leave(streams)
    return seconds
