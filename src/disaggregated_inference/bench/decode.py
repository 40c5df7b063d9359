"""`disagg bench decode`: a decode node's batch compared with mlx-lm's generators, also while a prompt arrives."""

import statistics
import threading
import time
from functools import partial
from pathlib import Path

from disaggregated_inference.api import GenerationParams, TokenEvent
from disaggregated_inference.bench.engines import baseline_of, decode_seconds
from disaggregated_inference.bench.prompts import resolve_model, row_prompts, token_prompt
from disaggregated_inference.bench.report import Report, Row, compared, in_turn, percentile, progress
from disaggregated_inference.engines import load_engine, require_engine
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node import DecodeNode, Generation, Item, KVMemory, PrefillNode, Scheduler

_BATCHES = (1, 4, 16)
_CONTEXT = 32
_STREAMS = 8
_ARRIVING = 2000
_ARRIVALS = 2
_LONG = 1500


def run(engine: str, prefill: str, model_name: str, tokens: int, rounds: int, output: Path) -> Report:
    for name in (engine, prefill):
        require_engine(name)
    model = resolve_model(model_name)
    report = Report(f"decode node, {engine}, {model.name}, float32, {tokens} tokens after {_CONTEXT}")
    node = _decode_node(engine, model)
    try:
        for batch in _BATCHES:
            progress(f"batch of {batch}")
            _batch_rows(report, node, engine, batch, tokens, rounds)
        progress(f"a prompt of {_ARRIVING} tokens arrives")
        _arrival_rows(report, node, prefill, model)
    finally:
        node.kv_memory.close_all()
        node.scheduler.stop()
    return report.publish(output / "decode.json")


def _decode_node(engine: str, model: ModelFiles) -> DecodeNode:
    scheduler = Scheduler(partial(load_engine, engine, model, dtype="float32"))
    return DecodeNode(KVMemory(scheduler, prefix_bytes=0), model.tokenizer)


class _DecodeStream:
    """The times of a generation's tokens."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.times: list[float] = []
        self.done = threading.Event()
        self.error: BaseException | None = None
        generation.listen(self._take)

    def _take(self, item: Item) -> None:
        if isinstance(item, TokenEvent):
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


def _start(node: DecodeNode, number: int) -> _DecodeStream:
    rules = GenerationParams(max_tokens=_LONG, ignore_eos=True, timeout_s=3600)
    prompt = token_prompt(_CONTEXT, number, node.engine.spec.vocabulary)
    return _DecodeStream(node.generate_local(prompt, rules))


def _node_seconds(node: DecodeNode, batch: int, tokens: int) -> float:
    """Seconds per step while all streams run, measured over `tokens` steps after the last stream has joined."""
    streams = [_start(node, number) for number in range(batch)]
    _await_tokens(streams, 3)
    counts = [len(stream.times) for stream in streams]
    _await_tokens(streams, max(counts) + tokens)
    _cancel(streams)
    since = max(stream.times[at - 1] for stream, at in zip(streams, counts, strict=True))
    until = min(stream.times[-1] for stream in streams)
    count = sum(since < at <= until for stream in streams for at in stream.times)
    return (until - since) / count * batch


def _await_tokens(streams: list[_DecodeStream], count: int) -> None:
    while min(len(stream.times) for stream in streams) < count:
        time.sleep(0.002)


def _cancel(streams: list[_DecodeStream]) -> None:
    for stream in streams:
        stream.generation.cancel()
    for stream in streams:
        stream.done.wait()


def _batch_rows(report: Report, node: DecodeNode, engine: str, batch: int, tokens: int, rounds: int) -> None:
    """Seconds per step, measured in turn."""
    baseline, prompts = baseline_of(node.engine), row_prompts(_CONTEXT, batch, node.engine.spec.vocabulary)
    ours, theirs, bare = in_turn(
        rounds,
        lambda: _node_seconds(node, batch, tokens),
        lambda: node.scheduler.call(partial(baseline.decode_seconds, prompts, tokens)) / tokens,
        lambda: node.scheduler.call(partial(decode_seconds, node.engine, prompts, tokens)) / tokens,
    )
    goal = 0.95 if engine == "mlx" else None
    report.add(compared(f"batch {batch}", batch, "tok/s", ours, theirs, f"{baseline.label}'s own", goal))
    overhead = statistics.median(mine - alone for mine, alone in zip(ours, bare, strict=True)) / batch
    alone = statistics.median(bare) / batch
    report.add(Row(f"batch {batch}, node's overhead per token", overhead * 1e6, "µs", alone * 1e6, "engine"))


def _arrival_rows(report: Report, node: DecodeNode, prefill_engine: str, model: ModelFiles) -> None:
    """The prefill ends before the hand-over: on this one machine it would use the decode node's cores. Its time is
    part of the newcomer's all the same."""
    scheduler = Scheduler(partial(load_engine, prefill_engine, model, dtype="float32"))
    prefill = PrefillNode(KVMemory(scheduler, prefix_bytes=0), chunk_tokens=512, lease_s=600)
    gaps: dict[str, list[float]] = {"quiet": [], "hand-over": [], "local prefill": []}
    arrivals: dict[str, list[float]] = {"hand-over": [], "local prefill": []}
    try:
        for _ in range(_ARRIVALS):
            for way in gaps:
                seconds = _measure_gaps(node, prefill, way, gaps[way])
                if way in arrivals:
                    arrivals[way].append(seconds)
    finally:
        prefill.close()
        prefill.kv_memory.close_all()
        scheduler.stop()
    name = f"{_STREAMS} streams, gap between tokens, p99"
    quiet = percentile(gaps["quiet"], 99) * 1e3
    report.add(Row(f"{name}, no new request", quiet, "ms"))
    for way in arrivals:
        report.add(Row(f"{name}, {_ARRIVING} tokens by {way}", percentile(gaps[way], 99) * 1e3, "ms", quiet, "quiet"))
        report.add(Row(f"longest gap, {way}", max(gaps[way]) * 1e3, "ms", max(gaps["quiet"]) * 1e3, "quiet"))
    first = {way: min(seconds) for way, seconds in arrivals.items()}
    name = "until the newcomer's first token, prefill elsewhere and hand-over"
    report.add(Row(name, first["hand-over"], "s", first["local prefill"], "local prefill"))


def _measure_gaps(node: DecodeNode, prefill: PrefillNode, way: str, gaps: list[float]) -> float:
    prompt = token_prompt(_ARRIVING, 99, node.engine.spec.vocabulary)
    context, prefill_s = None, 0.0
    if way == "hand-over":
        context, job = prefill.submit(prompt, timeout_s=600)
        prefill_s = job.result().prefill_time
    streams = [_start(node, number) for number in range(_STREAMS)]
    _await_tokens(streams, 8)
    since = time.perf_counter()
    seconds = 0.0
    if way == "quiet":
        time.sleep(2.0)
    else:
        params = GenerationParams(max_tokens=1)
        newcomer = _DecodeStream(
            node.generate_from_kv(context, params) if context else node.generate_local(prompt, params)
        ).wait()
        seconds = prefill_s + newcomer.times[0] - since
    until = time.perf_counter()
    for stream in streams:
        gaps += stream.gaps(since, until)
    _cancel(streams)
    return seconds
