"""`disagg bench gateway`: what the gateway costs, beside the least that a relay of the same streams can be.

Nodes are simulated, and every server is a process of its own, so its CPU time is its own work alone. First nodes that
take no time: as much as goes through. Then nodes in no hurry, where every token comes by itself: a tap before the
decode node sees it leave, a client sees it come, and what lies between is what a server adds.
"""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from disaggregated_inference.bench.crowd import Stream, Tap, clients, closed_loop
from disaggregated_inference.bench.machines import Machine, running
from disaggregated_inference.bench.report import Report, Row, percentile
from disaggregated_inference.bench.servers import (
    BARE,
    LITELLM,
    MODEL,
    OURS,
    BenchServer,
    Servers,
    node_of,
    port_of,
    serving,
)
from disaggregated_inference.errors import DisaggError

STREAMS = (1, 32, 256)
_PACED = 2560  # tokens per second of all streams of a server: about half of what goes through it
_FASTEST = 50  # of one stream
_STEADY_S = 20.0
_BEGIN_S = 120.0
_MARGIN_S = 3.0
_REPEATS = 3
_GOAL = 1.5

Progress = Callable[[str], None]
_numbers = itertools.count()


class _Block(NamedTuple):
    """Requests that so many clients made one after the other."""

    streams: list[Stream]
    cpu_s: float
    wall_s: float

    @property
    def tokens(self) -> int:
        return sum(stream.tokens for stream in self.streams)


Blocks = dict[tuple[str, int], list[_Block]]  # (whose, tokens of an answer)


class _Pace(NamedTuple):
    """Streams of one server that were all under way: CPU per token, every token's delay, the longest silence."""

    cpu_s: float
    delays_s: list[float]
    silence_s: float


