"""`disagg cluster logs`: lines of all machines, merged by time."""

import asyncio
import json
import sys
from collections.abc import Sequence

import typer

from disaggregated_inference.cli.machines import planned
from disaggregated_inference.cli.screen import one_line
from disaggregated_inference.cluster import ClusterConfig
from disaggregated_inference.cluster.deploy import (
    LogLine,
    MachinePlan,
    MachineSession,
    follow_logs,
    in_order,
    merged,
    on_machines,
    read_logs,
)
from disaggregated_inference.timeouts import DeployTimeouts

_FIRST = ("time", "level", "logger", "message")


def run(config: str | None, only: Sequence[str], *, follow: bool, count: int, request: str, as_json: bool) -> None:
    loaded, plans = planned(config, only)
    show = _Printer(plans, request, as_json)
    if follow:
        asyncio.run(_follow(loaded, plans, count, show))
        return

    async def read(session: MachineSession) -> list[LogLine]:
        return await read_logs(session, count, request)

    outcomes = asyncio.run(on_machines(plans, loaded, read, _silent))
    lines = merged([line for outcome in outcomes for line in outcome.result or ()])
    for line in lines:
        show.line(line)
    if request and not lines:
        typer.echo(f"no log has a line of the request {request}", err=True)
    for outcome in outcomes:
        if outcome.error:
            typer.echo(f"error: {one_line(str(outcome.error))}", err=True)
    if any(outcome.error for outcome in outcomes):
        raise typer.Exit(1)


async def _follow(config: ClusterConfig, plans: Sequence[MachinePlan], count: int, show: "_Printer") -> None:
    queue: asyncio.Queue[LogLine] = asyncio.Queue()
    tasks = [asyncio.create_task(_follow_machine(config, plan, count, queue)) for plan in plans]
    try:
        async for line in in_order(queue):
            show.line(line)
    finally:
        for task in tasks:
            task.cancel()


async def _follow_machine(
    config: ClusterConfig, plan: MachinePlan, count: int, queue: "asyncio.Queue[LogLine]"
) -> None:
    """Again and again: a machine that is away is told once, and again when it is back."""
    missing, again_s = "", DeployTimeouts().log_again_s

    async def follow(session: MachineSession) -> None:
        nonlocal missing, count
        if missing:
            typer.echo(f"{plan.name}: is back", err=True)
        missing, first, count = "", count, 0  # after a break new lines alone
        await follow_logs(session, first, queue)

    while True:
        (outcome,) = await on_machines([plan], config, follow, _silent)
        if not missing:
            reason = str(outcome.error or f"{plan.name}: its log ended: is anything deployed there?")
            typer.echo(f"{one_line(reason)}; trying again every {again_s:.0f} s", err=True)
        missing = "told"
        await asyncio.sleep(again_s)


class _Printer:
    def __init__(self, plans: Sequence[MachinePlan], request: str, as_json: bool) -> None:
        self._width = max((len(plan.name) for plan in plans), default=0)
        self._request, self._as_json = request, as_json

    def line(self, line: LogLine) -> None:
        if not line.concerns(self._request):
            return
        typer.echo(json.dumps(self._data(line)) if self._as_json else self._text(line))
        sys.stdout.flush()

    def _data(self, line: LogLine) -> dict[str, object]:
        place = {"machine": line.machine, "service": line.service}
        return place | (line.fields or {"time": line.time, "message": line.text})

    def _text(self, line: LogLine) -> str:
        fields, service = line.fields, line.service.removeprefix("disagg-")
        head = f"{line.time[11:23]:12}  {line.machine.ljust(self._width)}  {service}"
        if "message" not in fields:
            return f"{head}  {one_line(line.text)}"
        more = " ".join(f"{key}={_short(value)}" for key, value in fields.items() if key not in _FIRST)
        level = "" if fields.get("level") in ("info", "debug") else f"{str(fields.get('level', '')).upper()} "
        return one_line(f"{head}  {level}{fields['message']}{'  ' + more if more else ''}")


def _short(value: object) -> object:
    """Enough digits for a reader; --json has all."""
    return f"{value:.4g}" if isinstance(value, float) else value


def _silent(machine: str, text: str) -> None:
    """The log lines alone are printed."""
