"""`disagg bench orchestrator`: what the orchestrator adds to its two requests, and how well it predicts.

Nodes are simulated and take no time, so only the project's own work is measured. CPU time is that of this process: the
orchestrator's, or the bare client's.
"""

import asyncio
import itertools
import os
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from disaggregated_inference.bench import machines, rounds
from disaggregated_inference.bench.machines import Bare, Machine, greedy, orchestrated, random_prompt
from disaggregated_inference.bench.processes import resident_bytes
from disaggregated_inference.bench.report import Report, Row, percentile, progress
from disaggregated_inference.bench.rounds import closed_loop, open_streams
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.local_nodes import ClientView, running
from disaggregated_inference.orchestrator import DisaggregatedInference

STREAMS = (1, 32, 256)
_PROMPT = 256
_PACE = 50  # tokens per second of a paced stream
_TIMES = (("first token", "first_token_s"), ("whole answer", "total_s"))

MachinePair = tuple[Machine, Machine]
StreamClient = Callable[[ClientView, dict[str, Any]], Coroutine[Any, Any, None]]
ViewRound = rounds.Round[ClientView]
_numbers = itertools.count()


class OrchestratorExtent(msgspec.Struct, frozen=True):
    """How much is measured."""

    open_streams: int = 256
    paced_streams: int = 32
    steady_s: float = 2.0
    learned_lengths: tuple[int, ...] = (50, 100, 200, 400, 800, 1600, 3200)


def run(
    streams: Sequence[int],
    tokens: int,
    requests: int,
    predictions: int,
    output: Path,
    extent: OrchestratorExtent = OrchestratorExtent(),
) -> Report:
    report = Report(
        f"the orchestrator, SIMULATED nodes, {_PROMPT} tokens in, {tokens} out; bare: the same two requests alone"
    )
    paced = f"custom:prefill=1000000,decode={_PACE}"
    with running(pair := _pair("tiny", "instant", "instant", "--prefix-memory", "0")):
        asyncio.run(_overhead(report, pair, streams or STREAMS, tokens, requests, extent.open_streams))
    with running(pair := _pair("tiny", paced, paced, "--prefix-memory", "0")):
        asyncio.run(_paced_tokens(report, pair, extent.paced_streams, extent.steady_s))
    with running(pair := _pair("gpt-oss-120b", "dgx-spark", "m3-ultra", "--kv-memory", "3G")):
        asyncio.run(_predictions(report, pair, predictions, extent.learned_lengths))
    return report.publish(output / "orchestrator.json")


def _pair(shape: str, prefill: str, decode: str, *arguments: str) -> MachinePair:
    return (
        machines.simulated("p", "prefill", shape, prefill, *arguments),
        machines.simulated("d", "decode", shape, decode, *arguments),
    )


