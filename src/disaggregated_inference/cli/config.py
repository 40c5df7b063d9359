"""`disagg config`: check a cluster file, print an example or the reference."""

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from disaggregated_inference.cli.arguments import AsJson

if TYPE_CHECKING:
    from disaggregated_inference.cluster import ClusterConfig

config_app = typer.Typer(help="Check a cluster file, print an example or the reference.", no_args_is_help=True)


class ConfigFormat(StrEnum):
    JSON = "json"
    TOML = "toml"


_SAMPLES = {ConfigFormat.JSON: "cluster.json", ConfigFormat.TOML: "cluster-192.toml"}


@config_app.command("check")
def check_config(
    path: Annotated[
        str | None, typer.Argument(help="Cluster file. Default: DISAGG_CONFIG, ./cluster.json, ./cluster.toml.")
    ] = None,
    named: Annotated[str | None, typer.Option("--config", "-c", metavar="PATH", help="Same as the argument.")] = None,
    as_json: AsJson = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if there are warnings.")] = False,
) -> None:
    """Check a cluster file and list its servers and models."""
    from disaggregated_inference.cli.errors import as_data
    from disaggregated_inference.cluster import load_config
    from disaggregated_inference.errors import ConfigError
    from disaggregated_inference.orchestrator import require_defaults

    if None not in (path, named):
        raise typer.BadParameter("the file is given twice: leave --config out")
    try:
        config = load_config(named if path is None else path)
        for name in config.names:
            require_defaults(config, name)
    except ConfigError as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"ok": False, "error": as_data(error)}, indent=2))
        raise typer.Exit(1) from None
    typer.echo(json.dumps(_as_data(config), indent=2) if as_json else _as_text(config))
    if strict and config.warnings:
        raise typer.Exit(1)


@config_app.command("example")
def example_config(
    format: Annotated[
        ConfigFormat, typer.Option(help="json: a short example; toml: every setting.")
    ] = ConfigFormat.JSON,
    local: Annotated[bool, typer.Option("--local", help="The file of the last `disagg up` on this machine.")] = False,
) -> None:
    """Print an example cluster file: `disagg config example > cluster.json`."""
    if local:
        if format is not ConfigFormat.JSON:
            from disaggregated_inference.errors import ConfigError

            raise ConfigError("--local prints JSON: leave out --format")
        from disaggregated_inference.cli.local_cluster import read_cluster_file

        typer.echo(read_cluster_file(), nl=False)
    else:
        typer.echo(sample(format), nl=False)


@config_app.command("reference")
def reference_page() -> None:
    """Print the reference of every field of a cluster file, as Markdown."""
    from disaggregated_inference.cluster import reference

    typer.echo(reference(), nl=False)


def sample(format: ConfigFormat) -> str:
    from importlib.resources import files

    return (files("disaggregated_inference.cluster") / "samples" / _SAMPLES[format]).read_text(encoding="utf-8")


def _as_text(config: "ClusterConfig") -> str:
    rows = [(server.role, server.name, server.url, server.model) for server in config.servers]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{config.source}: {_count(len(rows), 'server')}, {_count(len(config.names), 'model')}"]
    lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [_model_line(config, name) for name in config.names]
    return "\n".join([*lines, *(f"warning: {text}" for text in config.warnings)])


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _model_line(config: "ClusterConfig", name: str) -> str:
    servers = config.servers_of(name)
    aliases = f" (also {', '.join(config.options_of(name).aliases)})" if config.options_of(name).aliases else ""
    parts = [
        f"{role} on {', '.join(server.name for server in servers if role in server.roles) or 'none'}"
        for role in ("prefill", "decode")
    ]
    return f"model {name}{aliases}: {'; '.join(parts)}"


def _as_data(config: "ClusterConfig") -> dict[str, Any]:
    """Everything except the values of tokens."""
    import msgspec

    data: dict[str, Any] = msgspec.to_builtins(config)
    for server in data["prefill_servers"] + data["decode_servers"]:
        server["token"] = bool(server["token"])
    data["token"] = bool(data["token"])
    served = {name: [server.name for server in config.servers_of(name)] for name in config.names}
    return {"ok": True} | data | {"served": served}
