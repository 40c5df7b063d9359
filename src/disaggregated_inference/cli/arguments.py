"""Command-line arguments that several commands share."""

from typing import Annotated, Literal

import typer

Drain = Annotated[
    int, typer.Option("--drain", min=0, metavar="SECONDS", help="Time for running requests after SIGTERM.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
LocalModel = Annotated[
    str, typer.Option("--model", "-m", metavar="NAME", help="Model name, alias or folder on this machine.")
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        envvar="DISAGG_CONFIG",
        metavar="PATH",
        help="Cluster file. Default: ./cluster.json, then ./cluster.toml.",
    ),
]
Token = Annotated[
    str,
    typer.Option("--token", hidden=True, help="Refused: use DISAGG_TOKEN or --token-file."),
]
TokenFile = Annotated[
    str,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File that contains the bearer token. Default: DISAGG_TOKEN, then the file in DISAGG_TOKEN_FILE.",
    ),
]
ClusterTokenFile = Annotated[
    str,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File that contains the token of nodes without one of their own in the cluster file. Default: `token` in"
        " the cluster file, DISAGG_TOKEN, the file in DISAGG_TOKEN_FILE.",
    ),
]
IdentityFolder = Annotated[
    str,
    typer.Option(
        "--identity",
        metavar="DIR",
        help="Folder with this machine's key and certificate, from `disagg cluster keys issue`. Default:"
        " DISAGG_IDENTITY; without it, plain HTTP.",
    ),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], typer.Option(help="The log is JSON lines on standard error.")
]
