"""`disagg config`: look at a cluster file before anything depends on it."""

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from disaggregated_inference.cluster.config import ClusterConfig

config_app = typer.Typer(help="The cluster file: check it, or print an example.", no_args_is_help=True)


class ConfigFormat(StrEnum):
    JSON = "json"
    TOML = "toml"


_SAMPLES = {ConfigFormat.JSON: "cluster.json", ConfigFormat.TOML: "cluster-192.toml"}


@config_app.command("check")
def check_config(
    path: Annotated[str | None, typer.Argument(help="Default: DISAGG_CONFIG, ./cluster.json, ./cluster.toml.")] = None,
    named: Annotated[
        str | None, typer.Option("--config", "-c", metavar="PATH", help="The same, as other commands have it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings, too.")] = False,
) -> None:
    """Read a cluster file and say what it means, or what is wrong with it."""
    from disaggregated_inference.cli.errors import as_data
    from disaggregated_inference.cluster.config import load_config
    from disaggregated_inference.errors import ConfigError
    from disaggregated_inference.orchestrator.request import require_defaults

    if None not in (path, named):
        raise typer.BadParameter("the file is named twice: leave --config out")
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
        ConfigFormat, typer.Option(help="json: the short one; toml: all that can be said.")
    ] = ConfigFormat.JSON,
) -> None:
    """Print a cluster file to start from: `disagg config example > cluster.json`."""
    typer.echo(sample(format), nl=False)


def sample(format: ConfigFormat) -> str:
    from importlib.resources import files

    return (files("disaggregated_inference.cluster") / "samples" / _SAMPLES[format]).read_text(encoding="utf-8")


def _as_text(config: "ClusterConfig") -> str:
    rows = [(server.role, server.name, server.url, server.model) for server in config.servers]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{config.source}: {_counted(len(rows), 'server')}, {_counted(len(config.names), 'model')}"]
    lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [_model_line(config, name) for name in config.names]
    return "\n".join([*lines, *(f"warning: {text}" for text in config.warnings)])


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _model_line(config: "ClusterConfig", name: str) -> str:
    servers = config.servers_of(name)
    aliases = f" (also {', '.join(config.options_of(name).aliases)})" if config.options_of(name).aliases else ""
    parts = [
        f"{role} on {', '.join(server.name for server in servers if role in server.roles) or 'none'}"
        for role in ("prefill", "decode")
    ]
    return f"model {name}{aliases}: {'; '.join(parts)}"


def _as_data(config: "ClusterConfig") -> dict[str, Any]:
    """Everything but the tokens."""
    import msgspec

    about: dict[str, Any] = msgspec.to_builtins(config)
    for server in about["prefill_servers"] + about["decode_servers"]:
        server["token"] = bool(server["token"])
    about["token"] = bool(about["token"])
    served = {name: [server.name for server in config.servers_of(name)] for name in config.names}
    return {"ok": True} | about | {"served": served}
