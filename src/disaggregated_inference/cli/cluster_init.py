"""`disagg cluster init`: looks at machines over ssh and writes a cluster file for them."""

import asyncio
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from disaggregated_inference.cli.screen import one_line
from disaggregated_inference.cluster import ClusterConfig, load_config
from disaggregated_inference.cluster.deploy import MachinePlan, MachineSession, on_machines
from disaggregated_inference.cluster.inventory import Inventory
from disaggregated_inference.cluster.machines import ClusterMachine
from disaggregated_inference.cluster.proposal import ProposedNode, cluster_toml, propose, require_known
from disaggregated_inference.errors import ConfigError
from disaggregated_inference.identity import Authority
from disaggregated_inference.models import default_home

_OPERATOR = "operator"
_LONGEST_NAME = 50
_MODELS = ("qwen3-coder:30b", "gpt-oss:120b")


def run(hosts: str, models: Sequence[str], output: Path, force: bool, trusted_link: str) -> None:
    _require_place(output, force)
    require_known(models)
    targets = _targets(hosts or _asked("ssh addresses of the machines (USER@HOST, separated by spaces)"))
    found = asyncio.run(_look(targets))
    names = machine_names(found)
    machines = {name: found[target] for name, target in names.items()}
    for name, inventory in machines.items():
        typer.echo(one_line(_line(name, inventory)))
    chosen = propose(machines, models or _MODELS)
    for each in chosen:
        typer.echo(
            f"{each.machine}: {each.role} of {each.model.name} with {each.checkpoint.engine}, {each.needed_gb:.0f} GB"
        )
    identity = "" if trusted_link else _issue_keys(machines, chosen)
    output.write_text(cluster_toml(machines, names, chosen, identity, trusted_link), encoding="utf-8")
    load_config(output, {"DISAGG_TOKEN": "checked later"})
    typer.echo(f"wrote {output}. Read it, then: disagg cluster deploy --config {shlex.quote(str(output))}")


def _require_place(output: Path, force: bool) -> None:
    """Before machines are asked and keys are made."""
    if output.exists() and not force:
        raise ConfigError(f"{output} is there already: give another name with --output, or --force to replace it")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"{output} cannot be written: there is no folder {output.parent}; make it, or choose another")


def _targets(text: str) -> list[str]:
    targets = [word for word in re.split(r"[\s,]+", text) if word]
    if not targets:
        raise ConfigError("no machines: give their ssh addresses, such as --hosts spark-1,spark-2,mac-1,mac-2")
    return list(dict.fromkeys(targets))


def _asked(question: str) -> str:
    if not sys.stdin.isatty():
        raise ConfigError("no machines: give their ssh addresses, such as --hosts spark-1,spark-2,mac-1,mac-2")
    return str(typer.prompt(question))


async def _look(targets: Sequence[str]) -> dict[str, Inventory]:
    async def inventory(session: MachineSession) -> Inventory:
        return session.target.inventory

    plans = [MachinePlan(name=target, machine=ClusterMachine(ssh=target)) for target in targets]
    outcomes = await on_machines(plans, ClusterConfig(), inventory, lambda machine, text: None)
    for outcome in outcomes:
        if outcome.error:
            typer.echo(f"error: {one_line(str(outcome.error))}", err=True)
    if any(outcome.error for outcome in outcomes):
        raise typer.Exit(1)
    return {outcome.machine: outcome.result for outcome in outcomes if outcome.result}


def machine_names(found: dict[str, Inventory]) -> dict[str, str]:
    """A name for each address. Two machines that have the same one, such as two new Macs, get a number."""
    names: dict[str, str] = {}
    for target, inventory in found.items():
        own = name = _name(target, inventory)
        number = 1
        while name in names:
            number += 1
            name = f"{own}-{number}"
        names[name] = target
    return names


def _name(target: str, found: Inventory) -> str:
    """The machine's own name, as a name that a certificate can have."""
    own = (found.host or target).partition(".")[0]
    return re.sub(r"[^a-z0-9]+", "-", own.lower())[:_LONGEST_NAME].strip("-") or "machine"


def _line(name: str, found: Inventory) -> str:
    gpus = ", ".join(gpu.name for gpu in found.gpus)
    parts = [found.release, found.chip, gpus, f"{found.memory_bytes / 1e9:.0f} GB memory"]
    parts += [f"{found.free_disk_bytes / 1e9:.0f} GB disk free", found.python or "no Python 3.11 or newer"]
    parts += [f"{len(found.models)} models", f"services by {found.service_kind}"]
    return f"{name}: {'; '.join(part for part in parts if part)}"


def _issue_keys(machines: dict[str, Inventory], chosen: Sequence[ProposedNode]) -> str:
    """A key for each machine and for this one; those that are there stay. Returns this machine's folder."""
    folder = default_home() / "keys"
    authority = Authority(folder) if (folder / "ca.key").exists() else Authority.create(folder)
    issued = {each.name for each in authority.issued}
    for name, found in machines.items():
        if name not in issued:
            hosts = {found.address, *(line.split()[1] for line in found.links), "127.0.0.1"} - {""}
            authority.issue(name, sorted(hosts))
    if _OPERATOR not in issued:
        authority.issue(_OPERATOR, ())
    typer.echo(f"keys of the machines: {folder} (keep it on this machine, with a backup)")
    return str(folder / _OPERATOR)
