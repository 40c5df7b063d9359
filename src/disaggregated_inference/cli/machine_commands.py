"""`disagg cluster`: deploy to machines, start and stop what runs there, look at it. Modules are imported when a command
runs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from disaggregated_inference.cli.arguments import AsJson, ClusterTokenFile, Config
from disaggregated_inference.cli.keys import machines_app

__all__ = ["machines_app"]

OnlyMachines = Annotated[
    list[str] | None,
    typer.Option("--machine", "-m", metavar="NAME", help="Only this machine; repeatable. Default: all."),
]


class ServiceRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    GATEWAY = "gateway"


OnlyRole = Annotated[ServiceRole | None, typer.Option("--role", help="Only services of this role. Default: all.")]
OnlyModel = Annotated[str, typer.Option("--model", metavar="NAME", help="Only nodes of this model. Default: all.")]


@machines_app.command()
def deploy(
    config: Config = None,
    machine: OnlyMachines = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every command and file, and change nothing.")
    ] = False,
    wheel: Annotated[
        str, typer.Option(metavar="FILE", help="Wheel to deploy. Default: one of the package that runs now.")
    ] = "",
    constraints: Annotated[
        str, typer.Option(metavar="FILE", help="Versions of packages, for pip. Default: those that are installed here.")
    ] = "",
    start: Annotated[bool, typer.Option(help="--no-start: prepare the release; what runs is not touched.")] = True,
    token_file: ClusterTokenFile = "",
) -> None:
    """Install the cluster on its machines over ssh, start it, and wait until every pair has proven itself.

    A second run changes nothing. A machine that fails is reported, the others go on. Machines that serve the same model
    change one after the other, and a release that does not become healthy is taken back."""
    from disaggregated_inference.cli import machines

    settings = machines.DeploySettings(dry_run=dry_run, wheel=wheel, constraints=constraints, start=start)
    raise typer.Exit(0 if machines.deploy(config, token_file, machine or (), settings) else 1)


@machines_app.command()
def up(config: Config = None, machine: OnlyMachines = None, role: OnlyRole = None, model: OnlyModel = "") -> None:
    """Start what is deployed, now and at every boot, and wait until it is healthy."""
    _operate("up", config, machine, role, model)


@machines_app.command()
def down(config: Config = None, machine: OnlyMachines = None, role: OnlyRole = None, model: OnlyModel = "") -> None:
    """Stop what is deployed, when its running requests are done. It does not start at the next boot."""
    _operate("down", config, machine, role, model)


@machines_app.command()
def restart(config: Config = None, machine: OnlyMachines = None, role: OnlyRole = None, model: OnlyModel = "") -> None:
    """Restart services, one node of a model at a time."""
    _operate("restart", config, machine, role, model)


@machines_app.command()
def rollback(config: Config = None, machine: OnlyMachines = None) -> None:
    """Return to the release before the current one. A second rollback returns to the newer one.

    Code, packages, settings and services go back. Tokens, keys and certificates stay as they are."""
    _operate("rollback", config, machine, None, "")


def _operate(command: str, config: str | None, machine: list[str] | None, role: ServiceRole | None, model: str) -> None:
    from disaggregated_inference.cli import machines

    raise typer.Exit(0 if machines.operate(command, config, machine or (), role or "", model) else 1)


@machines_app.command()
def remove(
    config: Config = None,
    machine: OnlyMachines = None,
    models: Annotated[bool, typer.Option("--models", help="Remove the models that a deploy fetched, too.")] = False,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove everything that was deployed: services, releases, environments, secrets and logs."""
    from disaggregated_inference.cli import machines

    raise typer.Exit(0 if machines.remove(config, machine or (), models, is_sure) else 1)


@machines_app.command()
def status(config: Config = None, machine: OnlyMachines = None, as_json: AsJson = False) -> None:
    """Show every machine: its release, its services, their health, and which path the KV takes.

    It asks over ssh alone. The exit code is 0 if all services are healthy."""
    from disaggregated_inference.cli import machine_status

    raise typer.Exit(0 if machine_status.run(config, machine or (), as_json) else 1)


@machines_app.command()
def logs(
    config: Config = None,
    machine: OnlyMachines = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")] = False,
    count: Annotated[int, typer.Option("--count", "-n", min=0, metavar="N", help="Last lines of each service.")] = 100,
    request: Annotated[
        str, typer.Option(metavar="ID", help="Only lines of this request, by its x-request-id, of all that is kept.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per log line.")] = False,
) -> None:
    """Print the logs of all machines, merged by time."""
    from disaggregated_inference.cli import machine_logs

    machine_logs.run(config, machine or (), follow=follow, count=count, request=request, as_json=as_json)


@machines_app.command()
def audit(
    config: Config = None,
    machine: OnlyMachines = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, metavar="N", help="Number of entries.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show who deployed, started, stopped or rolled back what, and when."""
    from disaggregated_inference.cli import machines

    raise typer.Exit(0 if machines.audit(config, machine or (), count, as_json) else 1)


@machines_app.command("test")
def check_cluster(config: Config = None, token_file: ClusterTokenFile = "", as_json: AsJson = False) -> None:
    """Test the running cluster: health, a prompt through each pair and through the gateway, all models at once, a
    forced fallback.

    The exit code is 0 if all tests pass. It asks the nodes from here, by the addresses of the cluster file, and the
    gateway on its machine over ssh; where that needs an API key, with the one in DISAGG_API_KEY."""
    from disaggregated_inference.cli import cluster_test

    raise typer.Exit(0 if cluster_test.run(config, token_file, as_json) else 1)


@machines_app.command("init")
def init_cluster(
    hosts: Annotated[
        str, typer.Option(metavar="HOST,HOST,...", help="ssh addresses of the machines. Default: it asks.")
    ] = "",
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Model to serve; repeatable. Default: qwen3-coder:30b and gpt-oss:120b."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")] = Path(
        "cluster.toml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    trusted_link: Annotated[
        str,
        typer.Option(
            metavar="WORDS", help="No keys: say in words why nothing else is on the network between the machines."
        ),
    ] = "",
) -> None:
    """Look at machines over ssh, propose roles, engines and models that fit, and write a cluster file."""
    from disaggregated_inference.cli import cluster_init

    cluster_init.run(hosts, model or (), output, force, trusted_link)
