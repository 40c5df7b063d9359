"""`disagg bench gateway --dashboards N`: what open dashboards cost the streams beside them.

Steady streams run through the gateway, and short requests beside them end all the time, as each of them is an event for
every dashboard. Windows with and without open dashboards follow each other, on the same streams. A tap in front of the
decode node records when a token leaves it, and the client when it arrives: the difference is what was added to it.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import aiohttp
import msgspec

from disaggregated_inference.bench.machines import Machine
from disaggregated_inference.bench.processes import cpu_s
from disaggregated_inference.bench.report import Report, Row, percentile, progress
from disaggregated_inference.bench.rounds import open_streams
from disaggregated_inference.bench.servers import MODEL, OURS, in_thread, node_of, serving
from disaggregated_inference.bench.stream_clients import Stream, Tap, new_session
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.local_nodes import Process, running

_PACE = 10  # tokens per second of one stream
_SHORT, _SHORT_TOKENS = 4, 8  # requests beside the streams, at once
_GOAL = 1.05

_numbers = itertools.count(1_000_000)

_Token = tuple[float, float]  # when it left the node, when it arrived


class _Window(NamedTuple):
    since: float
    until: float
    cpu_s: float


class Windows(msgspec.Struct, frozen=True):
    """A round is a window without dashboards, and one with them."""

    rounds: int = 5
    window_s: float = 8.0
    settle_s: float = 1.0  # for dashboards to open or to leave


def run(dashboards: int, streams: int, output: Path, windows: Windows = Windows()) -> Report:
    report = Report(f"the gateway with {dashboards} open dashboards, SIMULATED nodes, {streams} streams")
    profile = f"custom:prefill=1000000,decode={_PACE}"
    prefill, decode = nodes = [node_of(role, profile) for role in ("prefill", "decode")]
    with running(nodes):
        asyncio.run(_measure(report, prefill, decode, dashboards, streams, windows))
    return report.publish(output / "dashboards.json")


async def _measure(
    report: Report, prefill: Machine, decode: Machine, dashboards: int, count: int, windows: Windows
) -> None:
    async with (
        Tap(decode.port).open() as tap,
        in_thread(serving(prefill, tap.port, decode.port)) as servers,
    ):
        streams, alone, watched = await _windows(servers[OURS], dashboards, count, windows)
        _rows(report, streams, tap, alone, watched)


async def _windows(
    gateway: Process, dashboards: int, count: int, windows: Windows
) -> tuple[list[Stream], list[_Window], list[_Window]]:
    """The steady streams, and the windows without and with dashboards."""
    tokens = 2 * count + round(_PACE * 2 * windows.rounds * (windows.window_s + 3 * windows.settle_s))
    streams = [Stream(next(_numbers), tokens) for _ in range(count)]
    alone: list[_Window] = []
    watched: list[_Window] = []
    progress(f"{count} streams of {_PACE} tokens/s, {2 * windows.rounds} windows of {windows.window_s:g} s")
    async with new_session() as session:
        await Stream(next(_numbers), 2).follow(session, gateway.url, MODEL)  # warm-up: peer check, tokenizer
        requests = (stream.follow(session, gateway.url, MODEL) for stream in streams)
        steady = open_streams(requests, lambda: all(each.has_started for each in streams))
        async with steady, _short_requests(session, gateway.url):
            for _ in range(windows.rounds):
                alone.append(await _window(gateway, windows))
                async with _open_dashboards(session, gateway.url, dashboards):
                    watched.append(await _window(gateway, windows))
    return [stream.parse(complete=False) for stream in streams], alone, watched


async def _window(gateway: Process, windows: Windows) -> _Window:
    await asyncio.sleep(windows.settle_s)
    since, before = time.perf_counter(), cpu_s(gateway.pid)
    await asyncio.sleep(windows.window_s)
    return _Window(since, time.perf_counter(), cpu_s(gateway.pid) - before)


@asynccontextmanager
async def _short_requests(session: aiohttp.ClientSession, url: str) -> AsyncIterator[None]:
    async def send() -> None:
        while True:
            await Stream(next(_numbers), _SHORT_TOKENS).follow(session, url, MODEL)

    async with _until_the_end([send() for _ in range(_SHORT)]):
        yield


@asynccontextmanager
async def _open_dashboards(session: aiohttp.ClientSession, url: str, count: int) -> AsyncIterator[None]:
    """As the page does it: /cluster, then its events."""
    heard = [0] * count  # bytes of events

    async def watch(number: int) -> None:
        async with session.get(f"{url}/cluster") as response:
            await response.read()
        async with session.get(f"{url}/cluster/events") as response:
            if response.status != 200:
                raise DisaggError(f"a dashboard was refused: {response.status} {(await response.text())[:300]}")
            while data := await response.content.readany():
                heard[number] += len(data)

    async with _until_the_end([watch(number) for number in range(count)]):
        yield
        if not all(heard):
            raise DisaggError("a dashboard got no event")


@asynccontextmanager
async def _until_the_end(work: list[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Ends them with the block. If one fails meanwhile, that is raised."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _rows(report: Report, streams: list[Stream], tap: Tap, alone: list[_Window], watched: list[_Window]) -> None:
    tokens = [pair for stream in streams for pair in zip(tap.token_at[stream.name], stream.token_at, strict=False)]
    pairs = list(zip(watched, alone, strict=True))
    _compare(report, "CPU per token", "µs", [(_cpu_s(one, tokens), _cpu_s(other, tokens)) for one, other in pairs])
    added = [(_added_s(one, tokens), _added_s(other, tokens)) for one, other in pairs]
    _compare(report, "added time per token", "ms", added)
    silences = [max(_longest_silence_s(window, streams) for window in windows) for windows in (watched, alone)]
    report.add(Row("longest silence in a stream", silences[0] * 1e3, "ms", silences[1] * 1e3, "without"))


def _compare(report: Report, what: str, unit: Literal["µs", "ms"], pairs: list[tuple[float, float]]) -> None:
    """`pairs`: seconds with dashboards, and without."""
    scale = {"µs": 1e6, "ms": 1e3}[unit]
    ratios = tuple(watched / alone for watched, alone in pairs)
    watched, alone = (percentile(each, 50) * scale for each in zip(*pairs, strict=True))
    report.add(Row(what, watched, unit, alone, "without", ratios=ratios))
    report.add(Row(f"{what}, of that without dashboards", percentile(ratios, 50), "x", goal=_GOAL, at_most=True))


def _cpu_s(window: _Window, tokens: list[_Token]) -> float:
    return window.cpu_s / len(_added(window, tokens))


def _added_s(window: _Window, tokens: list[_Token]) -> float:
    """The median: the mean is that of the few that waited for the machine."""
    return percentile(_added(window, tokens), 50)


def _added(window: _Window, tokens: list[_Token]) -> list[float]:
    """From the node to the client, through the gateway: of every token that arrived in the window."""
    found = [arrived - left for left, arrived in tokens if window.since <= arrived < window.until]
    if not found:
        raise DisaggError("no token arrived during the measurement: this machine is too busy")
    return found


def _longest_silence_s(window: _Window, streams: list[Stream]) -> float:
    gaps = [
        later - sooner
        for stream in streams
        for sooner, later in itertools.pairwise(at for at in stream.token_at if window.since <= at < window.until)
    ]
    return max(gaps, default=0.0)
