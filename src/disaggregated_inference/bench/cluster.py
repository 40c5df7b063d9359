"""`disagg bench cluster`: two machines that share a request, each of them alone, and two models at once, in one run;
then many requests at once, beside the targets.

`real` computes with small engines on this machine. `published` waits as long as published figures say: its times are
arithmetic, but the KV really moves, and every row says SIMULATED.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from disaggregated_inference.bench import machines
from disaggregated_inference.bench.machines import Machine, greedy, orchestrated, random_prompt
from disaggregated_inference.bench.prompts import resolve_model, text_prompt
from disaggregated_inference.bench.report import Report, Row, progress
from disaggregated_inference.bench.targets import ELSEWHERE, target_rows
from disaggregated_inference.engines import require_engine
from disaggregated_inference.engines.simulated import MACHINES
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.local_nodes import ClientView, running
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.orchestrator import DisaggregatedInference

PREFILL, DECODE = "dgx-spark", "m3-ultra"
ENGINES = ("torch", "mlx")  # of `real`: for prefill and decode
SHAPES = ("qwen3-30b-a3b", "gpt-oss-120b")
BOTH, DECODE_ALONE, PREFILL_ALONE = "disaggregated", "decode machine alone", "prefill machine alone"


class _ModelRun(NamedTuple):
    """A model and its machines; `alone` is the prefill machine again, with both roles."""

    model: str
    prefill: Machine
    decode: Machine
    alone: Machine | None
    prompt: Callable[[int], list[int]]
    prefill_s: Callable[[int], float] | None = None  # of the prefill machine alone, if known in advance

    @property
    def machines(self) -> list[Machine]:
        return [machine for machine in (self.prefill, self.decode, self.alone) if machine]

    def contenders(self) -> dict[str, DisaggregatedInference]:
        if not self.alone:
            return {}
        return {
            BOTH: orchestrated(self.prefill, self.decode, local="never"),
            DECODE_ALONE: orchestrated(self.decode),
            PREFILL_ALONE: orchestrated(self.alone),
        }


class Scenario(NamedTuple):
    """What is measured. `title` and `label` mark simulated figures."""

    title: str
    label: str
    models: list[_ModelRun]
    prompts: Sequence[int]
    tokens: int
    notes: Sequence[str] = ()
    at_once: int = 8  # requests of each model, under load


def run(profile: str, prompts: Sequence[int], tokens: int, repeats: int, output: Path) -> Report:
    if profile not in _PLANS:
        raise BadRequest(f"unknown profile {profile!r}; there are {', '.join(_PLANS)}")
    progress("starting nodes")
    plan = _PLANS[profile](prompts, tokens)
    report = Report(plan.title)
    with running([machine for model in plan.models for machine in model.machines]):
        asyncio.run(measure(report, plan, repeats))
    return report.publish(output / f"cluster-{profile}.json", [*plan.notes, ELSEWHERE])


def _published(prompts: Sequence[int], tokens: int) -> Scenario:
    tokens = tokens or 128
    title = (
        f"SIMULATED, no inference: {PREFILL} reads, {DECODE} writes {tokens} tokens, in the time that published figures"
        " give; every byte of KV really moves, over loopback, whose copies take this machine's time and not a link's"
    )
    names = [(shape, name) for shape in SHAPES for name in (PREFILL, DECODE)]
    notes = [f"SIMULATED {name}, {shape}: {MACHINES[name][shape].note}" for shape, name in names]
    models = [_simulated(shape) for shape in SHAPES]
    return Scenario(title, "SIMULATED ", models, prompts or (512, 2048, 8192), tokens, notes)


def _simulated(shape: str) -> _ModelRun:
    def machine(name: str, role: str) -> Machine:
        return machines.simulated(f"{name} {shape} {role}", role, shape, name, "--prefix-memory", "0")

    return _ModelRun(
        shape,
        machine(PREFILL, "prefill"),
        machine(DECODE, "decode"),
        machine(PREFILL, "both"),
        lambda length: random_prompt(length, length),
        lambda length: MACHINES[PREFILL][shape].prefill_s(0, length),
    )


def _real(prompts: Sequence[int], tokens: int) -> Scenario:
    for engine in ENGINES:
        require_engine(engine)
    model = resolve_model("smollm2")
    tokens = tokens or 32
    title = (
        f"{model.name}, float32: {ENGINES[0]} reads, {ENGINES[1]} writes {tokens} tokens, all on the cores of this"
        " machine, which two models at once have to share"
    )
    models = [computed_model(model, model.name, alone=True), computed_model(model, f"{model.name}-again", alone=False)]
    return Scenario(title, "", models, prompts or (128, 512, 1500), tokens)


def computed_model(model: ModelFiles, name: str, alone: bool) -> _ModelRun:
    """For the orchestrator, the same weights with another name are another model."""

    def machine(role: str, engine: str) -> Machine:
        options = ("--model", str(model.path), "--dtype", "float32", "--prefix-memory", "0")
        return Machine(f"{name} {role}", name, role, engine, *options)

    return _ModelRun(
        name,
        machine("prefill", ENGINES[0]),
        machine("decode", ENGINES[1]),
        machine("both", ENGINES[0]) if alone else None,
        lambda length: text_prompt(model, length),
    )


_PLANS: dict[str, Callable[[Sequence[int], int], Scenario]] = {"real": _real, "published": _published}


async def measure(report: Report, plan: Scenario, repeats: int) -> None:
    async with AsyncExitStack() as stack:
        cores = [(model, name, core) for model in plan.models for name, core in model.contenders().items()]
        for _, _, core in cores:
            await stack.enter_async_context(core)
        progress("warming up")
        await asyncio.gather(*(_request(core, model, max(plan.prompts), 2) for model, _, core in cores))
        for model in plan.models:
            contenders = {name: core for owner, name, core in cores if owner is model}
            for length in plan.prompts if contenders else ():
                progress(f"{model.model}, prompt of {length} tokens")
                best: dict[str, ClientView] = {}
                for name, core in contenders.items():
                    views = [await _request(core, model, length, plan.tokens) for _ in range(repeats)]
                    best[name] = min(views, key=lambda view: view.total_s)  # noise only adds
                _rows(report, f"{plan.label}{model.model}, {length} in", model, length, best)
    progress("two models at once")
    await _together(report, plan)


async def _request(core: DisaggregatedInference, model: _ModelRun, length: int, tokens: int) -> ClientView:
    view = ClientView()
    await machines.follow(core, view, greedy(model.prompt(length), tokens))
    return view


def _rows(report: Report, name: str, model: _ModelRun, length: int, best: dict[str, ClientView]) -> None:
    def add(what: str, unit: str, value: Callable[[ClientView], float], goal: float | None = None) -> None:
        for other in (DECODE_ALONE, PREFILL_ALONE):
            row = Row(f"{name}: {what}", value(ours), unit, value(best[other]), other, goal, at_most=goal is not None)
            report.add(row)

    ours = best[BOTH]
    assert _tokens(ours) == _tokens(best[DECODE_ALONE]), "the hand-off changed the answer"
    add("first token", "s", lambda view: view.first_token_s)
    add("whole answer", "s", lambda view: view.total_s, goal=15)
    add("tokens per second of it", "tok/s", lambda view: view.tokens / view.total_s)
    exposed_ms = (ours.record.exposed_transfer_time or 0.0) * 1e3
    report.add(Row(f"{name}: exposed transfer", exposed_ms, "ms", goal=1000, at_most=True))
    if model.prefill_s:
        added_s = ours.first_token_s - model.prefill_s(length)
        report.add(Row(f"{name}: first token, beyond the reading itself", added_s * 1e3, "ms"))


def _tokens(view: ClientView) -> tuple[int, ...] | None:
    assert view.completion
    return view.completion.choices[0].tokens


async def _together(report: Report, plan: Scenario) -> None:
    """The same requests one after the other, then at once, with a prompt of medium length."""
    length = sorted(plan.prompts)[len(plan.prompts) // 2]
    pairs = [machine for model in plan.models for machine in (model.prefill, model.decode)]
    requests = [greedy(model.prompt(length), plan.tokens, model=model.model) for model in plan.models]
    async with orchestrated(*pairs, local="never") as core:
        for request in requests:  # warm-up: the peer checks
            await core.generate(**request | {"max_tokens": 2})
        started = time.perf_counter()
        for request in requests:
            await core.generate(**request)
        one_by_one_s = time.perf_counter() - started
        merged = await core.complete_many(requests)
        name = f"{plan.label}{len(requests)} models at once, {length} in"
        report.add(Row(name, merged.wall_time, "s", one_by_one_s, "one by one", goal=15, at_most=True))
        report.add(Row(f"{name}: speed-up", one_by_one_s / merged.wall_time, "x", goal=1.5))
        report.add(Row(f"{name}: speed-up as generate_many tells it", merged.speedup, "x"))
        await _loaded(report, plan, core, length)


async def _loaded(report: Report, plan: Scenario, core: DisaggregatedInference, length: int) -> None:
    """Many requests at once, each with a prompt of its own, against the targets."""
    prompts = [(model, model.prompt(length + place)) for place in range(plan.at_once) for model in plan.models]
    merged = await core.complete_many([greedy(each, plan.tokens, model=model.model) for model, each in prompts])
    records = core.history.records(len(prompts))
    wall_s = merged.wall_time
    answered = sum(record.ok for record in records)
    measured = {"requests_per_second": answered / wall_s, "parallel_efficiency": merged.speedup}
    for row in target_rows(f"{plan.label}{len(prompts)} requests at once, {length} in", records, measured):
        report.add(row)
