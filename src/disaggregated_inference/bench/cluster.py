"""`disagg bench cluster`: two machines that share an answer, each of them alone, and two models at once, from one run.

`real` computes with small engines of this machine. `published` waits as long as published figures say: its times are
arithmetic with the hand-over really done, and every line says so.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from disaggregated_inference.bench import machines
from disaggregated_inference.bench.machines import ClientView, Machine, orchestrated, plain, prompt_of, running
from disaggregated_inference.bench.report import Report, Row
from disaggregated_inference.cli.progress import steps
from disaggregated_inference.cluster.local_nodes import LocalNode
from disaggregated_inference.engines import require_engine
from disaggregated_inference.engines.simulated.profiles import MACHINES
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.models import ModelFiles, ModelStore
from disaggregated_inference.orchestrator import DisaggregatedInference

READER, WRITER = "dgx-spark", "m3-ultra"
ENGINES = ("torch", "mlx")  # of `real`: one reads, one writes
SHAPES = ("qwen3-30b-a3b", "gpt-oss-120b")
_TEXT = "A prompt is read on one machine, its answer is written on another, and the cache moves from one to the other. "
BOTH, DECODE_ALONE, PREFILL_ALONE = "disaggregated", "decode machine alone", "prefill machine alone"

Progress = Callable[[str], None]


class _ModelRun(NamedTuple):
    """A model on the machines that hold it; `alone` is the prefill machine again, for both roles."""

    model: str
    prefill: Machine
    decode: Machine
    alone: Machine | None
    prompt: Callable[[int], list[int]]
    reading_s: Callable[[int], float] | None = None  # of the prefill machine alone, where that is known beforehand

    @property
    def machines(self) -> list[Machine]:
        return [machine for machine in (self.prefill, self.decode, self.alone) if machine]

    def ways(self) -> dict[str, DisaggregatedInference]:
        if not self.alone:
            return {}
        return {
            BOTH: orchestrated(self.prefill, self.decode, local="never"),
            DECODE_ALONE: orchestrated(self.decode),
            PREFILL_ALONE: orchestrated(self.alone),
        }


class _Plan(NamedTuple):
    """What is measured: `title` and `label` keep what is simulated from being taken for more."""

    title: str
    label: str
    served: list[_ModelRun]
    prompts: Sequence[int]
    tokens: int
    notes: Sequence[str] = ()


def run(profile: str, prompts: Sequence[int], tokens: int, repeats: int, output: Path) -> Report:
    console = Console()

    def progress(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    if profile not in _PLANS:
        raise BadRequest(f"no profile {profile!r}; there are {', '.join(_PLANS)}")
    progress("starting nodes")
    plan = _PLANS[profile](prompts, tokens)
    report = Report(plan.title)
    with running([machine for served in plan.served for machine in served.machines]):
        asyncio.run(_measure(report, plan, repeats, progress))
    report.show(console)
    for note in plan.notes:
        console.print(note, highlight=False)
    path = output / f"cluster-{profile}.json"
    report.save(path)
    progress(f"saved {path}")
    return report


def _published(prompts: Sequence[int], tokens: int, shapes: Sequence[str] = SHAPES) -> _Plan:
    tokens = tokens or 128
    title = (
        f"SIMULATED, no inference: {READER} reads, {WRITER} writes {tokens} tokens, in the time that published figures"
        " give; every byte of KV really moves, over loopback, whose copies take this machine's time and not a link's"
    )
    notes = [
        f"SIMULATED {name}, {shape}: {MACHINES[name][shape].note}" for shape in shapes for name in (READER, WRITER)
    ]
    return _Plan(
        title, "SIMULATED ", [_simulated(shape) for shape in shapes], prompts or (512, 2048, 8192), tokens, notes
    )


def _simulated(shape: str) -> _ModelRun:
    def machine(name: str, role: str) -> Machine:
        return machines.simulated(f"{name} {shape} {role}", role, shape, name, "--prefix-memory", "0")

    return _ModelRun(
        shape,
        machine(READER, "prefill"),
        machine(WRITER, "decode"),
        machine(READER, "both"),
        lambda length: prompt_of(length, length),
        lambda length: MACHINES[READER][shape].prefill_s(0, length),
    )


def _real(prompts: Sequence[int], tokens: int) -> _Plan:
    for engine in ENGINES:
        require_engine(engine)
    with steps() as fetching:
        model = ModelStore().resolve("smollm2", fetching)
    tokens = tokens or 32
    title = (
        f"{model.name}, float32: {ENGINES[0]} reads, {ENGINES[1]} writes {tokens} tokens, all on the cores of this"
        " machine, which two models at once have to share"
    )
    served = [_computed(model, model.name, alone=True), _computed(model, f"{model.name}-again", alone=False)]
    return _Plan(title, "", served, prompts or (128, 512, 1500), tokens)


def _computed(model: ModelFiles, name: str, alone: bool) -> _ModelRun:
    """The same weights under another name are another model to the orchestrator."""
    text = model.tokenizer.encode(_TEXT)

    def machine(role: str, engine: str) -> Machine:
        options = ("--model", str(model.path), "--dtype", "float32", "--prefix-memory", "0")
        return Machine(f"{name} {role}", name, LocalNode(role, engine, *options))

    return _ModelRun(
        name,
        machine("prefill", ENGINES[0]),
        machine("decode", ENGINES[1]),
        machine("both", ENGINES[0]) if alone else None,
        lambda length: (text * (length // len(text) + 1))[:length],
    )


_PLANS: dict[str, Callable[[Sequence[int], int], _Plan]] = {"real": _real, "published": _published}


async def _measure(report: Report, plan: _Plan, repeats: int, progress: Progress) -> None:
    async with AsyncExitStack() as stack:
        cores = [(served, name, core) for served in plan.served for name, core in served.ways().items()]
        for _, _, core in cores:
            await stack.enter_async_context(core)
        progress("warming up")
        await asyncio.gather(*(_asked(core, served, max(plan.prompts), 2) for served, _, core in cores))
        for served in plan.served:
            ways = {name: core for holder, name, core in cores if holder is served}
            for length in plan.prompts if ways else ():
                progress(f"{served.model}, prompt of {length} tokens")
                best = {name: await _best(core, served, length, plan.tokens, repeats) for name, core in ways.items()}
                _rows(report, f"{plan.label}{served.model}, {length} in", served, length, best)
    progress("two models at once")
    await _together(report, plan)


async def _asked(core: DisaggregatedInference, served: _ModelRun, length: int, tokens: int) -> ClientView:
    seen = ClientView()
    await machines.follow(core, seen, plain(served.prompt(length), tokens))
    return seen


async def _best(core: DisaggregatedInference, served: _ModelRun, length: int, tokens: int, repeats: int) -> ClientView:
    """Of all, the one that took least: noise only ever adds."""
    runs = [await _asked(core, served, length, tokens) for _ in range(repeats)]
    return min(runs, key=lambda seen: seen.total_s)


def _rows(report: Report, name: str, served: _ModelRun, length: int, best: dict[str, ClientView]) -> None:
    ours, against = best[BOTH], (DECODE_ALONE, PREFILL_ALONE)
    assert ours.metrics["tokens"] == best[DECODE_ALONE].metrics["tokens"], "the hand-off changed the answer"
    for other in against:
        report.add(Row(f"{name}: first token", ours.first_token_s, "s", best[other].first_token_s, other))
    for other in against:
        goal: dict[str, Any] = {"goal": 15, "at_most": True}
        report.add(Row(f"{name}: whole answer", ours.total_s, "s", best[other].total_s, other, **goal))
    for other in against:
        report.add(Row(f"{name}: tokens per second of it", _rate(ours), "tok/s", _rate(best[other]), other))
    report.add(Row(f"{name}: exposed transfer", ours.metrics["exposed_transfer_time"] * 1e3, "ms"))
    if served.reading_s:
        added_s = ours.first_token_s - served.reading_s(length)
        report.add(Row(f"{name}: first token, beyond the reading itself", added_s * 1e3, "ms"))


def _rate(seen: ClientView) -> float:
    return seen.tokens / seen.total_s


async def _together(report: Report, plan: _Plan) -> None:
    """One after the other, then at once: the same requests to the same machines, with a prompt of middle length."""
    length = sorted(plan.prompts)[len(plan.prompts) // 2]
    pairs = [machine for served in plan.served for machine in (served.prefill, served.decode)]
    asks = [plain(served.prompt(length), plan.tokens, model=served.model) for served in plan.served]
    async with orchestrated(*pairs, local="never") as core:
        for ask in asks:  # a pair that meets for the first time proves itself
            await core.generate(**ask | {"max_tokens": 2})
        started = time.perf_counter()
        for ask in asks:
            await core.generate(**ask)
        one_by_one_s = time.perf_counter() - started
        merged = await core.generate_many(asks)
    name = f"{plan.label}{len(asks)} models at once, {length} in"
    report.add(Row(name, merged["wall_time"], "s", one_by_one_s, "one by one", goal=15, at_most=True))
    report.add(Row(f"{name}: speed-up", one_by_one_s / merged["wall_time"], "x", goal=1.5))
    report.add(Row(f"{name}: speed-up as generate_many tells it", merged["speedup"], "x"))
