"""`disagg bench orchestrator`: what the orchestrator adds to the two requests it makes, and how well it predicts.

Nodes are simulated and take no time, so what is measured is this project's own work. CPU time is that of this process
alone: the orchestrator's, or the bare client's.
"""

import asyncio
import itertools
import os
import random
import subprocess
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console

from disaggregated_inference.bench import machines
from disaggregated_inference.bench.machines import Bare, ClientView, Machine, orchestrated, plain, prompt_of, running
from disaggregated_inference.bench.report import Report, Row, percentile
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.orchestrator import DisaggregatedInference

STREAMS = (1, 32, 256)
_PROMPT = 256
_OPEN = 256
_PACED, _PACE = 32, 50  # streams, and tokens per second of each
_STEADY_S = 2.0
_LEARNING = (50, 100, 200, 400, 800, 1600, 3200)
_TIMES = (("first token", "first_token_s"), ("whole answer", "total_s"))

Pair = tuple[Machine, Machine]
Ask = Callable[[ClientView, dict[str, Any]], Awaitable[None]]
Progress = Callable[[str], None]
_numbers = itertools.count()


class _Round(NamedTuple):
    """Requests that were made at once."""

    seen: list[ClientView]
    cpu_s: float
    wall_s: float

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.seen)


Rounds = dict[tuple[str, int], list[_Round]]  # (whose, tokens of an answer)


def run(streams: Sequence[int], tokens: int, requests: int, predictions: int, output: Path) -> Report:
    console = Console()
    title = f"the orchestrator, SIMULATED nodes, {_PROMPT} tokens in, {tokens} out; bare: the same two requests alone"
    report = Report(title)

    def progress(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    paced = f"custom:prefill=1000000,decode={_PACE}"
    with running(pair := _pair("tiny", "instant", "instant", "--prefix-memory", "0")):
        asyncio.run(_overhead(report, pair, streams or STREAMS, tokens, requests, progress))
    with running(pair := _pair("tiny", paced, paced, "--prefix-memory", "0")):
        asyncio.run(_relayed_one_by_one(report, pair, progress))
    with running(pair := _pair("gpt-oss-120b", "dgx-spark", "m3-ultra", "--kv-memory", "3G")):
        asyncio.run(_predictions(report, pair, predictions, progress))
    report.show(console)
    path = output / "orchestrator.json"
    report.save(path)
    progress(f"saved {path}")
    return report


def _pair(shape: str, prefill: str, decode: str, *arguments: str) -> Pair:
    return (
        machines.simulated("p", "prefill", shape, prefill, *arguments),
        machines.simulated("d", "decode", shape, decode, *arguments),
    )


async def _overhead(
    report: Report, pair: Pair, levels: Sequence[int], tokens: int, requests: int, progress: Progress
) -> None:
    seen: list[ClientView] = []
    async with _asks(pair) as asks:
        for ask in asks.values():
            await _at_once(ask, 4, tokens)
        progress(f"memory of {_OPEN} open streams")
        size_bytes = await _bytes_per_stream(asks["ours"])
        for streams in levels:
            progress(f"{streams} at once")
            rounds = await _in_turn(asks, streams, tokens, max(2, requests // streams))
            _rows(report, f"{streams} at once", rounds, tokens)
            seen += [each for count in (1, tokens) for done in rounds["ours", count] for each in done.seen]
    report.add(Row(f"memory of one of {_OPEN} open streams", size_bytes / 1024, "KB"))
    again = sum(each.metrics["attempts"] > 1 for each in seen)
    report.add(Row(f"of {len(seen)} requests, needed a second attempt", again, "", goal=0, at_most=True))


@asynccontextmanager
async def _asks(pair: Pair) -> AsyncIterator[dict[str, Ask]]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)  # as the orchestrator's own
    async with (
        orchestrated(*pair, local="never") as core,
        aiohttp.ClientSession(connector=connector, auto_decompress=False) as session,
    ):
        yield {"ours": partial(machines.follow, core), "bare": Bare(session, *pair).follow}


def _some_prompt() -> list[int]:
    return prompt_of(next(_numbers), _PROMPT)


async def _at_once(ask: Ask, streams: int, tokens: int) -> _Round:
    asked = [plain(_some_prompt(), tokens) for _ in range(streams)]
    cpu, wall = time.process_time(), time.perf_counter()
    seen = [ClientView() for _ in asked]
    await asyncio.gather(*map(ask, seen, asked))
    return _Round(seen, time.process_time() - cpu, time.perf_counter() - wall)


async def _in_turn(asks: dict[str, Ask], streams: int, tokens: int, repeats: int) -> Rounds:
    """So that a noisy machine is noisy to all; the first is the warm-up. Answers of one token as well: what they cost
    is the request's, the rest is the other tokens'."""
    found: Rounds = defaultdict(list)
    for turn in range(repeats + 1):
        for (name, ask), count in itertools.product(asks.items(), (1, tokens)):
            done = await _at_once(ask, streams, count)
            if turn:
                found[name, count].append(done)
    return found


def _rows(report: Report, name: str, rounds: Rounds, tokens: int) -> None:
    long, short = ([rounds[who, count] for who in ("ours", "bare")] for count in (tokens, 1))
    for what, field in _TIMES:
        ours, bare = (_p50_ms(done, field) for done in long)
        report.add(Row(f"{name}: {what}, p50", ours, "ms", bare, "bare"))
        if len(long[0][0].seen) == 1:  # among many, a request's time is mostly that of those before it
            report.add(Row(f"{name}: added to the {what}, p50", ours - bare, "ms", goal=2, at_most=True))
    costs = [_request_cpu_s(done) * 1e3 for done in short]
    report.add(Row(f"{name}: CPU of a request for one token", costs[0], "ms", costs[1], "bare"))
    report.add(Row(f"{name}: CPU added to it", costs[0] - costs[1], "ms", goal=2, at_most=True))
    per_token = [
        (_request_cpu_s(most) - _request_cpu_s(one)) / (tokens - 1) for most, one in zip(long, short, strict=True)
    ]
    _token_rows(report, name, per_token)
    rates = [_p50([each.tokens / each.cpu_s for each in done]) for done in long]
    report.add(Row(f"{name}: relayed in a second of CPU", rates[0], "tok", rates[1], "bare", goal=10_000))
    rates = [_p50([each.tokens / each.wall_s for each in done]) for done in long]
    report.add(Row(f"{name}: relayed, nodes on the same cores", rates[0], "tok/s", rates[1], "bare"))
    rates = [_p50([len(each.seen) / each.wall_s for each in done]) for done in short]
    report.add(Row(f"{name}: requests for one token", rates[0], "/s", rates[1], "bare", goal=10))


def _token_rows(report: Report, name: str, seconds: Sequence[float]) -> None:
    ours, bare = (each * 1e6 for each in seconds)
    report.add(Row(f"{name}: CPU per further token", ours, "µs", bare, "bare"))
    report.add(Row(f"{name}: CPU added to it", ours - bare, "µs", goal=50, at_most=True))


def _p50(values: Sequence[float]) -> float:
    return percentile(values, 50)


def _p50_ms(rounds: list[_Round], field: str) -> float:
    return _p50([getattr(each, field) for done in rounds for each in done.seen]) * 1e3


def _request_cpu_s(rounds: list[_Round]) -> float:
    return _p50([each.cpu_s / len(each.seen) for each in rounds])


@asynccontextmanager
async def _writing(ask: Ask, streams: int) -> AsyncIterator[list[ClientView]]:
    """Streams that all have begun, and go on until they are left."""
    seen = [ClientView() for _ in range(streams)]
    tasks = [asyncio.ensure_future(ask(each, plain(_some_prompt(), 8000))) for each in seen]
    try:
        while not all(each.tokens for each in seen):
            await asyncio.sleep(0.02)
            for task in tasks:
                if task.done():
                    task.result()
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _bytes_per_stream(ask: Ask) -> float:
    """Resident memory; before anything else has grown it, since what was grown stays."""
    before = _resident_bytes()
    async with _writing(ask, _OPEN):
        return (_resident_bytes() - before) / _OPEN


def _resident_bytes() -> int:
    if (statm := Path("/proc/self/statm")).exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())])) * 1024


