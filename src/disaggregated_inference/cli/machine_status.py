"""`disagg cluster status`: machines, services, health, KV paths, and the verdict of every model."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disaggregated_inference.api import PathStatus
from disaggregated_inference.cli.machines import planned
from disaggregated_inference.cli.screen import one_line, stdout_console
from disaggregated_inference.cluster import ClusterConfig
from disaggregated_inference.cluster.deploy import (
    MachineOverview,
    MachinePlan,
    ServiceOverview,
    look_at,
    on_machines,
    path_in_use,
)
from disaggregated_inference.orchestrator import ModelVerdict, verdict_of

_COLOURS = {"healthy": "green", "loading": "yellow", "draining": "yellow", "degraded": "yellow"}


def run(config: str | None, only: Sequence[str], as_json: bool) -> bool:
    """Whether every service is healthy."""
    loaded, plans = planned(config, only)
    machines = asyncio.run(_look(loaded, plans))
    verdicts = {} if only else model_verdicts(loaded, machines)  # other machines may serve the models, too
    if as_json:
        typer.echo(json.dumps(_as_data(machines, verdicts), indent=2))
    else:
        stdout_console().print(render(machines, verdicts))
    return all(machine.is_up for machine in machines)


async def _look(config: ClusterConfig, plans: Sequence[MachinePlan]) -> list[MachineOverview]:
    outcomes = await on_machines(plans, config, look_at, lambda machine, text: None)
    return [
        outcome.result or MachineOverview(name=outcome.machine, error=str(outcome.error or "")) for outcome in outcomes
    ]


def model_verdicts(config: ClusterConfig, machines: Sequence[MachineOverview]) -> dict[str, ModelVerdict]:
    """A node on a machine that does not answer is down."""
    healthy = {service.title for machine in machines for service in machine.services if service.health == "healthy"}
    return {
        name: verdict_of([(server.role, server.name in healthy) for server in config.servers_of(name)])
        for name in config.names
    }


def _as_data(machines: Sequence[MachineOverview], verdicts: dict[str, ModelVerdict]) -> dict[str, Any]:
    data = msgspec.to_builtins(list(machines))
    for machine, overview in zip(data, machines, strict=True):
        for service, known in zip(machine["services"], overview.services, strict=True):
            service["kv_path"] = path_in_use(known.paths) or None
    return {"machines": data, "models": {name: str(verdict) for name, verdict in verdicts.items()}}


def render(machines: Sequence[MachineOverview], verdicts: dict[str, ModelVerdict]) -> RenderableType:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("machine", "service", "role", "engine", "state", "restarts", "KV from"):
        table.add_column(name, no_wrap=name != "KV from")
    for machine in machines:
        for row in _rows(machine):
            table.add_row(*row)
    reasons = [
        Text(one_line(f"{service.title}: {service.why}"), "red")
        for machine in machines
        for service in machine.services
        if service.why and service.health != "healthy"
    ]
    errors = [Text(one_line(machine.error), "red") for machine in machines if machine.error]
    releases = [
        Text(one_line(f"{each.name}: {each.release}, {each.kind}, {each.system}"), "dim")
        for each in machines
        if each.release
    ]
    models = [
        Text(f"{name}: {verdict}", "green" if verdict == ModelVerdict.ALL_UP else "red")
        for name, verdict in verdicts.items()
    ]
    return Group(table, *errors, *reasons, *releases, *models)


def _rows(machine: MachineOverview) -> list[tuple[str | Text, ...]]:
    if not machine.services:
        return [(machine.name, "-", "-", "-", Text("unknown", "red"), "-", "-")]
    return [_row(machine.name, service) for service in machine.services]


def _row(machine: str, service: ServiceOverview) -> tuple[str | Text, ...]:
    state = Text(one_line(service.health), _COLOURS.get(service.health, "red"))
    engine = one_line(service.engine) or "-"
    return machine, service.title, service.role, engine, state, str(service.restarts), _kv_path(service)


def _kv_path(service: ServiceOverview) -> str:
    """The path in use; where others failed, which."""
    if not service.paths:
        return "-"
    current = path_in_use(service.paths)
    gbps = next((_gbps(path) for path in service.paths if _address(path) == current), "")
    failed = [f"{_address(path)} failed {path.failures}x" for path in service.paths if path.failures]
    return (current + gbps or "not used yet") + (f" ({', '.join(failed)})" if failed else "")


def _address(path: PathStatus) -> str:
    return f"{path.host}:{path.port}"


def _gbps(path: PathStatus) -> str:
    return f", {path.goodput_bytes_s * 8 / 1e9:.2g} Gb/s" if path.goodput_bytes_s else ""