def run(streams: Sequence[int], tokens: int, requests: int, litellm: str, output: Path) -> Report:
    console = Console()
    title = f"the gateway, SIMULATED nodes, {tokens} tokens out; bare: a starlette relay of the same node's events"
    report = Report(title)

    def progress(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    levels = streams or STREAMS
    with running(nodes := [node_of(role, "instant") for role in ("prefill", "decode")]):
        port = port_of(nodes[1])
        with serving(nodes[0], port, port, litellm) as servers:
            asyncio.run(_at_full_speed(report, servers, levels, tokens, requests, progress))
    for count in levels:
        pace = max(1, min(_FASTEST, _PACED // count))
        profile = f"custom:prefill=1000000,decode={pace}"
        progress(f"{count} at once, {pace} tokens/s each")
        with running(nodes := [node_of(role, profile) for role in ("prefill", "decode", "decode")]):
            asyncio.run(_at_a_pace(report, nodes, litellm, count, pace))
    report.show(console)
    report.save(output / "gateway.json")
    progress(f"saved {output / 'gateway.json'}")
    return report


async def _at_full_speed(
    report: Report, servers: Servers, levels: Sequence[int], tokens: int, requests: int, progress: Progress
) -> None:
    asked = wrong = 0
    for streams in levels:
        progress(f"{streams} at once")
        gateway = servers[OURS].process
        blocks, sizes = await _in_turn(servers, streams, tokens, max(requests, 2 * streams), gateway.resident_bytes)
        _speed_rows(report, f"{streams} at once", servers, blocks, tokens)
        report.add(Row(f"{streams} at once: memory of the gateway", sizes[-1] / 1e6, "MB", sizes[0] / 1e6, "before"))
        answers = _answers(blocks)
        asked, wrong = asked + len(answers), wrong + sum(len(texts) > 1 for texts in answers.values())
    report.add(Row(f"of {asked} prompts, answered differently by them", wrong, "", goal=0, at_most=True))


async def _in_turn(
    servers: Servers, streams: int, tokens: int, requests: int, size: Callable[[], int]
) -> tuple[Blocks, list[int]]:
    """So that a noisy machine is noisy to all; the first is the warm-up. Answers of one token as well: what they cost
    is the request's own."""
    found: Blocks = defaultdict(list)
    sizes: list[int] = []
    for turn in range(_REPEATS + 1):
        numbers = [next(_numbers) for _ in range(requests if turn else streams)]
        for (name, server), count in itertools.product(servers.items(), (1, tokens)):
            block = await _block(server, numbers, streams, count)
            if turn:
                found[name, count].append(block)
        sizes.append(size())
    return found, sizes


async def _block(server: BenchServer, numbers: list[int], at_once: int, tokens: int) -> _Block:
    waiting = [Stream(number, tokens) for number in numbers]
    cpu, wall = server.process.cpu_s(), time.perf_counter()
    done = await closed_loop(waiting, at_once, server.url, MODEL)
    wall_s = time.perf_counter() - wall
    return _Block([stream.read() for stream in done], server.process.cpu_s() - cpu, wall_s)


def _answers(blocks: Blocks) -> dict[tuple[int, int], set[str]]:
    """To the same prompt everyone says the same, or streams were mixed up."""
    texts: dict[tuple[int, int], set[str]] = defaultdict(set)
    for block in itertools.chain.from_iterable(blocks.values()):
        for stream in block.streams:
            texts[stream.number, stream.asked].add(stream.text)
    return texts


def _speed_rows(report: Report, name: str, servers: Servers, blocks: Blocks, tokens: int) -> None:
    def compared(what: str, unit: str, values: list[float]) -> None:
        _compared(report, f"{name}: {what}", unit, dict(zip(servers, values, strict=True)))

    short, long = ([blocks[who, count] for who in servers] for count in (1, tokens))
    compared("requests for one token", "/s", [_rate(done, len(done[0].streams)) for done in short])
    compared("relayed, all on the same cores", "tok/s", [_rate(done, done[0].tokens) for done in long])
    compared("CPU of a request for one token", "ms", [_request_cpu_s(done) * 1e3 for done in short])
    compared("CPU per token, the request's share in it", "µs", [_request_cpu_s(done) / tokens * 1e6 for done in long])


def _compared(report: Report, what: str, unit: str, values: dict[str, float]) -> None:
    for other in list(values)[1:]:
        report.add(Row(what, values[OURS], unit, values[other], other))


def _rate(blocks: list[_Block], count: int) -> float:
    return percentile([count / block.wall_s for block in blocks], 50)


def _request_cpu_s(blocks: list[_Block]) -> float:
    """The least: noise only ever adds."""
    return min(block.cpu_s / len(block.streams) for block in blocks)


async def _at_a_pace(report: Report, nodes: list[Machine], litellm: str, count: int, pace: int) -> None:
    """Ours and the bare one at the same time, each with a decode node of its own: whatever else the machine does, it
    does to both."""
    prefill, *writers = nodes
    async with Tap(port_of(writers[0])).open() as first, Tap(port_of(writers[1])).open() as second:
        taps = {OURS: first, BARE: second, LITELLM: second}
        async with _beside(serving(prefill, first.port, second.port, litellm)) as servers:
            for server in servers.values():  # everyone has seen everyone, and read what it reads once
                await _block(server, [next(_numbers)], 1, 2)
            found = await _paced({name: servers[name] for name in (OURS, BARE)}, taps, count, pace)
            if litellm:
                found |= await _paced({LITELLM: servers[LITELLM]}, taps, count, pace)
    _pace_rows(report, f"{count} of {pace} tokens/s", found)


@asynccontextmanager
async def _beside(context: AbstractContextManager[Servers]) -> AsyncIterator[Servers]:
    """Servers that start and stop while the taps before their nodes work."""
    servers = await asyncio.to_thread(context.__enter__)
    try:
        yield servers
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


async def _paced(servers: Servers, taps: dict[str, Tap], count: int, pace: int) -> dict[str, _Pace]:
    """In every step of a node one more stream begins: the first must not be over before the last has begun."""
    tokens = 2 * count + round(pace * (_STEADY_S + _MARGIN_S))
    streams = {name: [Stream(next(_numbers), tokens) for _ in range(count)] for name in servers}
    everyone = [(servers[name].url, stream) for name, each in streams.items() for stream in each]
    async with clients() as session:
        tasks = [asyncio.ensure_future(stream.follow(session, url, MODEL)) for url, stream in everyone]
        try:
            await _all_begun([stream for _, stream in everyone], tasks)
            since, before = time.perf_counter(), [server.process.cpu_s() for server in servers.values()]
            await asyncio.sleep(_STEADY_S)
            until, after = time.perf_counter(), [server.process.cpu_s() for server in servers.values()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    used = dict(zip(servers, (late - soon for late, soon in zip(after, before, strict=True)), strict=True))
    return {name: _pace(each, used[name], taps[name], since, until) for name, each in streams.items()}


def _pace(streams: list[Stream], cpu_s: float, tap: Tap, since: float, until: float) -> _Pace:
    delays, silence_s = list[float](), 0.0
    for stream in streams:
        times = stream.read(whole=False).token_at
        delays += [
            came - left for left, came in zip(tap.token_at[stream.name], times, strict=False) if since <= came < until
        ]
        silence_s = max([silence_s, *_gaps_s([at for at in times if since <= at < until])])
    if not delays:
        raise DisaggError("not one token came while it was measured: this machine is too busy")
    return _Pace(cpu_s / len(delays), delays, silence_s)


def _gaps_s(times: list[float]) -> Iterator[float]:
    return (later - sooner for sooner, later in itertools.pairwise(times))


async def _all_begun(streams: list[Stream], tasks: "Sequence[asyncio.Future[None]]") -> None:
    deadline = time.monotonic() + _BEGIN_S
    while not all(stream.has_begun for stream in streams):
        await asyncio.sleep(0.02)
        for task in tasks:
            if task.done():
                task.result()
        if time.monotonic() > deadline:
            raise DisaggError(f"not every stream began within {_BEGIN_S:g} s")


def _pace_rows(report: Report, name: str, found: dict[str, _Pace]) -> None:
    for share in (50, 99):
        delays = {who: percentile(paced.delays_s, share) * 1e3 for who, paced in found.items()}
        _compared(report, f"{name}: added to a token, p{share}", "ms", delays)
    silences = {who: paced.silence_s * 1e3 for who, paced in found.items()}
    _compared(report, f"{name}: longest silence in a stream", "ms", silences)
    _compared(report, f"{name}: CPU per token", "µs", {who: paced.cpu_s * 1e6 for who, paced in found.items()})
    ratio = found[OURS].cpu_s / found[BARE].cpu_s
    report.add(Row(f"{name}: CPU per token, of bare", ratio, "x", goal=_GOAL, at_most=True))
