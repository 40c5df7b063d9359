"""`disagg bench handoff --shape`: a prefill node with a big model's shape; another process fetches the KV cache while
it is computed. There is no decode engine: the benchmark measures what streaming costs the prefill, and how much of
the transfer is left after it."""

import importlib
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any, NamedTuple

from disaggregated_inference.bench.engines import SHAPES, prefill_seconds
from disaggregated_inference.bench.prompts import token_prompt
from disaggregated_inference.bench.report import Report, Row, progress
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.kv import Fingerprint
from disaggregated_inference.kv_transfer import Hello, KVFetch, Paths, Sink
from disaggregated_inference.node import KVMemory, PrefillContext, PrefillNode, Scheduler

_GOALS: dict[int, tuple[float | None, float | None]] = {1500: (0.9, None), 8192: (0.95, 26_900), 32768: (0.95, 20_000)}


class Fetched(NamedTuple):
    finished_at: float  # perf_counter is the same in all processes of a machine
    payload_bytes: int
    goodput_bytes_s: float


class Streamed(NamedTuple):
    """Until the last byte has arrived: `total_s` from the request on, `exposed_s` from the end of computing on."""

    prefill_s: float
    exposed_s: float
    total_s: float
    fetched: Fetched


def bench_streaming(shape: str, device: str, chunk: int, streams: int, repeats: int) -> Report:
    if shape not in SHAPES:
        raise DisaggError(f"unknown shape {shape!r}; there are {', '.join(SHAPES)}")
    progress(f"torch: making random weights of shape {shape} on {device}")
    baseline = importlib.import_module("disaggregated_inference.engines.torch.baseline")
    scheduler = Scheduler(partial(baseline.random_engine, SHAPES[shape], device, 24 << 30))
    node = PrefillNode(KVMemory(scheduler, prefix_bytes=0), chunk_tokens=chunk)
    title = f"streamed prefill, {shape}, {scheduler.engine.dtype} on {device}, chunks of {chunk}, {streams} connections"
    report = Report(title)
    try:
        with receiver(scheduler.engine.fingerprint, streams) as pipe:
            for length in (1500, 8192, 32768):
                progress(f"prefill of {length} tokens, plain and streamed")
                _rows(report, node, pipe, length, repeats)
    finally:
        node.close()
        scheduler.stop()
    return report


def _rows(report: Report, node: PrefillNode, pipe: Pipe, length: int, repeats: int) -> None:
    tokens = token_prompt(length, vocabulary=node.engine.spec.vocabulary)
    chunk = node.chunked_prefill.chunk_tokens
    plain: list[float] = []
    streamed: list[Streamed] = []
    for _ in range(repeats + 1):
        plain.append(node.scheduler.call(partial(prefill_seconds, node.engine, tokens, chunk)))
        streamed.append(stream_prefill(node, pipe, tokens))
    del plain[0], streamed[0]  # the warm-up
    best = min(streamed, key=lambda run: run.prefill_s)
    bare, (ratio_goal, speed_goal) = min(plain), _GOALS[length]
    report.add(Row(f"prefill {length}, plain", length / bare, "tok/s", goal=speed_goal))
    report.add(Row(f"prefill {length}, streamed", length / best.prefill_s, "tok/s", length / bare, "plain", ratio_goal))
    report.add(Row("  exposed transfer", min(run.exposed_s for run in streamed) * 1e3, "ms"))
    report.add(Row("  exposed transfer, worst", max(run.exposed_s for run in streamed) * 1e3, "ms"))
    size = best.fetched.payload_bytes / 1e6
    report.add(Row(f"  goodput while slices arrive ({size:.0f} MB)", best.fetched.goodput_bytes_s / 1e9, "GB/s"))


def stream_prefill(node: PrefillNode, pipe: Pipe, tokens: list[int]) -> Streamed:
    """The node computes, and the receiver at the other end of the pipe fetches meanwhile."""
    began_at, ended = time.perf_counter(), []
    context, reading = node.submit(tokens)
    reading.add_done_callback(lambda _: ended.append(time.perf_counter()))
    pipe.send(context)
    fetched: Fetched = pipe.recv()
    found = reading.result()
    computed_at = min(ended[0], began_at + found.queue_time + found.prefill_time)
    total_s = fetched.finished_at - began_at
    return Streamed(found.prefill_time, max(0.0, fetched.finished_at - computed_at), total_s, fetched)


@contextmanager
def receiver(fingerprint: Fingerprint, streams: int) -> Iterator[Pipe]:
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
    """Runs in its own process: fetches every context from the pipe and discards the slices."""
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
        goodput = paths.known()[0].goodput_bytes_s or 0.0
        pipe.send(Fetched(time.perf_counter(), gathered.payload_bytes, goodput))
