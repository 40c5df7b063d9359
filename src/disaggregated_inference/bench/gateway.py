"""`disagg bench gateway`: what the gateway costs, compared with a minimal relay of the same streams.

Nodes are simulated, and every server is its own process, so that its CPU time is its own work. First the nodes take no
time: maximum throughput. Then the nodes are slow and send every token by itself: a tap in front of the decode node
records when a token leaves, the client when it arrives, and the difference is the server's delay.
"""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from disaggregated_inference.bench import rounds
from disaggregated_inference.bench.machines import Machine
from disaggregated_inference.bench.processes import cpu_s, resident_bytes
from disaggregated_inference.bench.report import Report, Row, percentile, progress
from disaggregated_inference.bench.rounds import closed_loop, open_streams
from disaggregated_inference.bench.servers import (
    BARE,
    HANDING,
    LITELLM,
    MODEL,
    OURS,
    Servers,
    in_thread,
    node_of,
    serving,
)
from disaggregated_inference.bench.stream_clients import Stream, Tap, new_session
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.local_nodes import Process, running

STREAMS = (1, 32, 256)
_PACED = 2560  # tokens per second of all streams of a server: about half of its maximum
_FASTEST = 50  # tokens per second of one stream
_GOAL = 1.4  # times the bare relay's CPU per token
_REQUEST_GOAL = 2.0  # per request, times that of the relay that hands over: it makes the same two POSTs

StreamRound = rounds.Round[Stream]
_numbers = itertools.count()


class _Pace(NamedTuple):
    """Streams of one server in steady state: CPU per token, delay of every token, longest silence."""

    cpu_s: float
    delays_s: list[float]
    silence_s: float


class GatewayExtent(msgspec.Struct, frozen=True):
    """How much is measured."""

    repeats: int = 3
    steady_s: float = 20.0
    margin_s: float = 3.0  # streams still run for so long after it