async def _overhead(
    report: Report, pair: MachinePair, levels: Sequence[int], tokens: int, requests: int, open_count: int
) -> None:
    views: list[ClientView] = []
    async with _clients(pair) as clients:

        async def measure(name: str, count: int, repeat: int) -> ViewRound:
            return await _round(clients[name], streams, count)

        for client in clients.values():
            await _round(client, 4, tokens)
        progress(f"memory of {open_count} open streams")
        size_bytes = await _bytes_per_stream(clients["ours"], open_count)
        for streams in levels:
            progress(f"{streams} at once")
            measured = await rounds.alternate(clients, tokens, max(2, requests // streams), measure)
            _rows(report, f"{streams} at once", measured, tokens)
            views += [view for count in (1, tokens) for done in measured["ours", count] for view in done.streams]
    report.add(Row(f"memory of one of {open_count} open streams", size_bytes / 1024, "KB"))
    retried = sum(view.record.attempts > 1 for view in views)
    report.add(Row(f"of {len(views)} requests, needed a second attempt", retried, "", goal=0, at_most=True))


@asynccontextmanager
async def _clients(pair: MachinePair) -> AsyncIterator[dict[str, StreamClient]]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)  # as in the orchestrator
    async with (
        orchestrated(*pair, local="never") as core,
        aiohttp.ClientSession(connector=connector, auto_decompress=False) as session,
    ):
        yield {"ours": partial(machines.follow, core), "bare": Bare(session, *pair).follow}


def _request(tokens: int) -> dict[str, Any]:
    return greedy(random_prompt(next(_numbers), _PROMPT), tokens)


async def _round(client: StreamClient, streams: int, tokens: int) -> ViewRound:
    requests = [_request(tokens) for _ in range(streams)]
    cpu, wall = time.process_time(), time.perf_counter()
    views = [ClientView() for _ in requests]
    await asyncio.gather(*map(client, views, requests))
    return ViewRound(views, time.process_time() - cpu, time.perf_counter() - wall)


def _rows(report: Report, name: str, measured: rounds.Rounds[ClientView], tokens: int) -> None:
    def add(what: str, values: Sequence[float], unit: str, goal: float | None = None) -> None:
        report.add(Row(f"{name}: {what}", values[0], unit, values[1], "bare", goal=goal))

    long, short = ([measured[who, count] for who in ("ours", "bare")] for count in (tokens, 1))
    for what, field in _TIMES:
        times = [_p50([getattr(view, field) * 1e3 for one in done for view in one.streams]) for done in long]
        add(f"{what}, p50", times, "ms")
        if len(long[0][0].streams) == 1:  # among many, a request mostly waits for the ones before it
            report.add(Row(f"{name}: added to the {what}, p50", times[0] - times[1], "ms", goal=2, at_most=True))
    costs = [_request_cpu_s(done) * 1e3 for done in short]
    add("CPU of a request for one token", costs, "ms")
    report.add(Row(f"{name}: CPU added to it", costs[0] - costs[1], "ms", goal=2, at_most=True))
    pairs = zip(long, short, strict=True)
    _token_rows(report, name, [(_request_cpu_s(many) - _request_cpu_s(one)) / (tokens - 1) for many, one in pairs])
    add("relayed in a second of CPU", [_p50([one.tokens / one.cpu_s for one in done]) for done in long], "tok", 10_000)
    add("relayed, nodes on the same cores", [_p50([one.tokens / one.wall_s for one in done]) for done in long], "tok/s")
    add("requests for one token", [_p50([len(one.streams) / one.wall_s for one in done]) for done in short], "/s", 10)


def _token_rows(report: Report, name: str, seconds: Sequence[float]) -> None:
    ours, bare = (each * 1e6 for each in seconds)
    report.add(Row(f"{name}: CPU per further token", ours, "µs", bare, "bare"))
    report.add(Row(f"{name}: CPU added to it", ours - bare, "µs", goal=50, at_most=True))


def _p50(values: Sequence[float]) -> float:
    return percentile(values, 50)


def _request_cpu_s(measured: list[ViewRound]) -> float:
    return _p50([one.request_cpu_s for one in measured])


@asynccontextmanager
async def _open(client: StreamClient, streams: int) -> AsyncIterator[list[ClientView]]:
    views = [ClientView() for _ in range(streams)]
    async with open_streams((client(view, _request(8000)) for view in views), lambda: all(v.tokens for v in views)):
        yield views


async def _bytes_per_stream(client: StreamClient, count: int) -> float:
    """Resident memory. Measured first, because a process rarely gives memory back."""
    before = resident_bytes(os.getpid())
    async with _open(client, count):
        return (resident_bytes(os.getpid()) - before) / count


async def _paced_tokens(report: Report, pair: MachinePair, count: int, steady_s: float) -> None:
    """Slow nodes send every token by itself: the highest cost to relay one."""
    costs: dict[str, list[float]] = defaultdict(list)
    async with _clients(pair) as clients:
        progress(f"{count} streams of {_PACE} tokens/s")
        for name, client in [*clients.items()] * 3:
            costs[name].append(await _steady_cpu_s(client, count, steady_s))
    name, (ours, bare) = f"{count} of {_PACE} tokens/s", (min(costs[who]) for who in ("ours", "bare"))
    _token_rows(report, name, (ours, bare))
    report.add(Row(f"{name}: relayed in a second of CPU", 1 / ours, "tok", 1 / bare, "bare", goal=10_000))


async def _steady_cpu_s(client: StreamClient, count: int, steady_s: float) -> float:
    """CPU seconds per token while no stream starts or ends."""
    async with _open(client, count) as views:
        await asyncio.sleep(0.2)
        before, cpu = sum(view.tokens for view in views), time.process_time()
        await asyncio.sleep(steady_s)
        cpu_s, tokens = time.process_time() - cpu, sum(view.tokens for view in views) - before
    if not tokens:
        raise DisaggError("no token arrived during the measurement: this machine is too busy")
    return cpu_s / tokens


async def _predictions(report: Report, pair: MachinePair, requests: int, lengths: Sequence[int]) -> None:
    async with orchestrated(*pair) as core:
        progress("predictions: the orchestrator measures the nodes")
        fresh = [await _predicted(core, random_prompt(next(_numbers), length)) for length in lengths]
        for length in [*lengths] * 2:
            await _predicted(core, random_prompt(next(_numbers), length))
        for together in (1, 4):
            progress(f"predictions: {together} at a time")
            pairs = await closed_loop(_mixed(requests, seed=together), together, partial(_predicted, core))
            _prediction_rows(report, f"predicted first token, {together} at a time", pairs)
    _prediction_rows(report, "predicted first token, of fresh nodes", fresh, (50,))


def _mixed(requests: int, seed: int) -> list[list[int]]:
    """50 to 4,000 tokens, short prompts as often as long ones; a third begin with a part of one document."""
    rng, document, prompts = random.Random(seed), random_prompt(-1, 4000), []
    for number in range(requests):
        length = int(50 * 80 ** rng.random())
        shared = rng.randrange(length) if number % 3 == 0 else 0
        prompts.append(document[:shared] + random_prompt(next(_numbers), length - shared))
    return prompts


async def _predicted(core: DisaggregatedInference, prompt: list[int]) -> tuple[float, float]:
    """Time to the first token: measured and predicted."""
    result = await core.generate(**greedy(prompt, 16))
    return result["first_token_time"], result["predicted_first_token_time"]


def _prediction_rows(
    report: Report, name: str, pairs: list[tuple[float, float]], shares: Sequence[int] = (10, 50, 90, 99)
) -> None:
    for share in shares:
        ratio = percentile([measured / predicted for measured, predicted in pairs], share)
        report.add(Row(f"{name}: measured / predicted, p{share}", ratio, ""))
    for share in shares:
        error = percentile([abs(measured - predicted) for measured, predicted in pairs], share)
        report.add(Row(f"{name}: error, p{share}", error * 1e3, "ms"))
    report.add(Row(f"{name}: measured, p50", _p50([measured for measured, _ in pairs]) * 1e3, "ms"))
