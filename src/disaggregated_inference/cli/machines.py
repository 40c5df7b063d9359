"""`disagg cluster deploy`, `up`, `down`, `restart`, `rollback` and `audit`: what they print."""

import asyncio
import json
import shlex
import sys
import time
from collections.abc import Container, Coroutine, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import typer

from disaggregated_inference.cli.screen import one_line
from disaggregated_inference.cluster import ClusterConfig, join_address, load_config
from disaggregated_inference.cluster.deploy import (
    AuditEntry,
    Deployed,
    Deployment,
    MachineOutcome,
    MachinePlan,
    MachineSession,
    Package,
    ServiceChoice,
    Tell,
    describe_deploy,
    merge_audits,
    on_machines,
    pack_wheel,
    pin_dependencies,
    plan_machines,
    read_audit,
    read_wheel,
    remove_machines,
)
from disaggregated_inference.cluster.deploy import operate as operate_machines
from disaggregated_inference.cluster.ssh import LOCAL, SshTarget
from disaggregated_inference.errors import ConfigError
from disaggregated_inference.timeouts import DeployTimeouts

Result = TypeVar("Result")


class DeploySettings(msgspec.Struct, frozen=True, kw_only=True):
    dry_run: bool = False
    wheel: str = ""
    constraints: str = ""
    start: bool = True


def planned(
    config: str | None, only: Sequence[str], token_file: str = ""
) -> tuple[ClusterConfig, tuple[MachinePlan, ...]]:
    loaded = load_config(config, token_file=token_file)
    for warning in loaded.warnings:
        typer.echo(f"warning: {warning}", err=True)
    return loaded, plan_machines(loaded, only)


def teller(plans: Sequence[MachinePlan]) -> Tell:
    """One line for each step of a machine, with the seconds since the start."""
    width, began_at = max((len(plan.name) for plan in plans), default=0), time.monotonic()

    def tell(machine: str, text: str) -> None:
        typer.echo(f"{time.monotonic() - began_at:6.1f} s  {machine.ljust(width)}  {one_line(text)}")
        sys.stdout.flush()

    return tell


def deploy(config: str | None, token_file: str, only: Sequence[str], settings: DeploySettings) -> bool:
    loaded, plans = planned(config, only, token_file)
    package = Package(
        read_wheel(settings.wheel) if settings.wheel else pack_wheel(),
        _text(settings.constraints) if settings.constraints else pin_dependencies(),
    )
    if settings.dry_run:
        return _dry_run(loaded, plans, package)
    outcomes = _run(Deployment(plans, loaded, package, teller(plans), settings.start).run(), "deploy")
    typer.echo("")
    for outcome in outcomes:
        typer.echo(_deployed(outcome), err=outcome.error is not None)
    failed = {outcome.machine for outcome in outcomes if outcome.error}
    wanted = settings.start and not only and len(failed) < len(plans)
    proven = _prove(loaded, plans, failed) if wanted else True
    return proven and not failed