async def _relayed_one_by_one(report: Report, pair: Pair, progress: Progress) -> None:
    """From nodes in no hurry every token comes by itself: that is what relaying one costs at most."""
    costs: dict[str, list[float]] = defaultdict(list)
    async with _asks(pair) as asks:
        progress(f"{_PACED} streams of {_PACE} tokens/s")
        for name, ask in [*asks.items()] * 3:
            costs[name].append(await _steady_cpu_s(ask))
    name, (ours, bare) = f"{_PACED} of {_PACE} tokens/s", (min(costs[who]) for who in ("ours", "bare"))
    _token_rows(report, name, (ours, bare))
    report.add(Row(f"{name}: relayed in a second of CPU", 1 / ours, "tok", 1 / bare, "bare", goal=10_000))


async def _steady_cpu_s(ask: Ask) -> float:
    """Per token, while nobody comes or leaves."""
    async with _writing(ask, _PACED) as seen:
        await asyncio.sleep(0.2)
        before, cpu = sum(each.tokens for each in seen), time.process_time()
        await asyncio.sleep(_STEADY_S)
        spent, came = time.process_time() - cpu, sum(each.tokens for each in seen) - before
    if not came:
        raise DisaggError("not one token came while it was measured: this machine is too busy")
    return spent / came


async def _predictions(report: Report, pair: Pair, requests: int, progress: Progress) -> None:
    async with orchestrated(*pair) as core:
        progress("predictions: the nodes measure themselves")
        fresh = [await _predicted(core, prompt_of(next(_numbers), length)) for length in _LEARNING]
        for length in _LEARNING * 2:
            await _predicted(core, prompt_of(next(_numbers), length))
        for together in (1, 4):
            progress(f"predictions: {together} at a time")
            pairs = await _crowd(core, _mixed(requests, seed=together), together)
            _prediction_rows(report, f"predicted first token, {together} at a time", pairs)
    _prediction_rows(report, "predicted first token, of fresh nodes", fresh, (50,))


def _mixed(requests: int, seed: int) -> list[list[int]]:
    """From 50 to 4,000 tokens, short ones as often as long ones; a third begins with a part of the same document."""
    rng, document, prompts = random.Random(seed), prompt_of(-1, 4000), []
    for number in range(requests):
        length = int(50 * 80 ** rng.random())
        shared = rng.randrange(length) if number % 3 == 0 else 0
        prompts.append(document[:shared] + prompt_of(next(_numbers), length - shared))
    return prompts


async def _crowd(core: DisaggregatedInference, prompts: list[list[int]], together: int) -> list[tuple[float, float]]:
    waiting, found = iter(prompts), []

    async def client() -> None:
        for prompt in waiting:
            found.append(await _predicted(core, prompt))

    await asyncio.gather(*(client() for _ in range(together)))
    return found


async def _predicted(core: DisaggregatedInference, prompt: list[int]) -> tuple[float, float]:
    """Time to the first token: as it was, and as it had been expected."""
    answer = await core.generate(**plain(prompt, 16))
    return answer["first_token_time"], answer["predicted_first_token_time"]


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
