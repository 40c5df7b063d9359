"""`disagg cluster keys`: the cluster's own authority. Its modules are imported when a command runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from disaggregated_inference.cli.arguments import AsJson

if TYPE_CHECKING:
    from disaggregated_inference.identity import Authority, IssuedCertificate

machines_app = typer.Typer(
    help="Deploy to the machines of a cluster over ssh, start, stop and watch them; their keys.", no_args_is_help=True
)
keys_app = typer.Typer(
    help="Make, renew and revoke the keys by which nodes and clients of this cluster know each other.",
    no_args_is_help=True,
)
machines_app.add_typer(keys_app, name="keys")

KeysOption = Annotated[
    str,
    typer.Option(
        "--keys", metavar="DIR", envvar="DISAGG_KEYS", help="Folder of the authority. Default: `keys` in DISAGG_HOME."
    ),
]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        help="Address or host name where others reach the node, for HTTP or for KV transfers; repeatable.",
    ),
]
Days = Annotated[int, typer.Option(min=1, max=3650, metavar="N", help="How long the certificate is valid.")]


@keys_app.command("init")
def init(keys: KeysOption = "") -> None:
    """Make the cluster's authority. Its folder stays on this machine: who has it can admit machines."""
    from disaggregated_inference.identity import Authority

    authority = Authority.create(_folder(keys))
    typer.echo(f"made the cluster's authority in {authority.folder}. Keep this folder on this machine, with a backup.")
    typer.echo("Next, for each node:      disagg cluster keys issue NAME --host ADDRESS")
    typer.echo("and for gateway and CLI:  disagg cluster keys issue gateway")


@keys_app.command("issue")
def issue(
    name: Annotated[str, typer.Argument(help="Name of the node or client, such as spark-1.")],
    host: Hosts = None,
    days: Days = 365,
    keys: KeysOption = "",
) -> None:
    """Make a key and certificate: with --host for a node, without for a gateway or another client of nodes."""
    _tell_copy(name, _authority(keys).issue(name, host or (), days), is_node=bool(host))


@keys_app.command("rotate")
def rotate(
    name: Annotated[str, typer.Argument(help="Name to renew; leave it out with --all.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Renew all names that are not revoked.")] = False,
    host: Hosts = None,
    days: Days = 365,
    keys: KeysOption = "",
) -> None:
    """Make a new key and certificate for a name. The old certificate stays valid until it expires or is revoked.

    A running node uses the new files as soon as they are copied; its running requests go on."""
    if bool(name) == everything:
        raise typer.BadParameter("give a name, or --all", param_hint="NAME")
    if everything and host:
        raise typer.BadParameter("--host is for one name", param_hint="--host")
    authority = _authority(keys)
    for each in authority.names() if everything else (name,):
        folder = authority.rotate(each, host or (), days)
        typer.echo(f"{each}: {folder} holds its new key and certificate. Copy them over the old ones:")
        typer.echo(f"  scp -p {folder}/* MACHINE:identity/")


@keys_app.command("revoke")
def revoke(
    which: Annotated[str, typer.Argument(metavar="NAME|SERIAL", help="A name (all its certificates), or one serial.")],
    keys: KeysOption = "",
) -> None:
    """Revoke certificates. A node refuses them as soon as the new list is in its folder."""
    authority = _authority(keys)
    for each in authority.revoke(which):
        typer.echo(f"revoked {each.name} (serial {each.serial})")
    typer.echo(f"Copy {authority.folder / 'revoked.pem'} into the identity folder of every other machine:")
    for name in authority.names():
        typer.echo(f"  scp {authority.folder / name / 'revoked.pem'} MACHINE:identity/   # {name}")


@keys_app.command("list")
def show(keys: KeysOption = "", as_json: AsJson = False) -> None:
    """List the certificates: names, hosts, expiry, and which are revoked."""
    issued = _authority(keys).issued
    if as_json:
        import msgspec

        typer.echo(json.dumps(msgspec.to_builtins(issued), indent=2))
        return
    rows = [("name", "hosts", "expires", "state", "serial"), *map(_row, issued)]
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)))


def _row(issued: "IssuedCertificate") -> tuple[str, ...]:
    import datetime

    expired = issued.expires_at < datetime.datetime.now(datetime.UTC)
    state = f"revoked {issued.revoked_at:%Y-%m-%d}" if issued.revoked_at else "expired" if expired else "valid"
    hosts = ", ".join(issued.hosts) or "(client)"
    return issued.name, hosts, f"{issued.expires_at:%Y-%m-%d}", state, issued.serial


def _tell_copy(name: str, folder: Path, is_node: bool) -> None:
    typer.echo(f"{name}: {folder} holds its key and certificate. Copy it to its machine and start it with it:")
    typer.echo(f"  scp -pr {folder} MACHINE:identity")
    typer.echo("  disagg serve ... --identity ~/identity" if is_node else "  export DISAGG_IDENTITY=~/identity")


def _authority(keys: str) -> "Authority":
    from disaggregated_inference.identity import Authority

    return Authority(_folder(keys))


def _folder(keys: str) -> Path:
    from disaggregated_inference.models import default_home

    return Path(keys).expanduser() if keys else default_home() / "keys"