def _run(work: Coroutine[Any, Any, Result], command: str) -> Result:
    """Ctrl-C may come between two steps of a machine: the user must know how to end them."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        remedy = f"`disagg cluster {command}` again finishes it, `disagg cluster status` shows what runs"
        typer.echo(f"interrupted: some services may be stopped or half changed; {remedy}", err=True)
        raise


def _text(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--constraints: {path} cannot be read: {error}") from None


def _deployed(outcome: MachineOutcome[Deployed]) -> str:
    if outcome.error:
        return _error(outcome.error)
    assert outcome.result
    result = outcome.result
    changed = f"changed: {', '.join(result.changed)}" if result.changed else "nothing to change"
    previous = f"; before: {result.previous}" if result.previous else ""
    note = f"\n  note: {result.note}" if result.note else ""
    return f"{outcome.machine}: {result.release}: {changed}{previous}{note}"


def _dry_run(config: ClusterConfig, plans: Sequence[MachinePlan], package: Package) -> bool:
    async def describe(session: MachineSession) -> list[str]:
        return await describe_deploy(session, package, DeployTimeouts())

    outcomes = asyncio.run(on_machines(plans, config, describe, _silent))
    for outcome in outcomes:
        typer.echo(f"# {outcome.machine}")
        for line in outcome.result or ():
            typer.echo(line)
        if outcome.error:
            typer.echo(_error(outcome.error), err=True)
    typer.echo("# nothing was changed; + would be done, = is done")
    return all(not outcome.error for outcome in outcomes)


def _silent(machine: str, text: str) -> None:
    """For commands whose output is the result alone."""


def _prove(config: ClusterConfig, plans: Sequence[MachinePlan], failed: Container[str]) -> bool:
    """Every pair hands a prompt over, and the gateway answers one; then the endpoint, with a command to try it. What is
    on machines that failed is left out."""
    from disaggregated_inference.cli.cluster_test import prove_gateway, prove_pairs

    left_out = {server.name for plan in plans if plan.name in failed for server in plan.servers}
    has_gateway = bool(config.gateway.machine) and config.gateway.machine not in failed
    passed = True
    gateway = prove_gateway(config, left_out) if has_gateway else iter(())
    for check in chain(prove_pairs(config, left_out), gateway):
        passed = passed and check.passed
        typer.echo(check.line(), err=not check.passed)
    if left_out:
        typer.echo(f"not proven, because their machines failed: {', '.join(sorted(left_out))}")
    if has_gateway or not config.gateway.machine:
        typer.echo(how_to(config))
    return passed


def how_to(config: ClusterConfig) -> str:
    gateway = config.gateway
    if not gateway.machine:
        options = shlex.join(["--config", config.source, "--model", config.names[0]])
        return f"try it: disagg generate {options} 'Hello'"
    place = gateway.host if gateway.host not in ("0.0.0.0", "::") else _address_of(gateway.machine, config)
    scheme = "https" if "--tls-cert" in gateway.arguments else "http"
    url = f"{scheme}://{join_address(place, gateway.port)}"
    body = {"model": config.names[0], "max_tokens": 60, "messages": [{"role": "user", "content": "Hello"}]}
    key = ' -H "Authorization: Bearer $DISAGG_API_KEY"' if gateway.keys else ""
    where = f" (on {gateway.machine})" if place in ("127.0.0.1", "localhost") else ""
    return (
        f"\nendpoint{where}: {url}/v1 (OpenAI), {url} (Anthropic, Ollama)\n"
        f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )


def _address_of(machine: str, config: ClusterConfig) -> str:
    """Where others reach a machine: as its servers are, else as ssh does."""
    (plan,) = plan_machines(config, [machine])
    if plan.servers:
        return plan.servers[0].host
    return "127.0.0.1" if plan.target == LOCAL else SshTarget.parse(plan.target).host


def operate(command: str, config: str | None, only: Sequence[str], role: str, model: str) -> bool:
    loaded, plans = planned(config, only)
    chosen = ServiceChoice(role, loaded.resolve_model(model) if model else "")
    plans = tuple(plan for plan in plans if chosen.may_be_on(plan, loaded))
    if not plans:
        raise ConfigError(f"no {role or 'service'} of {chosen.model} in the cluster file: see `disagg config check`")
    return _all_succeeded(_run(operate_machines(command, plans, loaded, teller(plans), chosen), command))


def _all_succeeded(outcomes: Sequence[MachineOutcome[Any]]) -> bool:
    for outcome in outcomes:
        if outcome.error:
            typer.echo(_error(outcome.error), err=True)
    return all(not outcome.error for outcome in outcomes)


def _error(error: Exception) -> str:
    """With words of the machine, which must not act on the terminal."""
    return f"error: {one_line(str(error))}"


def remove(config: str | None, only: Sequence[str], models: bool, is_sure: bool) -> bool:
    loaded, plans = planned(config, only)
    kept = "" if models else "; models stay (--models)"
    typer.echo(f"services, releases, secrets and logs are removed from: {', '.join(plan.name for plan in plans)}{kept}")
    if not is_sure and not sys.stdin.isatty():
        raise ConfigError("nothing was removed: there is no terminal for the question; give --yes")
    if not is_sure and not typer.confirm("remove all of it?"):
        typer.echo("nothing was removed")
        return False
    return _all_succeeded(_run(remove_machines(plans, loaded, teller(plans), models), "remove"))


def audit(config: str | None, only: Sequence[str], count: int, as_json: bool) -> bool:
    """Whether every machine could be asked."""
    loaded, plans = planned(config, only)

    async def read(session: MachineSession) -> list[AuditEntry]:
        return await read_audit(session.shell, session.place.audit)

    outcomes = asyncio.run(on_machines(plans, loaded, read, _silent))
    entries = merge_audits({outcome.machine: outcome.result or [] for outcome in outcomes})[-count:]
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(entries), indent=2))
    else:
        _print_audit(entries)
    return _all_succeeded(outcomes)


def _print_audit(entries: Sequence[AuditEntry]) -> None:
    rows: list[tuple[Any, ...]] = [("time", "who", "command", "release", "machines", "result")]
    for entry in entries:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))
        facts = (at, entry.who, entry.command, entry.release, ", ".join(entry.releases), entry.result)
        rows.append(tuple(map(one_line, facts)))
    widths = [max(len(str(row[column])) for row in rows) for column in range(5)]
    for row in rows:
        typer.echo("  ".join(str(cell).ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip())
    if not entries:
        typer.echo("nothing was deployed there yet")
