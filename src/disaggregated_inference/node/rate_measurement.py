"""Measures this machine with its own engine, so that the router plans with real rates from the first request on."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from disaggregated_inference.engines import Engine
from disaggregated_inference.errors import KVMemoryFull
from disaggregated_inference.kv import KVSlice
from disaggregated_inference.node.node import Node
from disaggregated_inference.node.rates import RateMeter

_MEASURED_TOKENS = (64, 512)
_MEASURED_S = 0.5  # a machine that is slower than this reads no length twice, and no second length after it


def warm_up(engine: Engine) -> None:
    """The first run of the libraries is slow: no request should pay for it."""
    for length in engine.warm_lengths:
        if _fits(engine, length):
            _time(engine, length, lambda piece: piece.wait())
    engine.counters.prompt_tokens = engine.counters.step_tokens = 0


def measure(served: Node) -> None:
    """On the engine's thread, at the start."""
    engine = served.kv_memory.engine
    for length in _MEASURED_TOKENS:
        if not _fits(engine, length):
            break
        prefill_s, step_s = _best_time(engine, length)
        for rates in _prefill_rates(served):
            rates.record(length, length, prefill_s)
        if served.decode:
            served.kv_memory.scheduler.batch.rates.record(1, 1, step_s)
        if prefill_s > _MEASURED_S:
            break


def rescale_rates(served: Node, threads_before: int, threads: int) -> None:
    """On the engine's thread, after its number of threads has changed: what was measured with the old number counts for
    what a short prompt shows of the new one, and at most for the ratio of the two."""
    engine, length = served.kv_memory.engine, _MEASURED_TOKENS[0]
    ratio = threads / threads_before
    try:
        prefill_s, step_s = _best_time(engine, length) if _fits(engine, length) else (0.0, 0.0)
    except KVMemoryFull:
        prefill_s = step_s = 0.0
    for rates in _prefill_rates(served):
        rates.rescale(_factor(rates.estimate(length), length, prefill_s, ratio))
    steps = served.kv_memory.scheduler.batch.rates
    steps.rescale(_factor(steps.estimate(1), 1, step_s, ratio))


def _factor(before: float | None, tokens: int, seconds: float, ratio: float) -> float:
    """Between 1 and `ratio`: other processes can make one reading slow."""
    if not before or seconds <= 0:
        return ratio
    return min(max(tokens / seconds / before, min(ratio, 1.0)), max(ratio, 1.0))


def _prefill_rates(served: Node) -> Iterator[RateMeter]:
    if served.prefill:
        yield served.prefill.chunked_prefill.rates
    if served.decode:
        yield served.decode.kv_source.prefill_rates


def _fits(engine: Engine, length: int) -> bool:
    """Whether the node can serve a prompt of this length and one more token."""
    return length + 1 < engine.spec.context_window and engine.kv_cost(length + 1) <= engine.kv_limit_bytes


def _best_time(engine: Engine, length: int) -> tuple[float, float]:
    """Of two: memory is slow when it is first touched. That is little of a long reading, and one is enough."""
    with _uncounted(engine):
        first = _time(engine, length)
        second = first if first[0] > _MEASURED_S else _time(engine, length)
    return min(first[0], second[0]), min(first[1], second[1])


@contextmanager
def _uncounted(engine: Engine) -> Iterator[None]:
    """The counters tell of requests alone."""
    before = engine.counters.prompt_tokens, engine.counters.step_tokens
    try:
        yield
    finally:
        engine.counters.prompt_tokens, engine.counters.step_tokens = before


def _time(engine: Engine, length: int, on_slice: Callable[[KVSlice], None] | None = None) -> tuple[float, float]:
    """Seconds of a prefill and of one decode step."""
    sequence = engine.open(length + 1)
    try:
        started = time.perf_counter()
        tokens = engine.prefill(sequence, [index % 50 for index in range(length)], on_slice).greedy().tolist()
        prefilled = time.perf_counter()
        engine.step([sequence], tokens).greedy().tolist()
        return prefilled - started, time.perf_counter() - prefilled
    finally:
        engine.close(sequence)
