"""`disagg bench handoff --shape`: a prefill node at a big model's shape, its cache fetched over the wire by another
process while it is being computed. No decode engine takes part: what is measured is what streaming costs the prefill,
and how much of the transfer is left when the prefill is done."""

import importlib
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any, NamedTuple

from disaggregated_inference.bench.engines import SHAPES, Progress
from disaggregated_inference.bench.report import Report, Row
from disaggregated_inference.engines import Engine, chunks
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.kv import Fingerprint
from disaggregated_inference.kv_transfer import Hello, KVFetch, Paths, Sink
from disaggregated_inference.node.context import PrefillContext
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.node.scheduler import Scheduler

_GOALS: dict[int, tuple[float | None, float | None]] = {1500: (0.9, None), 8192: (0.95, 26_900), 32768: (0.95, 20_000)}


class _Fetched(NamedTuple):
    finished_at: float  # on the clock that all processes of a machine share
    payload_bytes: int
    goodput_bytes_s: float


class _Streamed(NamedTuple):
    prefill_s: float
    exposed_s: float
    goodput_bytes_s: float
    payload_bytes: int


def bench_streaming(shape: str, device: str, chunk: int, streams: int, repeats: int, progress: Progress) -> Report:
    if shape not in SHAPES:
        raise DisaggError(f"no shape {shape!r}; there are {', '.join(SHAPES)}")
    progress(f"torch: making random weights of shape {shape} on {device}")
    baseline = importlib.import_module("disaggregated_inference.engines.torch.baseline")
    scheduler = Scheduler(partial(baseline.random_engine, SHAPES[shape], device, 24 << 30))
    node = PrefillNode(KVMemory(scheduler, prefix_bytes=0), chunk_tokens=chunk)
    title = f"streamed prefill, {shape}, {scheduler.engine.dtype} on {device}, chunks of {chunk}, {streams} connections"
    report = Report(title)
    try:
        with _receiver(scheduler.engine.fingerprint, streams) as pipe:
            for length in (1500, 8192, 32768):
                progress(f"prefill of {length} tokens, plain and streamed")
                _rows(report, node, pipe, length, repeats)
    finally:
        node.close()
        scheduler.stop()
    return report


def _rows(report: Report, node: PrefillNode, pipe: Pipe, length: int, repeats: int) -> None:
    tokens = [(31 * i) % 400 + 10 for i in range(length)]
    plain: list[float] = []
    streamed: list[_Streamed] = []
    for turn in range(repeats + 1):
        runs = _plain(node, tokens), _stream(node, pipe, tokens)
        if turn:  # the first is the warm-up
            plain.append(runs[0])
            streamed.append(runs[1])
    best = min(streamed, key=lambda run: run.prefill_s)
    bare, (ratio_goal, speed_goal) = min(plain), _GOALS[length]
    report.add(Row(f"prefill {length}, plain", length / bare, "tok/s", goal=speed_goal))
    report.add(Row(f"prefill {length}, streamed", length / best.prefill_s, "tok/s", length / bare, "plain", ratio_goal))
    report.add(Row("  exposed transfer", min(run.exposed_s for run in streamed) * 1e3, "ms"))
    report.add(Row("  exposed transfer, worst", max(run.exposed_s for run in streamed) * 1e3, "ms"))
    size = best.payload_bytes / 1e6
    report.add(Row(f"  goodput while slices arrive ({size:.0f} MB)", best.goodput_bytes_s / 1e9, "GB/s"))


def _plain(node: PrefillNode, tokens: list[int]) -> float:
    return node.scheduler.call(lambda: _plain_seconds(node.engine, tokens, node.chunk_tokens))


def _plain_seconds(engine: Engine, tokens: list[int], chunk: int) -> float:
    sequence = engine.open(len(tokens))
    started = time.perf_counter()
    for part in chunks(tokens, chunk):
        logits = engine.prefill(sequence, part)
    logits.numpy()
    seconds = time.perf_counter() - started
    engine.close(sequence)
    return seconds


def _stream(node: PrefillNode, pipe: Pipe, tokens: list[int]) -> _Streamed:
    ended: list[float] = []
    context, reading = node.begin(tokens)
    reading.add_done_callback(lambda _: ended.append(time.perf_counter()))
    pipe.send(context)
    fetched: _Fetched = pipe.recv()
    seconds = reading.result().prefill_time
    exposed = max(0.0, fetched.finished_at - ended[0])
    return _Streamed(seconds, exposed, fetched.goodput_bytes_s, fetched.payload_bytes)


@contextmanager
def _receiver(fingerprint: Fingerprint, streams: int) -> Iterator[Pipe]:
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_receive, args=(far, fingerprint, streams), daemon=True)
    process.start()
    far.close()
    try:
        yield near
    finally:
        near.close()
        process.join()


def _receive(pipe: Any, fingerprint: Fingerprint, streams: int) -> None:
    """In a process of its own: fetch every context that comes, into memory taken once per connection."""
    sink = Sink(place=lambda piece: None, commit=lambda length: None, logits=lambda logits: None)
    while True:
        try:
            context: PrefillContext = pipe.recv()
        except EOFError:
            return
        paths = Paths()
        hello = Hello(ticket=context.ticket, secret=context.secret, fetch="bench", fingerprint=fingerprint)
        gathered = KVFetch(
            hello,
            fingerprint.layout,
            fingerprint.vocabulary,
            context.tokens,
            paths.ordered(context.addresses),
            sink,
            streams,
        ).run()
        goodput = paths.seen()[0].goodput_bytes_s or 0.0
        pipe.send(_Fetched(time.perf_counter(), gathered.payload_bytes, goodput))