def run(
    streams: Sequence[int],
    tokens: int,
    requests: int,
    litellm: str,
    output: Path,
    extent: GatewayExtent = GatewayExtent(),
) -> Report:
    report = Report(f"the gateway, SIMULATED nodes, {tokens} tokens out; bare: a starlette relay of one node's events")
    levels = streams or STREAMS
    prefill, decode = nodes = [node_of(role, "instant") for role in ("prefill", "decode")]
    with running(nodes), serving(prefill, decode.port, decode.port, litellm, True) as servers:
        asyncio.run(_full_speed(report, servers, levels, tokens, requests, extent.repeats))
    for count in levels:
        pace = max(1, min(_FASTEST, _PACED // count))
        progress(f"{count} at once, {pace} tokens/s each")
        profile = f"custom:prefill=1000000,decode={pace}"
        with running(nodes := [node_of(role, profile) for role in ("prefill", "decode", "decode")]):
            asyncio.run(_fixed_pace(report, nodes, litellm, count, pace, extent))
    return report.publish(output / "gateway.json")


async def _full_speed(
    report: Report, servers: Servers, levels: Sequence[int], tokens: int, requests: int, repeats: int
) -> None:
    sizes: dict[int, int] = {}
    texts: dict[tuple[int, int], set[str]] = defaultdict(set)  # completions by prompt and length
    for streams in levels:
        progress(f"{streams} at once")
        counts = [streams] + [max(requests, 2 * streams)] * repeats
        numbers = [[next(_numbers) for _ in range(count)] for count in counts]

        async def measure(name: str, count: int, repeat: int) -> StreamRound:
            measured = await _round(servers[name], numbers[repeat], streams, count)  # noqa: B023
            sizes[repeat] = resident_bytes(servers[OURS].pid)
            return measured

        measured = await rounds.alternate(servers, tokens, repeats, measure)
        _speed_rows(report, f"{streams} at once", servers, measured, tokens)
        memory = (sizes[repeats] / 1e6, "MB", sizes[0] / 1e6, "before")
        report.add(Row(f"{streams} at once: memory of the gateway", *memory))
        for stream in (stream for done in measured.values() for one in done for stream in one.streams):
            texts[stream.number, stream.max_tokens].add(stream.text)
    different = sum(len(found) > 1 for found in texts.values())  # then streams were mixed up
    report.add(Row(f"of {len(texts)} prompts, answered differently by them", different, "", goal=0, at_most=True))


async def _round(server: Process, numbers: list[int], at_once: int, tokens: int) -> StreamRound:
    streams = [Stream(number, tokens) for number in numbers]
    cpu, wall = cpu_s(server.pid), time.perf_counter()
    async with new_session() as session:
        done = await closed_loop(streams, at_once, lambda stream: stream.follow(session, server.url, MODEL))
    wall_s = time.perf_counter() - wall
    return StreamRound([stream.parse() for stream in done], cpu_s(server.pid) - cpu, wall_s)


def _speed_rows(report: Report, name: str, servers: Servers, measured: rounds.Rounds[Stream], tokens: int) -> None:
    add = partial(_compare, report, name, list(servers))
    short, long = ([measured[who, count] for who in servers] for count in (1, tokens))
    add("requests for one token", "/s", [_rate(done, len(done[0].streams)) for done in short])
    add("relayed, all on the same cores", "tok/s", [_rate(done, done[0].tokens) for done in long])
    costs_s = [_request_cpu_s(done) for done in short]
    add("CPU of a request for one token", "ms", [cost_s * 1e3 for cost_s in costs_s])
    cost_s = dict(zip(servers, costs_s, strict=True))
    for relay, goal in ((BARE, None), (HANDING, _REQUEST_GOAL)):
        ratio = cost_s[OURS] / cost_s[relay]
        report.add(Row(f"{name}: CPU of a request, of {relay}", ratio, "x", goal=goal, at_most=True))
    add("CPU per token, the request's share in it", "µs", [_request_cpu_s(done) / tokens * 1e6 for done in long])


def _compare(report: Report, name: str, contenders: list[str], what: str, unit: str, values: list[float]) -> None:
    """The first contender is ours."""
    for other, value in zip(contenders[1:], values[1:], strict=True):
        report.add(Row(f"{name}: {what}", values[0], unit, value, other))


def _rate(measured: list[StreamRound], count: int) -> float:
    return percentile([count / one.wall_s for one in measured], 50)


def _request_cpu_s(measured: list[StreamRound]) -> float:
    """The minimum: noise only adds."""
    return min(one.request_cpu_s for one in measured)


async def _fixed_pace(
    report: Report, nodes: list[Machine], litellm: str, count: int, pace: int, extent: GatewayExtent
) -> None:
    """The gateway and the bare relay run at the same time, each with its own decode node: other load on the machine
    hits both."""
    prefill, *decoders = nodes
    async with Tap(decoders[0].port).open() as first, Tap(decoders[1].port).open() as second:
        taps = {OURS: first, BARE: second, LITELLM: second}
        async with in_thread(serving(prefill, first.port, second.port, litellm)) as servers:
            for server in servers.values():  # warm-up: peer checks, tokenizers
                await _round(server, [next(_numbers)], 1, 2)
            paces = await _measure_pace({name: servers[name] for name in (OURS, BARE)}, taps, count, pace, extent)
            if litellm:
                paces |= await _measure_pace({LITELLM: servers[LITELLM]}, taps, count, pace, extent)
    _pace_rows(report, f"{count} of {pace} tokens/s", paces)


async def _measure_pace(
    servers: Servers, taps: dict[str, Tap], count: int, pace: int, extent: GatewayExtent
) -> dict[str, _Pace]:
    """A node starts one stream per step: the first stream must still run when the last one starts."""
    tokens = 2 * count + round(pace * (extent.steady_s + extent.margin_s))
    streams = {name: [Stream(next(_numbers), tokens) for _ in range(count)] for name in servers}
    pairs = [(servers[name].url, stream) for name, each in streams.items() for stream in each]
    async with new_session() as session:
        requests = (stream.follow(session, url, MODEL) for url, stream in pairs)
        async with open_streams(requests, lambda: all(stream.has_started for _, stream in pairs)):
            since, before = time.perf_counter(), [cpu_s(server.pid) for server in servers.values()]
            await asyncio.sleep(extent.steady_s)
            until, after = time.perf_counter(), [cpu_s(server.pid) for server in servers.values()]
    used_s = {name: late - early for name, early, late in zip(servers, before, after, strict=True)}
    return {name: _pace(each, used_s[name], taps[name], since, until) for name, each in streams.items()}


def _pace(streams: list[Stream], used_s: float, tap: Tap, since: float, until: float) -> _Pace:
    delays, silence_s = list[float](), 0.0
    for stream in streams:
        times = stream.parse(complete=False).token_at
        pairs = zip(tap.token_at[stream.name], times, strict=False)
        delays += [arrived - left for left, arrived in pairs if since <= arrived < until]
        steady = itertools.pairwise(at for at in times if since <= at < until)
        silence_s = max([silence_s, *(later - sooner for sooner, later in steady)])
    if not delays:
        raise DisaggError("no token arrived during the measurement: this machine is too busy")
    return _Pace(used_s / len(delays), delays, silence_s)


def _pace_rows(report: Report, name: str, paces: dict[str, _Pace]) -> None:
    add = partial(_compare, report, name, list(paces))
    for share in (50, 99):
        add(f"added to a token, p{share}", "ms", [percentile(each.delays_s, share) * 1e3 for each in paces.values()])
    add("longest silence in a stream", "ms", [each.silence_s * 1e3 for each in paces.values()])
    add("CPU per token", "µs", [each.cpu_s * 1e6 for each in paces.values()])
    ratio = paces[OURS].cpu_s / paces[BARE].cpu_s
    report.add(Row(f"{name}: CPU per token, of bare", ratio, "x", goal=_GOAL, at_most=True))
