"""Command-line arguments that several commands share."""

from typing import Annotated

import typer

Drain = Annotated[int, typer.Option("--drain", min=0, help="Time for running requests after SIGTERM, in seconds.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
LocalModel = Annotated[str, typer.Option("--model", "-m", help="Model name, alias or folder on this machine.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error. The log is JSON lines on standard error.")]
